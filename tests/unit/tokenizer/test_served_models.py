"""Checkpoints are read as they are found, and what is missing is said with the model's name."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common.config import ModelSpec
from services.common.errors import PenstockError
from services.tokenizer.models import Models, ServedModel, load
from tests.support.tokenizers import byte_level, write_tokenizer


def write(folder: Path, config: dict[str, Any]) -> ModelSpec:
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec(name="tiny", path=str(folder))


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
    text = "The water of the penstock"
    assert load(spec).tokenizer.encode(text).ids == byte_level().encode(text).ids


def test_a_template_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    spec = ModelSpec(name="tiny", path=str(tmp_path))
    assert load(spec).template is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load(spec).template is not None


def test_a_checkpoint_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.model.save(str(tmp_path))  # vocab.json and merges.txt, as GPT-2 came
    config = {"model_type": "gpt2", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(ModelSpec(name="old", path=str(tmp_path)))
    text = "The water 東京"
    assert model.tokenizer.encode(text).ids == tokenizer.encode(text).ids


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
        load(ModelSpec(name="tiny", path=str(folder)))
    assert not ran.exists()


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json", "max_position_embeddings"])
def test_what_is_missing_is_said_with_the_model_s_name(tmp_path: Path, missing: str) -> None:
    spec = write(tmp_path, {"vocab_size": 320, "model_type": "llama"})
    if missing != "max_position_embeddings":
        (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match="'tiny'") as error:
        load(spec)
    assert missing == "tokenizer.json" or missing in str(error.value)


def test_unknown_models_are_not_found(model: ServedModel) -> None:
    models = Models([model])
    assert models["tiny"] is model
    with pytest.raises(PenstockError) as error:
        models["huge"]
    assert (error.value.code, error.value.param) == (grpc.StatusCode.NOT_FOUND, "model")
    (info,) = models.info()
    assert (info.name, info.window, info.created) == ("tiny", 512, model.created)


def test_the_window_is_bounded_by_the_room_and_by_the_model_s_own(model: ServedModel) -> None:
    models = Models([model])
    assert models.bound("tiny", 100)
    before = models["tiny"]
    assert models.info()[0].window == before.window == 100
    assert not models.bound("tiny", 100)
    assert models.bound("tiny", 200)
    assert models["tiny"].window == 200
    assert before.window == 100  # of a request under way
    assert models.bound("tiny", 10_000)
    assert models["tiny"].window == 512
    assert not models.bound("huge", 100)
