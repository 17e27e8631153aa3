"""Reads kinds.txt: kinds of subject, what can be said of each, and how it is asked for."""

from dataclasses import dataclass, field
from pathlib import Path

_FILE = Path(__file__).with_name("kinds.txt")
_FIELDS = {"-": "statements", "~": "past", "?": "questions", "k": "keywords", "<": "reversed"}


@dataclass
class Relation:
    """Templates: `{s}` is the subject, `{v}` the value, `{y}` a year."""

    name: str
    value: str  # a kind of values.py, or "=choice|choice"
    statements: list[str] = field(default_factory=list)
    past: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    keywords: list[str] = field(default_factory=list)
    reversed: list[str] = field(default_factory=list)


@dataclass
class Kind:
    name: str
    named: list[str] = field(default_factory=list)
    again: str = ""
    asides: list[str] = field(default_factory=list)
    relations: list[Relation] = field(default_factory=list)


def kinds() -> list[Kind]:
    found: list[Kind] = []
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        sign, _, rest = line.partition(" ")
        if sign in ("", "#"):
            continue
        if sign == "===":
            found.append(Kind(rest))
        elif sign == "named:":
            found[-1].named = rest.split(" | ")
        elif sign == "again:":
            found[-1].again = rest
        elif sign == "aside:":
            found[-1].asides.append(rest)
        elif sign == "##":
            name, value = rest.split(": ", 1)
            found[-1].relations.append(Relation(name, value))
        else:
            getattr(found[-1].relations[-1], _FIELDS[sign]).append(rest)
    return found
