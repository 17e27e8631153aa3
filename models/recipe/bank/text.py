"""The language of the bank's texts: slots and alternatives.

`{boss:person}` defines a slot of a kind, `{door=the yard|the gate}` one with choices; `{boss}` and
`{boss.first}` repeat it, `{:year}` has no name; `[[one||another]]` holds alternatives.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

SLOT = re.compile(r"(?P<name>[A-Za-z]\w*)?\s*(?:\.(?P<part>\w+)|:\s*(?P<kind>\w+))?")
CHOICES = re.compile(r"(?P<name>[A-Za-z]\w*)?\s*=(?P<texts>.*)", re.DOTALL)
BRACKET = re.compile(r"[{}]|\[\[|\]\]")
DEEPEST = 20  # braces within braces


class BankError(ValueError):
    """Something in the bank that cannot be used."""


@dataclass(frozen=True)
class Slot:
    """A place for a value. `name` is empty for one that is used once only."""

    name: str
    part: str = ""
    kind: str = ""
    choices: tuple["Text", ...] = ()

    @property
    def defines(self) -> bool:
        """Whether it says what its values are."""
        return bool(self.kind or self.choices)


@dataclass(frozen=True)
class Alternatives:
    """One of these texts stands in its place."""

    texts: tuple["Text", ...]


@dataclass(frozen=True)
class Text:
    """A parsed text: literal words, slots, alternatives."""

    parts: tuple[str | Slot | Alternatives, ...]

    def slots(self) -> Iterator[Slot]:
        """All slots in it, those within alternatives and choices too."""
        for part in self.parts:
            if isinstance(part, Slot):
                yield part
                for text in part.choices:
                    yield from text.slots()
            elif isinstance(part, Alternatives):
                for text in part.texts:
                    yield from text.slots()

    @cached_property
    def used(self) -> frozenset[str]:
        """The names of all slots in it."""
        return frozenset(slot.name for slot in self.slots() if slot.name)

    @cached_property
    def certain(self) -> frozenset[str]:
        """The names of the slots that stand in it whichever alternatives are chosen."""
        found: set[str] = set()
        for part in self.parts:
            if isinstance(part, Slot) and part.name:
                found.add(part.name)
            elif isinstance(part, Alternatives):
                found |= frozenset.intersection(*(text.certain for text in part.texts))
        return frozenset(found)


def definitions(*texts: Text) -> dict[str, Slot]:
    """The named slots that are defined in the texts.

    Raises BankError if one is defined in two ways, or used and nowhere defined.
    """
    found: dict[str, Slot] = {}
    for text in texts:
        for slot in text.slots():
            if slot.defines and slot.name and found.setdefault(slot.name, slot) != slot:
                raise BankError(f"slot {{{slot.name}}} is defined twice, and not alike")
    for text in texts:
        if unknown := sorted(text.used - found.keys()):
            raise BankError(f"slot {{{unknown[0]}}} is nowhere defined")
    return found


def parse(source: str) -> Text:
    """Raises BankError where brackets do not match or a slot is not well formed."""
    parts: list[str | Slot | Alternatives] = []
    at = 0
    while at < len(source):
        if source.startswith("[[", at):
            end = source.find("]]", at)
            if end < 0 or "[[" in source[at + 2 : end]:
                raise BankError(f"[[ without its ]]: {source[at : at + 40]!r}")
            texts = tuple(parse(one) for one in split(source[at + 2 : end], "||"))
            if len(texts) < 2:
                raise BankError(f"[[ ]] holds no ||: {source[at : end + 2]!r}")
            parts.append(Alternatives(texts))
            at = end + 2
        elif source[at] == "{":
            end = _closing(source, at)
            parts.append(_slot(source[at + 1 : end]))
            at = end + 1
        else:
            if source[at] == "}" or source.startswith("]]", at):
                before = source[max(0, at - 30) : at + 2]
                raise BankError(f"a bracket closes that is not open: {before!r}")
            found = BRACKET.search(source, at + 1)
            end = found.start() if found else len(source)
            parts.append(source[at:end])
            at = end
    return Text(tuple(parts))


def split(source: str, mark: str) -> list[str]:
    """Parts the source at each mark that stands in no braces; white space around is dropped."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(source):
        depth += (letter == "{") - (letter == "}")
        if depth == 0 and at >= start and source.startswith(mark, at):
            parts.append(source[start:at].strip())
            start = at + len(mark)
    return [*parts, source[start:].strip()]


def _closing(source: str, start: int) -> int:
    depth = 0
    for at in range(start, len(source)):
        depth += (source[at] == "{") - (source[at] == "}")
        if depth == 0:
            return at
        if depth > DEEPEST:
            raise BankError(f"braces within braces, too deep: {source[start : start + 40]!r}")
    raise BankError(f"{{ without its }}: {source[start : start + 40]!r}")


def _slot(inner: str) -> Slot:
    if found := CHOICES.fullmatch(inner.strip()):
        choices = tuple(parse(" ".join(text.split())) for text in split(found["texts"], "|"))
        if len(choices) < 2 or not all(text.parts for text in choices):
            raise BankError(f"an empty choice, or one alone, in {{{inner}}}")
        return Slot(found["name"] or "", choices=choices)
    found = SLOT.fullmatch(inner.strip())
    if not found or not inner.strip():
        raise BankError(f"not a slot: {{{inner}}}")
    return Slot(found["name"] or "", found["part"] or "", found["kind"] or "")
