"""The built-in MiniLM, and what other checkpoints may ask for."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.retrieval.embedding_model import EmbeddingModel, _pooling
from services.retrieval.text_reader import TextReader
from tests.support.minilm import FOLDER, model


def vectors(*texts: str) -> np.ndarray:
    return model().encode([model().reader.text(text).ids for text in texts])


def variant(folder: Path, **files: object) -> Path:
    """MiniLM with some of its JSON files replaced."""
    made = folder / "variant"
    shutil.copytree(FOLDER, made)
    for name, content in files.items():
        (made / name).write_text(json.dumps(content))
    return made


def test_like_sentences_are_closer_than_unlike_ones() -> None:
    a, b, c = vectors(
        "When does the harbour open?",
        "The harbour opens at six in the morning.",
        "A recipe for lentil soup with carrots.",
    )
    assert a @ b > 0.6
    assert a @ c < 0.2


def test_vectors_have_unit_length_and_do_not_depend_on_the_batch() -> None:
    alone = vectors("A short text.")
    among = vectors("A short text.", "A much longer text, " * 20)
    assert np.allclose(np.linalg.norm(among, axis=1), 1, atol=1e-5)
    assert np.allclose(alone[0], among[0], atol=1e-5)
    assert among.shape == (2, 384)
    assert among.dtype == np.float32


def test_equals_the_published_pipeline_of_the_checkpoint() -> None:
    """Mean of the last hidden state over all tokens of the text, computed here by hand."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    text = "The tide table hangs beside the gate."
    tokens = AutoTokenizer.from_pretrained(str(FOLDER))(text, return_tensors="pt")
    reference = AutoModel.from_pretrained(str(FOLDER)).eval()
    with torch.inference_mode():
        mean = reference(**tokens).last_hidden_state.mean(1)[0].numpy()
    assert np.allclose(vectors(text)[0], mean / np.linalg.norm(mean), atol=1e-5)


def test_a_question_longer_than_the_window_keeps_both_ends_and_says_so() -> None:
    long = "harbour " * 300 + "tide " * 300
    query = model().reader.query(long)
    assert len(query.ids) == model().reader.max_tokens == 256
    assert query.cut == 600 + 2 - 256
    assert query.ids[:10] == model().reader.query("harbour " * 9).ids[:10]
    assert query.ids[-10:] == model().reader.query("tide " * 9).ids[-10:]
    assert model().reader.query("Short?").cut == 0
    huge = model().reader.query("harbour " * 1_000_000)
    assert len(huge.ids) == 256
    assert huge.cut > 0


def test_a_text_longer_than_the_window_is_told_apart() -> None:
    fits, long = model().reader.text("tide " * 254), model().reader.text("tide " * 255)
    assert (len(fits.ids), fits.cut, long.cut) == (256, 0, 1)
    assert model().reader.text("tide " * 1_000_000).cut > 0


def test_a_title_that_does_not_fit_beside_its_text_is_left_out() -> None:
    text = "tide " * 250
    assert model().reader.passage(
        "An unusually long title of a document", text
    ) == model().reader.passage("", text)
    assert model().reader.passage("Guide", "tide").ids != model().reader.passage("", "tide").ids


def test_weights_and_instructions_tell_models_apart_and_folder_names_do_not(tmp_path: Path) -> None:
    copy = EmbeddingModel.load(str(variant(tmp_path / "a")))
    assert copy.fingerprint == model().fingerprint
    assert (copy.name, model().name) == ("variant", "all-MiniLM-L6-v2")
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}}
    path = variant(tmp_path / "b", **{"config_sentence_transformers.json": prompts})
    instructed = EmbeddingModel.load(str(path))
    assert instructed.fingerprint != model().fingerprint
    assert instructed.reader.query("tide").ids == model().reader.text("query: tide").ids
    assert instructed.reader.passage("", "tide").ids == model().reader.text("passage: tide").ids
    assert instructed.reader.text("tide").ids == model().reader.text("tide").ids


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (
            "modules.json",
            [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}],
            "Dense",
        ),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens"),
    ],
)
def test_a_checkpoint_that_needs_more_is_refused(
    tmp_path: Path, file: str, content: object, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        EmbeddingModel.load(str(variant(tmp_path, **{file: content})))


def test_cls_pooling_takes_the_first_state(tmp_path: Path) -> None:
    cls = EmbeddingModel.load(str(cls_variant(tmp_path)))
    ids = [cls.reader.text("one tide").ids, cls.reader.text("a longer text about tides").ids]
    both = cls.encode(ids)
    assert np.allclose(both[0], cls.encode(ids[:1])[0], atol=1e-5)
    assert not np.allclose(both[0], model().encode(ids)[0], atol=1e-2)


def test_last_pooling_takes_the_last_state_before_the_padding(tmp_path: Path) -> None:
    path = variant(tmp_path, **{"1_Pooling/config.json": {"pooling_mode": "last"}})
    last = EmbeddingModel.load(str(path))
    ids = [last.reader.text("one tide").ids, last.reader.text("a longer text about tides").ids]
    both = last.encode(ids)
    assert np.allclose(both[0], last.encode(ids[:1])[0], atol=1e-5)
    assert np.allclose(np.linalg.norm(both, axis=1), 1, atol=1e-5)
    for others in (model(), EmbeddingModel.load(str(cls_variant(tmp_path / "cls")))):
        assert not np.allclose(both[0], others.encode(ids)[0], atol=1e-2)
        assert others.fingerprint != last.fingerprint, "their vectors are not to be compared"


def cls_variant(folder: Path) -> Path:
    return variant(folder, **{"1_Pooling/config.json": {"pooling_mode_cls_token": True}})


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    path = variant(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["embeddings.LayerNorm.bias"] = weights["embeddings.LayerNorm.bias"] + 1
    save_file(weights, path / "model.safetensors")
    assert EmbeddingModel.load(str(path)).fingerprint != model().fingerprint


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({}, "mean"),
        ({"include_prompt": True}, "mean"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "max"}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, None),
    ],
)
def test_pooling_is_as_the_checkpoint_says_or_refused(
    tmp_path: Path, config: dict[str, object], pooling: str | None
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if pooling is None:
        with pytest.raises(ValueError, match=r"pooling .* is not supported"):
            _pooling(tmp_path)
    else:
        assert _pooling(tmp_path) == pooling


def test_a_folder_without_a_tokenizer_or_a_window_is_refused(tmp_path: Path) -> None:
    folder = variant(tmp_path)
    for name in ("config.json", "sentence_bert_config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    with pytest.raises(ValueError, match="how many tokens"):
        TextReader(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        TextReader(folder)


def test_what_retrieval_runs_imports_no_torch() -> None:
    """It would be 150 MB and more than a second of every start."""
    script = (
        "import sys\n"
        "import services.retrieval.server\n"
        "from services.retrieval.embedding_model import EmbeddingModel\n"
        "EmbeddingModel.load().encode([[101, 102]])\n"
        "print('imported', [m for m in ('torch', 'transformers') if m in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "imported []\n", ran.stderr
