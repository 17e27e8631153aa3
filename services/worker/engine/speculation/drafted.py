"""How far a draft model is with a sequence."""

from collections.abc import Sequence


class Drafted:
    def __init__(self, computed: int) -> None:
        self.computed = computed
        """Leading tokens whose keys and values it has in the sequence's blocks."""
        self.fed: list[int] = []
        """Guesses behind them that it has computed, too."""

    def catch_up(self, tokens: Sequence[int]) -> int:
        """Takes in which guesses have proved right; gives how many tokens are computed."""
        behind = tokens[self.computed : self.computed + len(self.fed)]
        for guess, token in zip(self.fed, behind, strict=False):
            if guess != token:
                break
            self.computed += 1
        self.fed = []
        return self.computed

    def clip(self, room: int) -> None:
        """The sequence has blocks for so many tokens only."""
        del self.fed[max(0, room - self.computed) :]
