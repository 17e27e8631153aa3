"""The bank's relations: kinds of subjects, and ways to tell and to ask what is so about each.

The format is described in FORMAT.md beside this file.
"""

import re
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from models.recipe.bank.render import validate
from models.recipe.bank.text import Alternatives, BankError, Slot, Text, definitions, parse, split
from models.recipe.bank.values import KINDS

# What the program puts in: the subject, the value, the subject again, and that with its `'s`.
GIVEN = ("s", "v", "r", "r_own")

POSSESSIVE = re.compile(r"['’]s\b")


@dataclass
class Relation:
    """Something that may be so about a subject, and the texts that tell it or ask for it."""

    line: int
    name: str
    value: Slot
    full: list[Text] = field(default_factory=list)  # statements that name the subject
    short: list[Text] = field(default_factory=list)  # statements after one that has named it
    labels: list[str] = field(default_factory=list)  # for lists, tables and records
    asks: list[Text] = field(default_factory=list)
    finds: list[Text] = field(default_factory=list)  # questions for the subject


@dataclass
class Kind:
    """A kind of subjects."""

    file: str
    line: int
    name: str
    named: list[Text] = field(default_factory=list)
    again: list[Text] = field(default_factory=list)
    relations: list[Relation] = field(default_factory=list)

    @property
    def held_out(self) -> bool:
        """Whether it is kept for tests."""
        return zlib.crc32(self.name.encode()) % 8 == 0

    @cached_property
    def definitions(self) -> dict[str, Slot]:
        """The slots of its names."""
        return definitions(*self.named, *self.again)


def read(path: Path) -> list[Kind]:
    """The kinds of a file. Raises BankError with all that is wrong, a line each."""
    kinds: list[Kind] = []
    wrong: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            if line.strip():
                _line(kinds, path.name, number, line.strip())
        except BankError as error:
            wrong.append(f"{path.name}:{number}: {error}")
    for kind in kinds:
        wrong += [f"{path.name}:{error}" for error in _lacks(kind)]
    if wrong:
        raise BankError("\n".join(wrong))
    return kinds


def _line(kinds: list[Kind], file: str, number: int, line: str) -> None:
    """Adds what a line says. Raises BankError."""
    if line.startswith("==="):
        kinds.append(Kind(file, number, line.removeprefix("===").strip()))
        return
    if not kinds:
        raise BankError("text before the first `=== kind`")
    kind = kinds[-1]
    for label, texts in (("named:", kind.named), ("again:", kind.again)):
        if line.startswith(label):
            texts += [_parsed(text) for text in split(line.removeprefix(label), "|")]
            return
    if line.startswith("## "):
        name, colon, value = line[3:].partition(":")
        if not colon:
            raise BankError("a relation begins `## name: kind`")
        value = value.strip()
        slot = parse("{v" + (value if value.startswith("=") else ":" + value) + "}")
        validate(slot)
        kind.relations.append(Relation(number, name.strip(), next(slot.slots())))
        return
    mark, words = line[:2], line[2:].strip()
    if not kind.relations or mark not in ("- ", "~ ", ": ", "? ", "< "):
        raise BankError(f"not a line of this format: {line[:30]!r}")
    relation = kind.relations[-1]
    if mark == ": ":
        relation.labels += split(words, "|")
        return
    lists = {"- ": relation.full, "~ ": relation.short, "? ": relation.asks, "< ": relation.finds}
    parts = [words] if mark in ("- ", "~ ") else split(words, "|")
    for part in parts:
        text = _parsed(part)
        needed = {"- ": {"s", "v"}, "~ ": {"v"}, "? ": set(), "< ": {"v"}}[mark]
        if missing := sorted(needed - text.used):
            raise BankError(f"{{{missing[0]}}} is missing: {part!r}")
        definitions(
            text, *kind.named, *kind.again, Text(tuple(Slot(name, kind="person") for name in GIVEN))
        )
        lists[mark].append(text)


def _parsed(source: str) -> Text:
    """A text in which `{town}` is short for `{town:town}`, and `{r}'s` one slot, for `its`."""
    text = parse(source)
    parts: list[str | Slot | Alternatives] = []
    for part in text.parts:
        if isinstance(part, Slot) and part.name in KINDS and not part.defines and not part.part:
            part = replace(part, kind=part.name)
        if isinstance(part, str) and POSSESSIVE.match(part) and parts and parts[-1] == Slot("r"):
            parts[-1], part = Slot("r_own"), part[2:]
        parts.append(part)
    made = Text(tuple(parts))
    validate(made)
    return made


def _lacks(kind: Kind) -> list[str]:
    """What is missing for a kind to be usable."""
    found = []
    if not kind.named or not kind.again:
        found.append(f"{kind.line}: no `named:`, or no `again:`")
    if len(kind.relations) < 3:
        found.append(f"{kind.line}: {len(kind.relations)} relations")
    for one in kind.relations:
        for texts, what in (
            (one.full, "- "),
            (one.short, "~ "),
            (one.labels, ": "),
            (one.asks, "? "),
        ):
            if not texts:
                found.append(f"{one.line}: relation {one.name} has no line `{what}`")
    return found
