"""Where in a sequence what it ends with was before: prompt look-up.

A. Saxena, "Prompt lookup decoding", 2023. Here with chains of equal pairs, as compressors find
repetitions (J. Ziv, A. Lempel, "A universal algorithm for sequential data compression", 1977), so
that a look costs the same however long the sequence is.
"""

from array import array
from collections.abc import Sequence

from services.worker.engine.speculation.guess_rules import FINDS_MOVE, LEAST_FINDS, LOOKS

_LEAST_SIZE, _MOST_SIZE = 2**10, 2**18
"""Of the table of hashes, in entries of 4 bytes."""
_AT_ONCE = 8192
"""Tokens that a look takes in at most: a long prompt is taken in over several."""


class Lookup:
    """Of a sequence, whose tokens only grow: its runs of `least` tokens, by where they end. Takes
    up to 20 bytes a token of the prompt, and 4 of the output."""

    def __init__(self, least: int, most: int) -> None:
        """As many tokens must agree at least; a place where `most` do is not bettered."""
        self.finds = 1.0
        """Of the last looks, how many found something; never 0."""
        self.found: list[int] = []
        """By the last look."""
        self._least, self._most = least, most
        self._last = array("i")
        """By a run's hash, of which several runs may have the same: where the last one ended."""
        self._before = array("i", [0] * least)
        """By the end of a run: where one of the same hash ended before; 0: nowhere."""

    def look(self, tokens: Sequence[int], count: int) -> int:
        """How many tokens are found, `count` at most."""
        self.found = self.following(tokens, count)
        self.finds += FINDS_MOVE * (max(LEAST_FINDS, float(bool(self.found))) - self.finds)
        return len(self.found)

    def following(self, tokens: Sequence[int], count: int) -> list[int]:
        """What followed the last tokens where they were before, `count` tokens at most: where most
        of them agree, the last place among equals. Where that is so near that the end comes first,
        it is taken to go on in the same way."""
        self._take(tokens)
        end = len(tokens)
        place, best, found = self._last[self._hash(tokens, end)], 0, 0
        for _ in range(LOOKS):
            if not place or best >= self._most:
                break
            agree = self._agreeing(tokens, place)
            if agree > best:
                best, found = agree, place
            place = self._before[place]
        if not found:
            return []
        following = list(tokens[found : found + count])
        while len(following) < count:
            following.append(following[found - end])
        return following

    def _take(self, tokens: Sequence[int]) -> None:
        """All runs but the one at the end."""
        if not self._last:
            size = max(_LEAST_SIZE, min(_MOST_SIZE, 2 << len(tokens).bit_length()))
            self._last = array("i", bytes(4 * size))
        first = len(self._before)
        for end in range(first, min(len(tokens), first + _AT_ONCE)):
            run = self._hash(tokens, end)
            self._before.append(self._last[run])
            self._last[run] = end

    def _hash(self, tokens: Sequence[int], end: int) -> int:
        """Of the run that ends there."""
        return hash(tuple(tokens[end - self._least : end])) & (len(self._last) - 1)

    def _agreeing(self, tokens: Sequence[int], place: int) -> int:
        """Tokens before `place` that are those at the end; 0, if they are too few."""
        end, agree, most = len(tokens), 0, min(self._most, place)
        while agree < most and tokens[place - 1 - agree] == tokens[end - 1 - agree]:
            agree += 1
        return agree if agree >= self._least else 0
