"""Sentences beside the point, for between the facts of a passage."""

import random
from functools import cache
from pathlib import Path

from models.recipe.bank.render import Bindings, render
from models.recipe.bank.text import Text, parse

FILE = Path(__file__).with_name("noise.txt")


@cache
def _sentences() -> list[Text]:
    return [parse(line) for line in FILE.read_text(encoding="utf-8").splitlines() if line]


def noise(rng: random.Random, held_out: bool) -> str:
    """One sentence."""
    return render(rng.choice(_sentences()), Bindings(rng, {}, held_out)).text
