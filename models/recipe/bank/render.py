"""Texts of the bank with values in their slots, and where these stand."""

import random
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from models.recipe.bank.text import Alternatives, BankError, Slot, Text
from models.recipe.bank.values import KINDS, LITERAL, Value, draw

SENTENCE_START = re.compile(r"(?:^|\n(?:- )?|(?:[a-z]{3}|\d|[)’'\"”])[.!?]['\"”]?\s+)[“\"]?$")
JOINED = re.compile(r"\w\w")
ARTICLE = re.compile(r"(?:^|(?<=[\s(“\"-]))(a|an|A|An) $")
# `a` before a vowel that sounds as a consonant, `an` before a figure or a letter that does not.
VOWEL = re.compile(
    r"(?!u(?:ni|s[aeiu]|ti|k|r[aeio]|fo)|eu|ew|one|once|uk)(?:[aeiou]|hour|honest|heir)|8|11\b|18\b|8\d",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Piece:
    """A value in a text: text[start:end] is what slot `name` stands for."""

    name: str
    start: int
    end: int


@dataclass
class Rendered:
    """A text and its values."""

    text: str = ""
    pieces: list[Piece] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Literal words; of two full stops, one at the end of a value, one remains."""
        twice = self.text.endswith(".") and text.startswith(".") and not text.startswith("..")
        self.text += text[1:] if twice else text

    def put(self, name: str, value: str, capitalise: bool = True) -> None:
        """A value; an article before it follows its sound, and it begins a sentence as it must."""
        if article := ARTICLE.search(self.text):
            word = "an" if VOWEL.match(value) else "a"
            word = word.capitalize() if article[1][0] == "A" else word
            if word != article[1] and (
                word[0] == "a" or SENTENCE_START.search(self.text[: article.start(1)])
            ):
                self.text = self.text[: article.start(1)] + word + " "
        if capitalise and value[:1].islower() and SENTENCE_START.search(self.text[-12:]):
            value = value[0].upper() + value[1:]
        self.pieces.append(Piece(name, len(self.text), len(self.text) + len(value)))
        self.text += value

    def append(self, other: "Rendered") -> None:
        """Another text, with its values."""
        at = len(self.text)
        self.text += other.text
        self.pieces += [Piece(p.name, p.start + at, p.end + at) for p in other.pieces]

    def stretches(self, wanted: str, names: Collection[str]) -> list[tuple[int, int]]:
        """(start, end) of the wanted words wherever they hold a value of one of the slots.

        Their first letter may be in either case; they begin and end with words or with values.
        """
        values = [piece for piece in self.pieces if piece.name in names]
        starts, ends = {piece.start for piece in values}, {piece.end for piece in values}
        return [
            (start, end)
            for start, end in _places(self.text, wanted)
            if any(start <= piece.start and piece.end <= end for piece in values)
            and (start == 0 or start in starts or not JOINED.match(self.text, start - 1))
            and (end in ends or not JOINED.match(self.text, end - 1))
        ]


def _places(text: str, wanted: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each occurrence, in either case of the first letter, on one line or two."""
    line, words = text.replace("\n", " "), " ".join(wanted.split())
    at = line.find(words[1:], 1)
    while at > 0:
        if line[at - 1].lower() == words[0].lower():
            yield at - 1, at - 1 + len(words)
        at = line.find(words[1:], at + 1)


class Bindings:
    """What the slots stand for, drawn when first asked for; no two slots stand for the same."""

    def __init__(
        self,
        rng: random.Random,
        definitions: Mapping[str, Slot],
        held_out: bool = False,
        taken: set[str] | None = None,
    ) -> None:
        """`taken` are words that no slot may stand for; what is drawn is added to it."""
        self.rng = rng
        self.definitions = definitions
        self.held_out = held_out
        self.values: dict[str, Value] = {}
        self._taken = set() if taken is None else taken

    def within(self, **values: Value) -> "Bindings":
        """A copy in which some slots stand for the given values."""
        copy = Bindings(self.rng, self.definitions, self.held_out, self._taken)
        copy.values = self.values | values
        return copy

    def value(self, slot: Slot) -> str:
        """The words for a slot. Raises BankError if it is unknown, or lacks such a part."""
        if slot.name in self.values:
            value = self.values[slot.name]
        else:
            source = slot if slot.defines else self.definitions[slot.name]
            value = self._fresh(source)
            if slot.name:
                self.values[slot.name] = value
        if not slot.part:
            return str(value)
        if isinstance(value, str) or slot.part.lower() not in value.parts:
            raise BankError(f"{{{slot.name}.{slot.part}}}: there is no such part")
        part = value.parts[slot.part.lower()]
        return part.capitalize() if slot.part[0].isupper() else part

    def _fresh(self, slot: Slot) -> Value:
        for _ in range(50):
            if slot.choices:
                value: Value = render(self.rng.choice(slot.choices), self).text
            else:
                value = draw(self.rng, slot.kind, self.held_out)
            words = {str(value)} if isinstance(value, str) else {value.first, value.last}
            if not words & self._taken:
                break
        self._taken |= words
        return value


def render(text: Text, bindings: Bindings, into: Rendered | None = None) -> Rendered:
    """The text with values for its slots."""
    into = into or Rendered()
    for part in text.parts:
        if isinstance(part, str):
            into.add(part)
        elif isinstance(part, Alternatives):
            render(bindings.rng.choice(part.texts), bindings, into)
        else:
            source = part if part.defines else bindings.definitions.get(part.name)
            literal = source is not None and source.kind in LITERAL
            into.put(part.name, bindings.value(part), not literal)
    return into


def validate(text: Text) -> None:
    """Raises BankError for a slot of an unknown kind."""
    for slot in text.slots():
        if slot.kind and slot.kind not in KINDS:
            raise BankError(f"there is no kind {slot.kind!r} of values")
