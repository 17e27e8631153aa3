"""What the skills draw from: a seeded generator and a source of names."""

import random
import re

from models.recipe.bank.render import VOWEL
from models.recipe.names import Names


def capital(text: str) -> str:
    """The text with its first letter in upper case, the rest untouched."""
    return text[:1].upper() + text[1:]


def articled(text: str) -> str:
    """The text with `an` for `a` before a vowel."""
    return re.sub(rf"\b([Aa]) (?={VOWEL.pattern})", r"\1n ", text)


class World:
    """A generator, and names from one side of the split."""

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out
        self.names = Names(rng, held_out)
