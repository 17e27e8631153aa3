"""Names and values for the small skills, from the bank's kinds of values."""

import random

from models.recipe.bank.values import draw, is_held_out, person


class Names:
    """A seeded source of names; `held_out` chooses the side of the split it draws from."""

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out

    def of(self, kind: str) -> str:
        """A value of one of the bank's kinds."""
        return str(draw(self.rng, kind, self.held_out))

    def word(self) -> str:
        """One capitalised word: a name of a person, a town, a pet."""
        roll = self.rng.random()
        if roll < 0.3:
            return person(self.rng, self.held_out).first
        if roll < 0.6:
            return person(self.rng, self.held_out).last
        if roll < 0.75:
            return self.of("pet")
        return self.of("town").split()[0]

    def lower_word(self) -> str:
        """One word in lower case."""
        return self.word().lower()

    def person(self) -> str:
        """A first and a last name, at times one alone or with a title."""
        if self.rng.random() < 0.08:
            return person(self.rng, self.held_out).first
        return self.of("person")

    def place(self) -> str:
        """A town."""
        return self.of("town")

    def number(self, low: int, high: int) -> str:
        """A whole number; those of three digits and more respect the split."""
        while True:
            number = str(self.rng.randint(low, high))
            if len(number) < 3 or is_held_out(number) is self.held_out:
                return number

    def code(self) -> str:
        """A short code, e.g. `4821` or `QX-731`."""
        return self.of("code")
