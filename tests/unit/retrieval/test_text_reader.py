"""What a checkpoint's files say of how it reads texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.retrieval.text_reader import TextReader
from tests.support.minilm import FOLDER

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
SENTENCES, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"


def reader(folder: Path, **files: Any) -> TextReader:
    """MiniLM's tokenizer beside these JSON files; a window of 12 if nothing else is said."""
    (folder / "tokenizer.json").symlink_to(FOLDER / "tokenizer.json")
    for name, content in ({SENTENCES: {"max_seq_length": 12}} | files).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return TextReader(folder)


@pytest.mark.parametrize(
    ("sentences", "config", "tokenizer", "window"),
    [
        (10, {"max_position_embeddings": 20}, 30, 10),
        (30, {"max_position_embeddings": 10}, 20, 10),
        (20, {"max_position_embeddings": 30}, 10, 10),
        (None, {"max_position_embeddings": 20}, None, 20),
        (None, {}, 1e30, int(1e30)),
        (
            None,
            {"max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 1},
            0,
            512,
        ),
        (None, {"max_position_embeddings": 514, "model_type": "xlm-roberta"}, 0, 512),
        (None, {"max_position_embeddings": 514, "model_type": "bert", "pad_token_id": 1}, 0, 514),
    ],
)
def test_the_window_is_the_least_that_any_file_says(
    tmp_path: Path, sentences: Any, config: Any, tokenizer: Any, window: int
) -> None:
    files = {
        SENTENCES: {"max_seq_length": sentences},
        CONFIG: config,
        TOKENIZER: {"model_max_length": tokenizer},
    }
    assert reader(tmp_path, **files).max_tokens == window


@pytest.mark.parametrize(
    ("token", "id"),
    [("[PAD]", 0), ("[SEP]", 102), ({"content": "[SEP]"}, 102), (None, 0), ("?", 1029)],
)
def test_padding_is_written_in_either_form(tmp_path: Path, token: Any, id: int) -> None:
    assert reader(tmp_path, **{TOKENIZER: {"pad_token": token}}).pad == id


@pytest.mark.parametrize("key", ["document", "passage", "corpus"])
def test_instructions_go_before_questions_and_passages_and_no_other_text(
    tmp_path: Path, key: str
) -> None:
    made = reader(tmp_path, **{PROMPTS: {"prompts": {"query": "ask: ", key: "tell: "}}})
    plain = made.text
    assert made.query("tide").ids == plain("ask: tide").ids != plain("tide").ids
    assert made.passage("", "tide").ids == plain("tell: tide").ids
    assert made.passage("Sea", "tide").ids == plain("tell: Sea\ntide").ids


def test_pooling_without_the_instruction_is_refused(tmp_path: Path) -> None:
    prompts = {PROMPTS: {"prompts": {"query": "ask: "}}}
    (tmp_path / "none").mkdir()
    (tmp_path / "with").mkdir()
    pooling = {"1_Pooling/config.json": {"include_prompt": False}}
    assert reader(tmp_path / "none", **pooling).instructions == {"query": "", "document": ""}
    with pytest.raises(ValueError, match="without the prompt"):
        reader(tmp_path / "with", **prompts, **pooling)


def test_a_title_stays_as_long_as_it_fits(tmp_path: Path) -> None:
    """Of the window of 12 two are special, and the title takes one."""
    made = reader(tmp_path)
    assert made.special_tokens == 2
    fits, over = "tide " * 9, "tide " * 10
    assert made.passage("Sea", fits).ids == made.text(f"Sea\n{fits}").ids
    assert made.passage("Sea", over).ids == made.text(over).ids
    assert (made.passage("Sea", fits).cut, made.passage("Sea", over).cut) == (0, 0)
    cut = made.passage("Sea", "tide " * 13)
    assert (len(cut.ids), cut.cut) == (12, 3)


def test_what_is_cut_is_the_middle(tmp_path: Path) -> None:
    made = reader(tmp_path)
    words = [f"{n}" for n in range(30)]
    whole, cut = made.plain(" ".join(words)).ids, made.query(" ".join(words))
    assert cut.cut == len(whole) + 2 - 12
    assert cut.ids[1:6] == whole[:5]
    assert cut.ids[6:11] == whole[-5:]
    assert made.query(" ".join(words[:10])).cut == 0


def test_no_text_is_tokenized_that_is_far_too_long(tmp_path: Path) -> None:
    made = reader(tmp_path)
    at_most = 12 * 100  # characters
    assert made.text("x" * at_most).ids
    assert made.text("x" * (at_most + 1)).ids == []
    assert made.text("x" * (at_most + 1)).cut > 0
    assert made.query("a" + " " * (at_most - 2) + "b").ids == made.text("a b").ids
    long = made.query("left " + "tide " * 100_000 + " right").ids
    assert long[1] == made.plain("left").ids[0]
    assert long[-2] == made.plain("right").ids[0]
