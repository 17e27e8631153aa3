"""BERT and its like, the encoders that sentence-transformers checkpoints are mostly made of.

Read from the checkpoint's own config.json and safetensors; a checkpoint that asks for anything else
is refused by the name of the field. Blocking; imports torch.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

# Which position a text's first token has: RoBERTa's begin behind the padding's.
_FAMILIES = {"bert": False, "roberta": True, "xlm-roberta": True}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "type_vocab_size",
    "vocab_size",
)
Shape = tuple[int, ...]


class Encoder:
    """`encode` is safe from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError or OSError that names the file and what is wrong with it."""
        config = _config(folder / "config.json")
        self.dimension = int(config["hidden_size"])
        behind_padding = _FAMILIES[config["model_type"]]
        self._first = 1 + int(config.get("pad_token_id") or 0) if behind_padding else 0
        self._heads = int(config["num_attention_heads"])
        self._layers = int(config["num_hidden_layers"])
        self._epsilon = float(config.get("layer_norm_eps", 1e-12))
        self._weights = _weights(folder, _shapes(config))

    @torch.inference_mode()
    def encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Final states, float32 [texts, tokens, dimension]. `ids` int64 [texts, tokens], padded on
        the right with whatever; `mask` bool of the same shape, False for padding.
        """
        positions = torch.arange(ids.shape[1]) + self._first
        x = F.embedding(ids, self._weights["embeddings.word_embeddings.weight"])
        x = x + self._weights["embeddings.position_embeddings.weight"][positions]
        x = x + self._weights["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for number in range(self._layers):
            x = self._layer(x, mask[:, None, None, :], f"encoder.layer.{number}")
        return x

    def _layer(self, x: Tensor, mask: Tensor, at: str) -> Tensor:
        q, k, v = (
            self._linear(x, f"{at}.attention.self.{name}")
            .unflatten(-1, (self._heads, -1))
            .transpose(1, 2)
            for name in ("query", "key", "value")
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        attended = attended.transpose(1, 2).flatten(2)
        attended = self._linear(attended, f"{at}.attention.output.dense")
        x = self._norm(x + attended, f"{at}.attention.output.LayerNorm")
        inner = F.gelu(self._linear(x, f"{at}.intermediate.dense"))
        return self._norm(x + self._linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, (self.dimension,), weight, bias, self._epsilon)


def _config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    supported: dict[str, tuple[object, ...]] = {
        "model_type": tuple(_FAMILIES),
        "hidden_act": ("gelu",),
        "position_embedding_type": (None, "absolute"),
        "is_decoder": (None, False),
    }
    for field, values in supported.items():
        if config.get(field) not in values:
            raise ValueError(f"{path}: {field} {config.get(field)!r} is not supported")
    for field in _SIZES:
        if not isinstance(config.get(field), int):
            raise ValueError(f"{path}: {field} is missing")
    return config


def _shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Of every tensor that the encoder needs, by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, Shape] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
    }
    norms = ["embeddings.LayerNorm"]
    linears: dict[str, Shape] = {}
    for number in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{number}"
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            linears[f"{at}.attention.{name}"] = (hidden, hidden)
        linears[f"{at}.intermediate.dense"] = (inner, hidden)
        linears[f"{at}.output.dense"] = (hidden, inner)
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return shapes


def _weights(folder: Path, shapes: dict[str, Shape]) -> dict[str, Tensor]:
    """In float32. Names may stand below the model's own prefix, as in `bert.encoder.layer.0…`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.safetensors")
    weights: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for full in file.keys():  # noqa: SIM118 (not a dict)
                    name = full.removeprefix("bert.").removeprefix("roberta.")
                    if name in shapes:
                        weights[name] = file.get_tensor(full).float()
        except SafetensorError as error:
            raise ValueError(f"{path}: broken, or cut short: {error}") from error
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"{folder}: tensor {name} is missing")
        if tuple(weights[name].shape) != shape:
            has, wants = list(weights[name].shape), list(shape)
            raise ValueError(f"{folder}: tensor {name} is {has}, config.json makes it {wants}")
    return weights
