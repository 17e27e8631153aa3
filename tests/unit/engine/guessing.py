"""Guesses for tests: right and wrong ones, of those whose answers are known."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine import engine as engine_module
from services.worker.engine import speculation
from services.worker.engine.engine import Engine
from services.worker.engine.proposer import Wanted
from services.worker.engine.sequence import Sequence
from tests.unit.engine.driving import make_engine

Next = Callable[[Sequence, int], list[int]]
"""The right tokens behind a sequence's, so many if there are."""


class Oracle:
    """Offers as many as it likes, some of them wrong."""

    def __init__(self, right: Next, vocab: int, draw: Callable[[int], int]) -> None:
        """`draw`: a number below n."""
        self._right, self._vocab, self._draw = right, vocab, draw

    def look_s(self, sequence: Sequence) -> float:
        return 0.0

    def begin_s(self, sequence: Sequence) -> float:
        return 0.0

    def offers(self, sequence: Sequence, most: int) -> int:
        return self._draw(most + 1)

    def depth_s(self, rows: int, context: int) -> float:
        return 0.0

    def propose(self, wanted: Wanted) -> list[list[int]]:
        return [self._guess(sequence, count) for sequence, count in wanted]

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        guesses = (self._right(sequence, count) + [0] * count)[:count]
        return [(guess + 1) % self._vocab if self._draw(4) == 0 else guess for guess in guesses]


def guess(monkeypatch: pytest.MonkeyPatch, oracle: Oracle) -> None:
    """Engines made from now on that guess take what the oracle offers."""
    monkeypatch.setattr(engine_module, "NgramProposer", lambda *_: oracle)
    monkeypatch.setattr(speculation, "_MARGIN", 0.0)


def guessing_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[int]], **settings: Any
) -> Engine:
    """`answers`: by the request's id, what it makes without guesses."""

    def right(sequence: Sequence, count: int) -> list[int]:
        made = len(sequence.tokens) - sequence.num_prompt
        made += sequence.request.generated_prefix
        return answers[sequence.id][made : made + count]

    guess(monkeypatch, Oracle(right, 200, random.Random(3).randrange))
    return make_engine(folder, speculation="ngram", num_speculative_tokens=4, **settings)
