"""Our encoder beside transformers', and checkpoints that it must refuse."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.retrieval.encoder import Encoder, _gelu

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
    "type_vocab_size": 2,
    "initializer_range": 0.5,  # so large that a wrong detail shows
}


def reference(family: str) -> "transformers.PreTrainedModel":
    torch.manual_seed(3)
    if family == "bert":
        return transformers.BertModel(transformers.BertConfig(**SIZES, pad_token_id=0)).eval()
    return transformers.RobertaModel(transformers.RobertaConfig(**SIZES, pad_token_id=1)).eval()


def written(folder: Path, **config: Any) -> Path:
    """A tiny BERT's checkpoint with some fields of its config.json replaced."""
    reference("bert").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_equals_transformers_with_padding_too(family: str, tmp_path: Path) -> None:
    model = reference(family)
    for parameter in model.parameters():  # biases and norms of fresh models are all 0 and 1
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(tmp_path)
    ids = torch.randint(5, 50, (3, 18))
    mask = torch.arange(18) < torch.tensor([[18], [7], [1]])
    ids[~mask] = model.config.pad_token_id
    with torch.inference_mode():
        wanted = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    found = Encoder(tmp_path).encode(ids.numpy(), mask.numpy())
    assert np.allclose(found[mask], wanted[mask], atol=1e-4)
    assert not found[~mask].any()
    assert found.dtype == np.float32


@pytest.mark.parametrize("scores", [1, 7 * 3 * 4 * 18, 2**22])
def test_attention_in_parts_is_the_same(
    scores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder(written(tmp_path))
    ids = np.arange(54).reshape(3, 18) % 50
    mask = np.arange(18) < np.array([[18], [7], [1]])
    wanted = encoder.encode(ids, mask)
    monkeypatch.setattr("services.retrieval.encoder._SCORES", scores)
    steps = encoder.steps
    assert np.allclose(encoder.encode(ids, mask)[mask], wanted[mask], atol=1e-5)
    assert encoder.steps > steps


def test_a_long_texts_scores_are_not_held_at_once(tmp_path: Path) -> None:
    """Of 2,048 tokens with 8 heads they would be 128 MiB."""
    config = transformers.BertConfig(
        **SIZES | {"num_attention_heads": 8, "max_position_embeddings": 2048}, pad_token_id=0
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    encoder = Encoder(tmp_path)
    tracemalloc.start()
    try:
        encoder.encode(np.ones((1, 2048), int), np.ones((1, 2048), bool))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 48 * 2**20


def test_robertas_padding_may_be_left_out_of_its_config(tmp_path: Path) -> None:
    reference("roberta").save_pretrained(tmp_path)
    ids, mask = np.array([[5, 6, 7]]), np.ones((1, 3), bool)
    wanted = Encoder(tmp_path).encode(ids, mask)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["pad_token_id"]
    path.write_text(json.dumps(config))
    assert transformers.RobertaConfig.from_pretrained(tmp_path).pad_token_id == 1
    assert np.array_equal(Encoder(tmp_path).encode(ids, mask), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_names_below_a_prefix_are_found_and_all_floats_are_read(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """`same` has the values of `stored` in float32: to the last bit the model is the same."""
    same, stored = written(tmp_path / "same"), written(tmp_path / "stored")
    tensors = {n: t.to(dtype) for n, t in load_file(same / "model.safetensors").items()}
    save_file({n: t.float() for n, t in tensors.items()}, same / "model.safetensors")
    numbers = {"bert.embeddings.position_ids": torch.arange(20)}
    save_file({f"bert.{n}": t for n, t in tensors.items()} | numbers, stored / "model.safetensors")
    ids, mask = np.array([[5, 6, 7]]), np.ones((1, 3), bool)
    wanted = Encoder(same).encode(ids, mask)
    assert np.array_equal(Encoder(stored).encode(ids, mask), wanted)


def test_gelu_is_torchs() -> None:
    x = torch.linspace(-12, 12, 20_000).reshape(-1, 50)
    bias = torch.linspace(-0.5, 0.5, 50)
    found = x.numpy().copy()
    _gelu(found, bias.numpy())
    wanted = torch.nn.functional.gelu(x.double() + bias).numpy()
    assert np.allclose(found, wanted, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mpnet"}, "model_type 'mpnet'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"intermediate_size": 64}, r"intermediate.dense.weight is \[48, 32\]"),
        ({"num_hidden_layers": 3}, "encoder.layer.2.attention.self.query.weight is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Encoder(written(tmp_path, **config))


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors: broken, or cut short"):
        Encoder(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="has no"):
        Encoder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        Encoder(folder)
