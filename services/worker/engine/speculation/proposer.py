"""Who guesses what comes next."""

from collections.abc import Sequence as Seq
from time import perf_counter
from typing import Protocol

from services.worker.engine.sequence import Sequence
from services.worker.engine.settling import Settling
from services.worker.engine.speculation.lookup import Lookup

Wanted = Seq[tuple[Sequence, int]]
"""Sequences, and of each how many tokens."""


class Proposer(Protocol):
    """Guesses are of tokens behind the last one. It changes nothing of a sequence but what it keeps
    with it for itself."""

    def look_s(self, sequence: Sequence) -> float:
        """Seconds that `offers` takes, until it finds something."""

    def begin_s(self, sequence: Sequence) -> float:
        """Seconds that it needs before it can guess for the sequence: once, if it goes on."""

    def offers(self, sequence: Sequence, most: int) -> int:
        """How many tokens it would guess, `most` at most."""

    def depth_s(self, rows: int, context: int) -> float:
        """Seconds that one token more takes for so many sequences, which look back on so many
        tokens together."""

    def propose(self, wanted: Wanted, seconds: float) -> list[list[int]]:
        """Of each no more than it offered in this step. All of them have blocks for their
        guesses, too. `seconds`: what it may take to begin with some, besides guessing."""


class NgramProposer:
    """What followed in the sequence itself, the last time that it went as it goes now."""

    def __init__(self, least: int, most: int) -> None:
        """Of `Lookup`."""
        self._least, self._most = least, most
        self._took = Settling(1e-5)

    def look_s(self, sequence: Sequence) -> float:
        return self._took.value / (sequence.lookup.finds if sequence.lookup else 1.0)

    def begin_s(self, sequence: Sequence) -> float:
        return 0.0

    def offers(self, sequence: Sequence, most: int) -> int:
        began = perf_counter()
        if sequence.lookup is None:
            sequence.lookup = Lookup(self._least, self._most)
        found = sequence.lookup.look(sequence.tokens, most)
        self._took.add(perf_counter() - began)
        return found

    def depth_s(self, rows: int, context: int) -> float:
        return 0.0

    def propose(self, wanted: Wanted, seconds: float) -> list[list[int]]:
        return [s.lookup.found[:count] if s.lookup else [] for s, count in wanted]
