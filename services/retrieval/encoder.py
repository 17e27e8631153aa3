"""BERT and its like, the encoders that sentence-transformers checkpoints are mostly made of.

Read from the checkpoint's own config.json and safetensors; a checkpoint that asks for anything else
is refused by the name of the field. Blocking. In numpy: torch would compute it faster by a tenth or
two, and takes 140 MB and more than a second to import.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

Array = np.ndarray

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
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_SCORES = 2**22  # of attention in memory, 4 bytes each
Shape = tuple[int, ...]


class Encoder:
    """`encode` is safe from one thread at a time; `steps` grows while it computes."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError or OSError that names the file and what is wrong with it."""
        config = _config(folder / "config.json")
        self.dimension = int(config["hidden_size"])
        behind_padding = _FAMILIES[config["model_type"]]
        self._first = 1 + int(config.get("pad_token_id", 1)) if behind_padding else 0
        self._heads = int(config["num_attention_heads"])
        self._layers = int(config["num_hidden_layers"])
        self._epsilon = float(config.get("layer_norm_eps", 1e-12))
        self._weights = _weights(folder, _shapes(config))
        self.steps = 0

    def encode(self, ids: Array, mask: Array) -> Array:
        """Final states, float32 [texts, tokens, dimension]. `ids` ints [texts, tokens], padded on
        the right with whatever; `mask` bool of the same shape, False for padding.
        """
        positions = np.arange(ids.shape[1]) + self._first
        x = self._weights["embeddings.word_embeddings.weight"][ids]
        x += self._weights["embeddings.position_embeddings.weight"][positions]
        x += self._weights["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        unseen = np.where(mask, np.float32(0), np.float32(-np.inf))[:, None, None, :]
        for number in range(self._layers):
            x = self._layer(x, unseen, f"encoder.layer.{number}")
        return x

    def _layer(self, x: Array, unseen: Array, at: str) -> Array:
        q, k, v = (
            self._linear(x, f"{at}.attention.self.{name}")
            .reshape(*x.shape[:2], self._heads, -1)
            .swapaxes(1, 2)
            for name in ("query", "key", "value")
        )
        attended = self._attend(q, k, v, unseen).swapaxes(1, 2).reshape(x.shape)
        attended = self._linear(attended, f"{at}.attention.output.dense")
        x = self._norm(x + attended, f"{at}.attention.output.LayerNorm")
        inner = self._linear(x, f"{at}.intermediate.dense")
        _gelu(inner)
        return self._norm(x + self._linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")

    def _attend(self, q: Array, k: Array, v: Array, unseen: Array) -> Array:
        """All float32 [texts, heads, tokens, size]. For some of the tokens at a time: the scores of
        all of 8,192 with each other are gigabytes.
        """
        keys = k.swapaxes(2, 3) * np.float32(q.shape[3] ** -0.5)
        attended = np.empty_like(q)
        texts, heads, tokens, _ = q.shape
        at_once = max(1, _SCORES // (texts * heads * tokens))
        for start in range(0, tokens, at_once):
            part = np.s_[:, :, start : start + at_once]
            scores = q[part] @ keys
            scores += unseen
            attended[part] = _softmax(scores) @ v
            self.steps += 1
        return attended

    def _linear(self, x: Array, name: str) -> Array:
        rows: Array = x.reshape(-1, x.shape[-1]) @ self._weights[f"{name}.weight"].T
        rows += self._weights[f"{name}.bias"]
        return rows.reshape(*x.shape[:-1], -1)

    def _norm(self, x: Array, name: str) -> Array:
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(self._epsilon))
        x *= self._weights[f"{name}.weight"]
        x += self._weights[f"{name}.bias"]
        return x


def _softmax(x: Array) -> Array:
    """Over the last dimension, in place."""
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(-1, keepdims=True)
    return x


# Of erfc, by Abramowitz and Stegun, 7.1.26: wrong by 2e-7 at most.
_ERFC = [np.float32(c) for c in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)]
_GELU_ROWS = 16  # at a time, for what is computed between to stay in the processor's cache


def _gelu(x: Array) -> None:
    """x times the normal distribution's share below x, in place."""
    rows = x.reshape(-1, x.shape[-1])
    for start in range(0, len(rows), _GELU_ROWS):
        part = rows[start : start + _GELU_ROWS]
        size = np.abs(part)
        t = 1 / (1 + size * np.float32(0.3275911 * 0.5**0.5))
        tail = t * _ERFC[0]
        for coefficient in _ERFC[1:]:
            tail += coefficient
            tail *= t
        np.multiply(part, part, out=t)
        t *= np.float32(-0.5)
        tail *= np.exp(t, out=t)
        tail *= size
        tail *= np.float32(0.5)  # now the share beyond |x|, times |x|
        np.maximum(part, 0, out=part)
        part -= tail


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


def _weights(folder: Path, shapes: dict[str, Shape]) -> dict[str, Array]:
    """In float32. Names may stand below the model's own prefix, as in `bert.encoder.layer.0…`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.safetensors")
    weights: dict[str, Array] = {}
    for path in files:
        for full, tensor in _tensors(path):
            name = full.removeprefix("bert.").removeprefix("roberta.")
            if name in shapes:
                weights[name] = tensor
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"{folder}: tensor {name} is missing")
        if weights[name].shape != shape:
            has, wants = list(weights[name].shape), list(shape)
            raise ValueError(f"{folder}: tensor {name} is {has}, config.json makes it {wants}")
    return weights


def _tensors(path: Path) -> Iterator[tuple[str, Array]]:
    """A safetensors file's floats by name, as float32. Those that are that already are not read
    but mapped: memory that the system may take back. Others (token numbers, of old) are left out.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass  # checks that the header is well formed, and the file as long as it says
    except SafetensorError as error:
        raise ValueError(f"{path}: broken, or cut short: {error}") from error
    raw = np.memmap(path, np.uint8, mode="r")
    start = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8:start].tobytes())
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        first, end = tensor["data_offsets"]
        stored = np.asarray(raw[start + first : start + end])
        if tensor["dtype"] == "BF16":
            floats = (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif tensor["dtype"] in _FLOATS:
            # Aligned: else BLAS would copy all of it each time.
            floats = np.require(stored.view(_FLOATS[tensor["dtype"]]), np.float32, "A")
        else:
            continue
        yield name, floats.reshape(tensor["shape"])
