"""BERT and its like, the encoders that sentence-transformers checkpoints are mostly made of.

Read from the checkpoint's own config.json and safetensors; a checkpoint that asks for anything else
is refused by the name of the field. Blocking. In numpy: torch would compute it faster by a tenth or
two, and takes 140 MB and more than a second to import.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
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
_SCORES = 2**18  # of attention at a time, 4 bytes each
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
        self.vocabulary = int(config["vocab_size"])
        self.longest = int(config["max_position_embeddings"]) - self._first  # text, in tokens
        self.steps = 0

    def encode(self, ids: Array, mask: Array) -> Array:
        """Final states, float32 [texts, tokens, dimension]. `ids` ints [texts, tokens], padded on
        the right with whatever; `mask` bool of the same shape, False for padding, whose states are
        zeros: nothing of it is computed.
        """
        positions = np.broadcast_to(np.arange(ids.shape[1]) + self._first, ids.shape)
        x = self._weights["embeddings.word_embeddings.weight"][ids[mask]]
        x += self._weights["embeddings.position_embeddings.weight"][positions[mask]]
        x += self._weights["embeddings.token_type_embeddings.weight"][0]
        self._norm(x, "embeddings.LayerNorm")
        ends = np.cumsum(mask.sum(1)).tolist()
        texts = [slice(*borders) for borders in pairwise([0, *ends])]
        for number in range(self._layers):
            self._layer(x, texts, f"encoder.layer.{number}")
        states = np.zeros((*mask.shape, self.dimension), np.float32)
        states[mask] = x
        return states

    def _layer(self, x: Array, texts: list[slice], at: str) -> None:
        """In place. `x`: the tokens of all texts, [tokens, dimension]. A key's bias would add the
        same to all scores of a token, which changes nothing.
        """
        q, k, v = (
            self._product(x, f"{at}.attention.self.{name}") for name in ("query", "key", "value")
        )
        q += self._weights[f"{at}.attention.self.query.bias"]
        v += self._weights[f"{at}.attention.self.value.bias"]
        for text in texts:
            self._attend(q[text], k[text], v[text])
        self._add_and_norm(x, q, f"{at}.attention.output")
        inner = self._product(x, f"{at}.intermediate.dense")
        _gelu(inner, self._weights[f"{at}.intermediate.dense.bias"])
        self._add_and_norm(x, inner, f"{at}.output")

    def _attend(self, q: Array, k: Array, v: Array) -> None:
        """Of one text, [tokens, dimension]; what it gives stands in `q` then. For some of the
        tokens at a time: the scores of all of 8,192 with each other are gigabytes.
        """
        queries, keys, values = (
            one.reshape(len(one), self._heads, -1).swapaxes(0, 1) for one in (q, k, v)
        )
        keys = keys.swapaxes(1, 2) * np.float32(queries.shape[2] ** -0.5)
        at_once = max(1, _SCORES // (self._heads * max(1, len(q))))
        for start in range(0, len(q), at_once):
            some = queries[:, start : start + at_once]
            scores = some @ keys
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            np.divide(scores @ values, scores.sum(-1, keepdims=True), out=some)
            self.steps += 1

    def _product(self, x: Array, name: str) -> Array:
        weight = self._weights[f"{name}.weight"]
        if len(x) > _FEW:
            product: Array = x @ weight.T
            return product
        return np.ascontiguousarray((weight @ x.T).T)

    def _add_and_norm(self, x: Array, inner: Array, at: str) -> None:
        """x + linear(inner), normed, in place."""
        added, bias = self._product(inner, f"{at}.dense"), self._weights[f"{at}.dense.bias"]
        for rows, more in zip(_in_parts(x), _in_parts(added), strict=True):
            more += bias
            rows += more
            self._norm(rows, f"{at}.LayerNorm")

    def _norm(self, x: Array, name: str) -> None:
        """In place."""
        x -= x.mean(-1, keepdims=True)
        variance = np.einsum("td,td->t", x, x) / np.float32(x.shape[1])
        x *= (1 / np.sqrt(variance + np.float32(self._epsilon)))[:, None]
        x *= self._weights[f"{name}.weight"]
        x += self._weights[f"{name}.bias"]


# Tokens, of a question or two: by weights from the left, which BLAS then need not turn. Of a few
# rows that takes a third less, of a thousand a half more.
_FEW = 64

_PART = 2**15  # numbers that are computed on at a time: they stay in the processor's cache


def _in_parts(x: Array) -> Iterator[Array]:
    """Some rows at a time."""
    at_once = max(1, _PART // x.shape[1])
    for start in range(0, len(x), at_once):
        yield x[start : start + at_once]


# The normal distribution's share below x is 1 / (1 + exp(x P(x^2))) up to 6, and nearly 1 beyond.
# Fitted for x times it, which is wrong by 3e-6 at most. P's terms, the highest first.
_P = [
    np.float32(c) for c in (-2.2381726e-06, 6.1162149e-05, 0.00024972263, -0.072937581, -1.5956563)
]


def _gelu(x: Array, bias: Array) -> None:
    """x + bias, times the normal distribution's share below that, in place."""
    for rows in _in_parts(x):
        rows += bias
        near = np.clip(rows, -6, 6)
        square = near * near
        power = square * _P[0]
        for coefficient in _P[1:-1]:
            power += coefficient
            power *= square
        power += _P[-1]
        power *= near
        np.exp(power, out=power)
        power += 1
        rows /= power


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
