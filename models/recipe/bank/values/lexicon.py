"""The word lists of words.txt."""

from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("words.txt")


@cache
def _lists() -> dict[str, tuple[str, ...]]:
    parts = FILE.read_text(encoding="utf-8").split("\n== ")[1:]
    found = {}
    for part in parts:
        name, _, text = part.partition("\n")
        found[name] = tuple(" ".join(one.split()) for one in text.split("|"))
    return found


def words(name: str) -> tuple[str, ...]:
    """The words or phrases of a list. Raises KeyError if there is no such list."""
    return _lists()[name]
