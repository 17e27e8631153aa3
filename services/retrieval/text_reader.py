"""How the embedding model reads texts: tokens within its window, instructions put before them.

All of it comes from files of the checkpoint; nothing here needs its weights or torch, so the
processes that cut documents load this alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from services.common.checkpoints.tokenizer_file import read_tokenizer

_CHARS_PER_TOKEN = 100  # no text of more characters than this per token of the window is tokenized


@dataclass(frozen=True)
class Tokens:
    """A text as the model reads it, special tokens and instruction included."""

    ids: list[int]
    cut: int = 0  # tokens left out because the window is shorter than the text


class TextReader:
    """Safe from any thread. Raises OSError or ValueError for a checkpoint that it cannot read."""

    def __init__(self, folder: Path) -> None:
        self.instructions = _instructions(folder)
        self._tokenizer = _tokenizer(folder)
        config = read_json(folder, "tokenizer_config.json")
        self.pad = _token_id(self._tokenizer, config.get("pad_token"))
        self.max_tokens = _window(folder, config)
        self.special_tokens = len(self._tokenizer.encode("").ids)

    def plain(self, text: str) -> Encoding:
        """The text's tokens without special ones, with their character offsets."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def ends(self, text: str) -> str:
        """What is looked at of a question: of a very long one its two ends, as what is asked stands
        in a long message's first or last words."""
        half = self.max_tokens * _CHARS_PER_TOKEN // 2
        return text if len(text) <= 2 * half else f"{text[:half]} {text[-half:]}"

    def query(self, text: str) -> Tokens:
        """A question. Longer than the window, it keeps its two ends."""
        return self._fit(self._ids("query", self.ends(text)))

    def passage(self, title: str, text: str) -> Tokens:
        """A chunk below its title; a title that does not fit beside the text is left out."""
        titled = self._ids("document", f"{title}\n{text}" if title else text)
        if len(titled) <= self.max_tokens:
            return Tokens(titled)
        return self._fit(self._ids("document", text))

    def hopeless(self, text: str) -> bool:
        """Whether it is longer than the window, as its characters alone tell."""
        return len(text) > self.max_tokens * _CHARS_PER_TOKEN

    def text(self, text: str) -> Tokens:
        """A text of the caller's own, without instruction; may be longer than the window."""
        if self.hopeless(text):
            return Tokens([], cut=len(text) // _CHARS_PER_TOKEN)
        ids = self._tokenizer.encode(text).ids
        return Tokens(ids, cut=max(0, len(ids) - self.max_tokens))

    def _ids(self, kind: str, text: str) -> list[int]:
        return self._tokenizer.encode(self.instructions[kind] + text).ids

    def _fit(self, ids: list[int]) -> Tokens:
        cut = len(ids) - self.max_tokens
        if cut <= 0:
            return Tokens(ids)
        head = self.max_tokens // 2
        return Tokens(ids[:head] + ids[head + cut :], cut)


def read_json(folder: Path, name: str) -> Any:
    """A JSON file of the checkpoint, or {} when it has none of this name."""
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else {}


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"embedding model {folder}: it has no tokenizer.json")
    tokenizer = read_tokenizer(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_id(tokenizer: Tokenizer, token: Any) -> int:
    """`token` as tokenizer_config.json writes it: its text, or an object around that."""
    text = token.get("content") if isinstance(token, dict) else token
    return (tokenizer.token_to_id(text) if text else None) or 0


def _window(folder: Path, tokenizer_config: dict[str, Any]) -> int:
    limits = (
        read_json(folder, "sentence_bert_config.json").get("max_seq_length"),
        _positions(read_json(folder, "config.json")),
        tokenizer_config.get("model_max_length"),
    )
    found = [int(limit) for limit in limits if limit]
    if not found:
        raise ValueError(f"embedding model {folder}: no file says how many tokens it takes")
    return min(found)


def _positions(config: dict[str, Any]) -> int | None:
    """How many tokens there are positions for; RoBERTa's begin behind the padding's."""
    count: int | None = config.get("max_position_embeddings")
    if count and "roberta" in config.get("model_type", ""):
        count -= 1 + int(config.get("pad_token_id", 1))
    return count


def _instructions(folder: Path) -> dict[str, str]:
    """What goes before a query and before a document, under the names that the field uses."""
    prompts = read_json(folder, "config_sentence_transformers.json").get("prompts", {})
    document = next((prompts[k] for k in ("document", "passage", "corpus") if k in prompts), "")
    found = {"query": prompts.get("query", ""), "document": document}
    if any(found.values()) and not read_json(folder, "1_Pooling/config.json").get(
        "include_prompt", True
    ):
        raise ValueError(f"embedding model {folder}: pooling without the prompt is not supported")
    return found
