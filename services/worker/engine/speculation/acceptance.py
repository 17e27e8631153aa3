"""How many of a sequence's guesses were right, and what is to be expected of the next."""

from services.worker.engine.speculation.guess_rules import FADES, KNOWN_OF_OTHERS, RESTS


class Acceptance:
    """Counts that fade. One of an engine as a whole says what to think of a new sequence."""

    def __init__(self, fades: float = FADES, rests: float = RESTS) -> None:
        """What was seen counts so much less after each look, and with each token since."""
        self._fades, self._rests = fades, rests
        self._right = self._wrong = 0.0
        self._seen_at = 0

    def expected(self, at: int, prior: float) -> float:
        """Of a guess behind right ones: how likely it is right. `at`: tokens that the sequence has;
        `prior`: what is likely where nothing is known."""
        rest = self._rests ** (at - self._seen_at)
        right, wrong = self._right * rest, self._wrong * rest
        return (right + KNOWN_OF_OTHERS * prior) / (right + wrong + KNOWN_OF_OTHERS)

    def learn(self, at: int, drafted: int, accepted: int) -> None:
        """Of so many guesses the first `accepted` were right; what is behind a wrong one says
        nothing."""
        fades = self._fades * self._rests ** (at - self._seen_at)
        self._right = self._right * fades + accepted
        self._wrong = self._wrong * fades + (accepted < drafted)
        self._seen_at = at
