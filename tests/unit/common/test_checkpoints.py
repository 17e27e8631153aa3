"""Where a model's files are looked for, and what of them is fetched from a hub."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from services.common.checkpoints.checkpoint import chosen, digest, is_hub_id, locate, text_digest
from services.common.config import ModelSpec, Settings


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("owner/name", True),
        ("gpt2", False),
        ("/models", False),
        ("./models", False),
        ("~/models", False),
        ("owner/", False),
        ("a/b/c", False),
        ("", False),
    ],
)
def test_a_hub_id_is_an_owner_and_a_name(path: str, is_one: bool) -> None:
    assert is_hub_id(path) == is_one


class Hub:
    """A hub whose one model has the revision "abc"; notes what is fetched."""

    def __init__(self, folder: Path, failure: Exception | None = None) -> None:
        self.folder = folder
        self.failure = failure
        self.kept = True  # a copy from before
        self.fetched: list[dict[str, Any]] = []

    def model_info(self, name: str, timeout: float) -> SimpleNamespace:
        assert 0 < timeout <= 10, "it is told within seconds"
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(sha="abc")

    def snapshot_download(self, name: str, **options: Any) -> str:
        if options.get("local_files_only") and not self.kept:
            raise LocalEntryNotFoundError("none")
        self.fetched.append({"name": name, **options})
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return made


SPEC = ModelSpec(name="tiny", path="owner/name")


def test_a_folder_comes_before_a_hub_s_model_of_its_name(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert locate(SPEC).resolve() == tmp_path / "owner" / "name"
    assert not hub.fetched


@pytest.mark.parametrize("weights", [True, False])
def test_the_hub_s_newest_is_fetched_and_weights_only_where_wanted(hub: Hub, weights: bool) -> None:
    assert locate(SPEC, weights=weights) == hub.folder
    (fetched,) = hub.fetched
    assert (fetched["name"], fetched["revision"]) == ("owner/name", "abc")
    wanted = fetched["allow_patterns"]
    assert {"*.json", "*.jinja"} <= set(wanted)
    assert ("*.safetensors" in wanted) == weights


def test_a_copy_from_before_does_while_the_hub_gives_no_answer(hub: Hub) -> None:
    hub.failure = httpx.ConnectTimeout("no answer\nat all")
    assert locate(SPEC) == hub.folder
    assert [f.get("local_files_only") for f in hub.fetched] == [True]
    hub.kept = False
    with pytest.raises(FileNotFoundError, match=r"'tiny'.*gave no answer \(no answer\)$"):
        locate(SPEC)


def test_terms_that_are_not_accepted_are_no_reason_to_use_an_old_copy(hub: Hub) -> None:
    answer = httpx.Response(403, request=httpx.Request("GET", "http://hub/owner/name"))
    hub.failure = GatedRepoError("gated", response=answer)
    with pytest.raises(FileNotFoundError, match=r"'tiny'.*HF_TOKEN and its terms"):
        locate(SPEC)
    assert not hub.fetched


@pytest.mark.parametrize(("path", "hint"), [("gpt2", True), ("/no/such/folder", False)])
def test_what_is_no_folder_and_no_hub_id_is_told(path: str, hint: bool) -> None:
    with pytest.raises(FileNotFoundError, match=f"'tiny': there is no folder {path}") as error:
        locate(ModelSpec(name="tiny", path=path))
    assert ("OWNER/NAME" in str(error.value)) == hint


def test_the_first_model_is_chosen_by_no_name_and_others_by_theirs() -> None:
    settings = Settings(models=[ModelSpec(name=name, path=name) for name in ("a", "b")])
    assert [chosen(settings, name).name for name in ("", "a", "b")] == ["a", "a", "b"]
    with pytest.raises(ValueError, match=r"'c' is not served here.*a, b"):
        chosen(settings, "c")
    with pytest.raises(ValueError, match="none"):
        chosen(Settings(), "")


def test_a_digest_is_of_the_whole_checkpoint_wherever_it_lies(tmp_path: Path) -> None:
    one, same = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "elsewhere")
    assert digest(one) == digest(same)
    assert len(digest(one)) == 16
    (same / "README.md").write_text("not of the model")
    assert digest(one) == digest(same)


@pytest.mark.parametrize("at", [0, 123 * 2**10, 4 * 2**20 - 1])
def test_trained_further_it_has_another_digest(at: int, tmp_path: Path) -> None:
    """All weights change; at the least, in each of its pieces."""
    one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other")
    weights = other / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[max(0, at - 16 * 2**10) : at + 16 * 2**10] = b"\1" * len(
        changed[max(0, at - 16 * 2**10) : at + 16 * 2**10]
    )
    weights.write_bytes(changed)
    assert digest(one) != digest(other)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_any_file_of_the_model_makes_its_digest(name: str, tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other")
    (other / name).write_bytes((other / name).read_bytes() + b" ")
    assert digest(one) != digest(other)
    (other / name).unlink()
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "tokenizer.model",
        "merges.txt",
    ],
)
def test_whatever_a_tokenizer_reads_makes_both_digests(name: str, tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other")
    (other / name).parent.mkdir(exist_ok=True)
    (other / name).write_text("a")
    before = digest(other), text_digest(other)
    assert digest(one) != before[0]
    assert text_digest(one) != before[1]
    (other / name).write_text("b")
    assert digest(other) != before[0]
    assert text_digest(other) != before[1]


def test_weights_are_nothing_to_a_tokenizer(tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other")
    (other / "model.safetensors").unlink()  # where they are not downloaded
    assert text_digest(one) == text_digest(other)


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(4 * 2**20))
    return folder
