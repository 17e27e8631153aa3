"""The model card: what in it is about particular weights stands between marks.

The figures are written by `make` and `evaluate --card`; what hands wrote of the weights that ship
is taken out of the card of others that `make` makes.
"""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from models.recipe.files import replacing

OURS = Path(__file__).parents[1] / "demo/README.md"


class Place(NamedTuple):
    what: str
    begins: str
    ends: str


FIGURES = Place("the figures", "<!-- figures -->", "<!-- end of figures -->")
WEIGHTS = Place("words on the weights", "<!-- about these weights -->", "<!-- end -->")
NOT_YET = "Not measured yet."


def card_in(folder: Path) -> Path:
    """The model card that gets the figures, made like ours if there is none. Raises ValueError, at
    once and not behind hours, if there is no place for them.
    """
    card = folder / "README.md"
    if not card.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(card) as new:
            shutil.copyfile(OURS, new)
    for place in (FIGURES, WEIGHTS):
        _around(card, place)
    return card


def begin_anew(card: Path, seed: int) -> None:
    """Says of weights that are about to be written what is known of them: the seed."""
    said = f"Made by `make model` with seed {seed}; nothing but the figures below was measured."
    _say(card, WEIGHTS, said)
    write_figures(card, NOT_YET)


def write_figures(card: Path, figures: str) -> None:
    """Raises ValueError if there is no place for them."""
    _say(card, FIGURES, f"\n{figures}\n")


def _around(card: Path, place: Place) -> list[str]:
    """The texts around what stands between the marks of a place, which may be there more than once.
    Raises ValueError if they are not there.
    """
    _, begins, ends = map(re.escape, place)
    texts = re.split(f"{begins}.*?{ends}", card.read_text(), flags=re.DOTALL)
    if len(texts) == 1:
        raise ValueError(f"{card} has no place for {place.what}: {place.begins} … {place.ends}")
    return texts


def _say(card: Path, place: Place, words: str) -> None:
    """Where the marks stand more than once, at the first; nothing at the others."""
    _, begins, ends = place
    before, *behind = _around(card, place)
    with replacing(card) as new:
        new.write_text(before + begins + words + ends + (begins + ends).join(behind))
