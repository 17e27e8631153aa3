"""A small made-up world: things with names, and facts to state and ask in many ways."""

import random
import re
from dataclasses import dataclass, replace

from models.recipe import words
from models.recipe.names import Names
from models.recipe.relations import OF_PEOPLE, OF_THINGS, Relation


def capital(text: str) -> str:
    """The text with its first letter in upper case, the rest untouched."""
    return text[:1].upper() + text[1:]


def articled(text: str) -> str:
    """The text with `an` for `a` before a vowel."""
    return re.sub(r"\b([Aa]) (?=[aeioAEIO]|[uU](?!ni|se))", r"\1n ", text)


LEADS = ("as is known, ", "to this day ", "of course, ", "by the way, ", "it is said that ")


@dataclass(frozen=True)
class Entity:
    """Something that facts are about: `the Velmora Lighthouse`, `Thornwick`, `Ottoline Dask`."""

    name: str
    kind: str  # `lighthouse`, `town`, `person`
    pronoun: str  # `it`, `she`, `he`
    place: str  # the proper part of its name; empty for people

    @property
    def title(self) -> str:
        """The name without its article, as a heading has it."""
        return self.name.removeprefix("the ")


@dataclass(frozen=True)
class Fact:
    """One relation of an entity. `slots` holds the value `v` and the relation's own words."""

    entity: Entity
    relation: Relation
    slots: dict[str, str]

    @property
    def value(self) -> str:
        return self.slots["v"]

    def _fill(self, template: str, name: str) -> str:
        kind = "the " + self.entity.kind if self.entity.kind != "person" else self.entity.pronoun
        their = {"it": "its", "she": "her", "he": "his"}[self.entity.pronoun]
        slots = {key: word.replace("{E}", name) for key, word in self.slots.items()}
        filled = template.format(E=name, it=self.entity.pronoun, its=their, kind=kind, **slots)
        return articled(capital(filled))

    def stated(self, rng: random.Random, full: bool) -> str:
        """A sentence that tells it; names the entity if `full`, else refers to it."""
        templates = self.relation.full if full else self.relation.short
        lead = rng.choice(LEADS) if rng.random() < 0.12 else ""
        return self._fill(lead + rng.choice(templates), self.entity.name)

    def asked(self, rng: random.Random) -> str:
        """A question for it."""
        return self._fill(rng.choice(self.relation.ask), self.entity.name)

    def answered(self, passage: int | None) -> str:
        """The one sentence that answers; the number of its passage follows the entity's name."""
        cited = f"[{passage}]" if passage else ""
        return self._fill(self.relation.answer, self.entity.name + cited) + "."

    def unanswered(self, passage: int | None) -> str:
        """The same, saying that the value is not told; `passage` is about the entity, if one is."""
        other = replace(self, slots={**self.slots, "v": self.relation.unknown})
        return other.answered(passage)

    def key(self) -> str:
        """Its name as a key of a JSON object. Two facts of one key and entity would clash."""
        return self.relation.key.format(**self.slots).replace(" ", "_")


class World:
    """Makes entities and facts from one seeded source of names."""

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng = rng
        self.names = Names(rng, held_out)

    def entity(self, beside: str | None = None) -> Entity:
        """A thing, a town or a person; or a thing that shares the proper name `beside`."""
        roll = self.rng.random()
        if beside or roll < 0.65:
            kind = self.rng.choice(words.KINDS)
            place = beside or self.names.place()
            name = f"{kind} of {place}" if self.rng.random() < 0.1 else f"{place} {kind}"
            name = " ".join(w if w == "of" else capital(w) for w in name.split())
            return Entity("the " + name, kind, "it", place)
        if roll < 0.82:
            place = self.names.place()
            return Entity(place, self.rng.choice(words.SETTLEMENTS), "it", place)
        return Entity(self.names.person(), "person", self.rng.choice(("she", "he")), "")

    def fact(self, entity: Entity) -> Fact:
        """A random fact about the entity."""
        relations = OF_PEOPLE if entity.kind == "person" else OF_THINGS
        relation = self.rng.choices(relations, [r.weight for r in relations])[0]
        return Fact(entity, relation, relation.make(self.names))

    def facts(self, entity: Entity, count: int) -> list[Fact]:
        """Facts about one entity, no two of one key."""
        found: dict[str, Fact] = {}
        while len(found) < count:
            fact = self.fact(entity)
            found.setdefault(fact.key(), fact)
        return list(found.values())
