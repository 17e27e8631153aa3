"""Checkpoints are read as they are found, and what is missing is said with the model's name."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.common.checkpoints.checkpoint import digest
from services.common.config import ModelSpec
from services.common.served_models import Checkpoint
from services.tokenizer.checkpoints.models import _tokenizer, load
from tests.support.served import checkpoint_of
from tests.support.tokenizers import byte_level, write_tokenizer


def write(folder: Path, config: dict[str, Any]) -> Checkpoint:
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return checkpoint_of(folder, "tiny")


def test_window_and_vocabulary_are_the_model_s(tmp_path: Path) -> None:
    spec = write(tmp_path, {"max_position_embeddings": 512, "vocab_size": 384})
    model = load(spec)
    assert (model.window, model.vocab_size) == (512, 384)
    assert load(spec, max_window=100).window == 100
    assert load(spec, max_window=1000).window == 512


def test_the_language_part_of_a_larger_model_counts(tmp_path: Path) -> None:
    config = {"text_config": {"max_position_embeddings": 256}}
    model = load(write(tmp_path, config))
    assert (model.window, model.vocab_size) == (256, 320)


def test_truncation_and_padding_of_the_file_are_not_used(tmp_path: Path) -> None:
    spec = write(tmp_path, {"max_position_embeddings": 512})
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spec = checkpoint_of(tmp_path, "tiny")
    text = "The water of the penstock"
    assert load(spec).tokenizer.encode(text).ids == byte_level().encode(text).ids


def test_a_template_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    assert load(checkpoint_of(tmp_path, "tiny")).template is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load(checkpoint_of(tmp_path, "tiny")).template is not None


def test_a_checkpoint_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.model.save(str(tmp_path))  # vocab.json and merges.txt, as GPT-2 came
    config = {"model_type": "gpt2", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(checkpoint_of(tmp_path, "old"))
    text = "The water 東京"
    assert model.tokenizer.encode(text).ids == tokenizer.encode(text).ids


def test_models_that_come_at_once_wait_for_one_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers does, and long enough for the second to come to it."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import sys, time, types\n"
        "sys.begun.set()\n"
        "time.sleep(0.2)\n"
        "whole = types.ModuleType(__name__)\n"
        "made = lambda folder, **_: types.SimpleNamespace(is_fast=True)\n"
        "whole.PreTrainedTokenizerFast = types.SimpleNamespace(from_pretrained=made)\n"
        "sys.modules[__name__] = whole\n"
    )
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setitem(sys.modules, "transformers", sys)  # and so put back
    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.syspath_prepend(str(tmp_path))
    begun = threading.Event()
    monkeypatch.setattr(sys, "begun", begun, raising=False)
    spec = ModelSpec(name="m", path=str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_tokenizer, spec, tmp_path)
        assert begun.wait(20)
        second = pool.submit(_tokenizer, spec, tmp_path)
        assert first.result().is_fast
        assert second.result().is_fast


def test_a_checkpoints_own_code_is_not_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs in a terminal could be asked, and say yes."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    byte_level().model.save(str(folder))
    code = f"open({str(ran)!r}, 'w')\nfrom transformers import GPT2TokenizerFast as Own\n"
    (folder / "own.py").write_text(code)
    told = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text('{"model_type": "own", "max_position_embeddings": 64}')
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(ValueError, match=r"'tiny': .* code of its own, which is not run"):
        load(checkpoint_of(folder, "tiny"))
    assert not ran.exists()


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json", "max_position_embeddings"])
def test_what_is_missing_is_said_with_the_model_s_name(tmp_path: Path, missing: str) -> None:
    spec = write(tmp_path, {"vocab_size": 320, "model_type": "llama"})
    if missing != "max_position_embeddings":
        (tmp_path / missing).unlink()
        spec = checkpoint_of(tmp_path, "tiny")
    with pytest.raises(ValueError, match="'tiny'") as error:
        load(spec)
    assert missing == "tokenizer.json" or missing in str(error.value)


def test_other_files_than_those_of_the_workers_are_not_tokenized_with(tmp_path: Path) -> None:
    """Of another host, or written over meanwhile."""
    served = write(tmp_path, {"max_position_embeddings": 512})
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match=f"'tiny'.*{served.text_digest}"):
        load(served)


def test_a_model_knows_its_checkpoint(tmp_path: Path) -> None:
    served = write(tmp_path, {"max_position_embeddings": 512})
    assert load(served).checkpoint == served.digest == digest(tmp_path)
