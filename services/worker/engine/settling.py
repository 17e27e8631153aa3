"""What something comes to that is done over and over."""

_MOVES = 0.05
"""By so much of the difference each time moves it."""
_MOST = 2.0
"""Times as much as believed is as much as any is taken for: it was held up by something else."""


class Settling:
    def __init__(self, value: float) -> None:
        self.value = value
        """Never 0."""

    def add(self, value: float) -> None:
        self.value += _MOVES * (min(value, _MOST * self.value) - self.value)
