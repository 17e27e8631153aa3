"""Subjects: what passages tell of, with a value for each relation."""

import random
import re
from dataclasses import dataclass, field

from models.recipe.bank.relations import Kind, Relation
from models.recipe.bank.render import Bindings, render
from models.recipe.bank.text import Slot, Text

PRONOUNS = {"it": "its", "they": "their", "she": "her", "he": "his", "we": "our"}
# Kinds of values that answer the same question word: to tell one may seem to tell another.
ALIKE = [
    {"person", "man", "woman", "first", "family", "company", "organisation"},
    {"year", "date", "day", "month", "weekday", "time", "duration"},
    {"town", "street", "place", "region", "country", "room"},
    {"count", "number", "percent", "money"},
    {"distance", "height", "area", "weight", "volume", "speed", "temperature"},
    {"phone", "email", "code", "url", "file"},
]


def alike(one: Slot, other: Slot) -> bool:
    """Whether values of the two slots could answer the same question."""
    if not one.kind or not other.kind:
        return False
    return one.kind == other.kind or any({one.kind, other.kind} <= group for group in ALIKE)


@dataclass
class Subject:
    """Something that passages tell of, with a value for each relation that they tell."""

    kind: Kind
    bindings: Bindings
    names: list[str]  # the ways to name it in full
    again: list[str]  # the ways to refer to it
    facts: dict[str, str] = field(default_factory=dict)  # by the relation's name
    extras: list[Slot] = field(default_factory=list)  # what else its statements tell

    @classmethod
    def drawn(cls, rng: random.Random, kind: Kind, held_out: bool, taken: set[str]) -> "Subject":
        """A new one of a kind."""
        bindings = Bindings(rng, kind.definitions, held_out, taken)
        used = rng.choice(kind.named).used  # names that do not share a word are of different things
        names = [render(text, bindings).text for text in kind.named if text.used == used]
        return cls(kind, bindings, names, [render(text, bindings).text for text in kind.again])

    def value(self, relation: Relation) -> str:
        """What the relation says of it; drawn when first asked for."""
        if relation.name not in self.facts:
            self.facts[relation.name] = self.bindings.within().value(relation.value)
        return self.facts[relation.name]

    def within(self, relation: Relation, rng: random.Random, text: Text) -> Bindings:
        """Bindings in which a text of the relation can be rendered."""
        begins = text.parts[0] in (Slot("r"), Slot("r_own"))
        plain = [form for form in self.again if form not in PRONOUNS or form == "it"]
        form = rng.choice(self.again if begins or not plain else plain)  # `he` is a subject only
        values = {"s": rng.choice(self.names), "v": self.value(relation), "r": form}
        values["r_own"] = PRONOUNS.get(form, form + "'s")
        return self.bindings.within(**values)

    def title(self, rng: random.Random) -> str:
        """Its name as a heading has it."""
        name = re.sub(r"^(?:the|our|my|his|her|your|their|this|a|an) ", "", rng.choice(self.names))
        return name[:1].upper() + name[1:]
