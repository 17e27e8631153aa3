"""Where in a sequence what it ends with was before: prompt look-up.

A. Saxena, "Prompt lookup decoding", 2023. Here with chains of equal pairs, as compressors find
repetitions (J. Ziv, A. Lempel, "A universal algorithm for sequential data compression", 1977), so
that a look costs the same however long the sequence is.
"""

from array import array
from collections.abc import Sequence

_LOOKS = 8
"""At so many of the last places, for the one that agrees the furthest back."""
_LEAST_FINDS = 1 / 32
_MOVES = 0.1
"""By so much of the difference each look moves what looks are believed to find."""
_AT_ONCE = 8192
"""Tokens that a look takes in at most: a long prompt is taken in over several."""


class Lookup:
    """Of a sequence, whose tokens only grow: its runs of `least` tokens, by where they end."""

    def __init__(self, least: int, most: int) -> None:
        """As many tokens must agree at least; a place where `most` do is not bettered."""
        self.finds = 1.0
        """Of the last looks, how many found something; never 0."""
        self.found: list[int] = []
        """By the last look."""
        self._least, self._most = least, most
        self._last: dict[tuple[int, ...], int] = {}
        self._before = array("i", [0] * least)
        """By the end of a run: where the same run ended before; 0: nowhere."""

    def look(self, tokens: Sequence[int], count: int) -> int:
        """How many tokens are found, `count` at most."""
        self.found = self.following(tokens, count)
        self.finds += _MOVES * (max(_LEAST_FINDS, float(bool(self.found))) - self.finds)
        return len(self.found)

    def following(self, tokens: Sequence[int], count: int) -> list[int]:
        """What followed the last tokens where they were before, `count` tokens at most: where most
        of them agree, the last place among equals. Where that is so near that the end comes first,
        it is taken to go on in the same way."""
        self._take(tokens)
        end = len(tokens)
        place, best, found = self._last.get(tuple(tokens[end - self._least :]), 0), 0, 0
        for _ in range(_LOOKS):
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
        first, least = len(self._before), self._least
        for end in range(first, min(len(tokens), first + _AT_ONCE)):
            run = tuple(tokens[end - least : end])
            self._before.append(self._last.get(run, 0))
            self._last[run] = end

    def _agreeing(self, tokens: Sequence[int], place: int) -> int:
        """Tokens before `place` that are those at the end."""
        end, agree = len(tokens), self._least
        while (
            agree < self._most
            and agree < place
            and tokens[place - 1 - agree] == tokens[end - 1 - agree]
        ):
            agree += 1
        return agree
