"""All of the bank, read once: its training side and its held-out side."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from models.recipe.bank import documents, relations, talk

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Side:
    """What one side of the split may draw from."""

    documents: list[documents.Template]
    kinds: list[relations.Kind]
    talk: list[talk.Exchange]  # the same on both sides


@cache
def side(held_out: bool) -> Side:
    """Raises BankError if a file of the bank is not well formed."""

    def files(folder: str) -> list[Path]:
        return sorted((FOLDER / folder).glob("*.txt"))

    return Side(
        [d for path in files("documents") for d in documents.read(path) if d.held_out is held_out],
        [k for path in files("relations") for k in relations.read(path) if k.held_out is held_out],
        [exchange for path in files("talk") for exchange in talk.read(path)],
    )
