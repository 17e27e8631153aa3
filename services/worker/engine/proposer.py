"""Who guesses what comes next."""

from collections.abc import Sequence as Seq
from time import perf_counter
from typing import Protocol

from services.worker.engine.lookup import Lookup
from services.worker.engine.sequence import Sequence

Wanted = Seq[tuple[Sequence, int]]
"""Sequences, and of each how many tokens."""

_SETTLES = 0.05
"""By so much a look moves what looks are believed to take; none by more than to twice as much."""


class Proposer(Protocol):
    """Guesses are of tokens behind the last one. It changes nothing of a sequence but what it keeps
    with it for itself."""

    @property
    def look_s(self) -> float:
        """Seconds that `offers` takes for a sequence."""

    def offers(self, sequence: Sequence, most: int) -> int:
        """How many tokens it would guess, `most` at most."""

    def depth_s(self, rows: int, context: int) -> float:
        """Seconds that one token more takes for so many sequences, which look back on so many
        tokens together."""

    def propose(self, wanted: Wanted) -> list[list[int]]:
        """Of each no more than it offered in this step. All of them have blocks for their
        guesses, too."""


class NgramProposer:
    """What followed in the sequence itself, the last time that it went as it goes now."""

    def __init__(self, least: int, most: int) -> None:
        """Of `Lookup`."""
        self._least, self._most = least, most
        self.look_s = 1e-5
        self._found: dict[str, list[int]] = {}

    def offers(self, sequence: Sequence, most: int) -> int:
        began = perf_counter()
        if sequence.lookup is None:
            sequence.lookup = Lookup(self._least, self._most)
        found = self._found[sequence.id] = sequence.lookup.following(sequence.tokens, most)
        took = min(perf_counter() - began, 2 * self.look_s)
        self.look_s += _SETTLES * (took - self.look_s)
        return len(found)

    def depth_s(self, rows: int, context: int) -> float:
        return 0.0

    def propose(self, wanted: Wanted) -> list[list[int]]:
        found, self._found = self._found, {}
        return [found[sequence.id][:count] for sequence, count in wanted]
