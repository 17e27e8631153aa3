"""What steps take the host, besides what their device takes: so much each, and so much a guess.

Least squares of a line, in which what is long past counts less and less.
"""

_FADES = 0.98
"""With each step what was before it counts for so much of what it did."""
_MOST = 3.0
"""Times what was expected is as much as any is taken for: something else held it up. Unless the one
before took as long."""
_SPREAD = 0.05
"""Guesses squared: steps that differ by less do not tell what a guess takes."""


class HostCost:
    """Times are in seconds. A guess takes nothing until steps have differed in them."""

    def __init__(self, step_s: float) -> None:
        """`step_s`: believed before any was seen."""
        self._weight, self._guesses, self._squares = 1.0, 0.0, 0.0
        self._seconds, self._products = step_s, 0.0
        self._last = 0.0
        self.guess_s = 0.0

    @property
    def step_s(self) -> float:
        """Without guesses."""
        return max(0.0, self._seconds - self.guess_s * self._guesses) / self._weight

    def learn(self, guesses: int, seconds: float) -> None:
        """A step with so many guesses took the host so long."""
        expected = self.step_s + self.guess_s * guesses
        limit, self._last = max(_MOST * expected, self._last), seconds
        seconds = max(0.0, min(seconds, limit))
        self._weight = _FADES * self._weight + 1
        self._guesses = _FADES * self._guesses + guesses
        self._squares = _FADES * self._squares + guesses * guesses
        self._seconds = _FADES * self._seconds + seconds
        self._products = _FADES * self._products + guesses * seconds
        mean = self._guesses / self._weight
        spread = self._squares / self._weight - mean * mean
        if spread > _SPREAD:
            together = self._products / self._weight - mean * self._seconds / self._weight
            self.guess_s = max(0.0, together / spread)
