"""The scripted chats, and what a search finds for each of their questions."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from bench.conversations import passages
from services.gateway.runs.rewriting.rule import Turn, rewrite
from services.retrieval.embedding_model import EmbeddingModel

SET = Path(__file__).with_name("conversations.yaml")
FOUND = 4  # passages of a chat, as is set


class Asked(NamedTuple):
    question: str
    answer: str
    finds: str


def chats() -> list[list[Asked]]:
    return [[Asked(*turn) for turn in chat] for chat in yaml.safe_load(SET.read_text())]


def query(turns: Sequence[Asked], question: str) -> str:
    """What the stores are searched for behind these turns."""
    return rewrite([Turn(one.question, one.answer) for one in turns], question).query


class Search:
    """By the built-in model's vectors alone."""

    def __init__(self) -> None:
        self.texts = passages()
        self.keys = list(self.texts)
        self._model = EmbeddingModel.load()

    @cached_property
    def vectors(self) -> np.ndarray:
        """[passages, size], each of unit length."""
        reader = self._model.reader
        return self._model.encode([reader.passage("", text).ids for text in self.texts.values()])

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """[texts, size], each of unit length."""
        return self._model.encode([self._model.reader.query(text).ids for text in texts])

    def best(self, vectors: np.ndarray, count: int = FOUND) -> list[list[str]]:
        """Of each vector the keys of the nearest passages, the best first."""
        order = np.argsort(-(vectors @ self.vectors.T), axis=1, kind="stable")[:, :count]
        return [[self.keys[n] for n in row] for row in order]
