"""What a slot may stand for: the kinds of values, and the two sides of their split."""

import random
from collections.abc import Callable, Sequence
from functools import cache

from models.recipe.bank.values.lexicon import words
from models.recipe.bank.values.people import Person, person
from models.recipe.bank.values.split import checksum, is_held_out

Value = str | Person
Maker = Callable[["Draw"], Value]

KINDS: dict[str, Maker] = {}
_OPEN: set[str] = set()  # kinds whose values, taken whole, are each on one side of the split


def kind(name: str, split: bool = True) -> Callable[[Maker], Maker]:
    """Names the kind that a function makes; `split` says that its values are split by themselves.

    Others are made of split words, or are too few to be split.
    """

    def register(make: Maker) -> Maker:
        KINDS[name] = make
        if split:
            _OPEN.add(name)
        return make

    return register


def draw(rng: random.Random, name: str, held_out: bool) -> Value:
    """A value of a kind, from one side of the split. Raises KeyError if there is no such kind."""
    source = Draw(rng, held_out)
    make = KINDS[name]
    value = make(source)
    while name in _OPEN and is_held_out(str(value)) is not held_out:
        value = make(source)
    return value


class Draw:
    """Where a kind's values are drawn from: a generator and one side of the split."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out

    def any(self, options: Sequence[str]) -> str:
        """One of some options, whichever side they are on."""
        return self.rng.choice(options)

    def word(self, name: str) -> str:
        """One of a word list, whichever side it is on."""
        return self.rng.choice(words(name))

    def own(self, options: tuple[str, ...]) -> str:
        """One of those options that are on this side."""
        return self.rng.choice(_side(options, self.held_out))

    def of(self, name: str) -> str:
        """A value of another kind."""
        return str(draw(self.rng, name, self.held_out))

    def family(self) -> str:
        """A family name."""
        return person(self.rng, self.held_out).last

    def whole(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self.rng.randint(low, high)

    def digits(self, count: int) -> str:
        """So many digits."""
        return "".join(self.rng.choices("0123456789", k=count))

    def chance(self, share: float) -> bool:
        """True so often."""
        return self.rng.random() < share


@cache
def _side(options: tuple[str, ...], held_out: bool) -> list[str]:
    held = {option for option in options if is_held_out(option)} or {min(options, key=checksum)}
    return [option for option in options if (option in held) is held_out]
