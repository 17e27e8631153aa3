"""How many of a sequence's guesses were right, and what is to be expected of the next."""

_PRIOR = 2.0
"""Guesses that what is known of others counts for."""


class Acceptance:
    """Counts that fade. One of an engine as a whole says what to think of a new sequence."""

    def __init__(self, fades: float = 0.8, rests: float = 0.97) -> None:
        """What was seen counts so much less after each look, and so much less with each token
        since: who was not worth a guess is tried again."""
        self._fades, self._rests = fades, rests
        self._right = self._wrong = 0.0
        self._seen_at = 0

    def expected(self, at: int, prior: float) -> float:
        """Of a guess behind right ones: how likely it is right. `at`: tokens that the sequence has;
        `prior`: what is likely where nothing is known."""
        rest = self._rests ** (at - self._seen_at)
        right, wrong = self._right * rest, self._wrong * rest
        return (right + _PRIOR * prior) / (right + wrong + _PRIOR)

    def learn(self, at: int, drafted: int, accepted: int) -> None:
        """Of so many guesses the first `accepted` were right; what is behind a wrong one says
        nothing."""
        fades = self._fades * self._rests ** (at - self._seen_at)
        self._right = self._right * fades + accepted
        self._wrong = self._wrong * fades + (accepted < drafted)
        self._seen_at = at
