"""Kinds of names: people, places, firms, things that are called something."""

import importlib
import re
from functools import cache

from models.recipe.bank.values.kinds import Draw, Value, kind
from models.recipe.bank.values.lexicon import words
from models.recipe.bank.values.people import Person, person

TITLES = ("Dr", "Professor", "Captain", "Revd", "Dr", "Prof.")
CITIES = (  # Faker's locales that list towns
    "cs_CZ", "da_DK", "de_AT", "de_CH", "de_DE", "fi_FI", "en_IN", "id_ID", "nl_NL", "nl_BE",
    "pl_PL", "pt_PT", "hr_HR", "ro_RO", "sl_SI", "sv_SE",
)  # fmt: skip
SIZES = ("Upper", "North", "Little", "Great", "Port", "Lower", "Old", "East")
BOOKS = (
    "The {0} {1}", "A {0} in {2}", "The {0} of {2}", "{0} and {1}", "The Last {0}", "{3}'s {0}",
    "Letters to {3}", "Under the {0}", "No More {0}s",
)  # fmt: skip


@kind("person", split=False)
def _person(d: Draw) -> Value:
    made = person(d.rng, d.held_out)
    title = d.any(TITLES) if d.chance(0.06) else ""
    return Person(made.first, made.last, made.female, title)


@kind("man", split=False)
def _man(d: Draw) -> Value:
    return person(d.rng, d.held_out, "m")


@kind("woman", split=False)
def _woman(d: Draw) -> Value:
    return person(d.rng, d.held_out, "f")


@kind("first", split=False)
def _first(d: Draw) -> Value:
    return person(d.rng, d.held_out).first


@kind("family", split=False)
def _family(d: Draw) -> Value:
    return d.family()


@cache
def _cities() -> tuple[str, ...]:
    """Towns of many countries."""
    found: set[str] = set()
    for locale in CITIES:
        source = importlib.import_module(f"faker.providers.address.{locale}").Provider
        found |= {city.strip() for city in source.cities}
    return tuple(sorted(c for c in found if re.fullmatch(r"[^\W\d_]{3,12}", c) and c.istitle()))


@cache
def _countries() -> tuple[str, ...]:
    source = importlib.import_module("faker.providers.address.en").Provider
    return tuple(name for name in source.countries if re.fullmatch(r"[A-Za-z ]{3,14}", name))


@kind("town")
def _town(d: Draw) -> Value:
    roll = d.rng.random()
    if roll < 0.4:
        return d.own(words("town"))
    if roll < 0.65:
        return d.own(_cities())
    name = (d.word("town roots") + d.word("town tails")).capitalize()
    return f"{d.any(SIZES)} {name}" if roll > 0.95 else name


@kind("street")
def _street(d: Draw) -> Value:
    return f"{d.word('street name') if d.chance(0.6) else d.family()} {d.word('street')}"


@kind("place")
def _place(d: Draw) -> Value:
    return f"{d.word('building name') if d.chance(0.6) else d.of('town')} {d.word('building')}"


@kind("region", split=False)
def _region(d: Draw) -> Value:
    return d.own(words("region"))


@kind("country", split=False)
def _country(d: Draw) -> Value:
    return d.own(_countries())


def coined(d: Draw) -> str:
    """A made-up word, as firms and products are called."""
    return d.word("coined") + d.word("coined end")


@kind("company")
def _company(d: Draw) -> Value:
    roll = d.rng.random()
    if roll < 0.12:
        return f"{d.family()} and {d.family()}"
    name = d.family() if roll < 0.45 else d.of("town") if roll < 0.6 else coined(d)
    return f"{name} {d.word('company tail')}" if roll < 0.9 else name


@kind("organisation")
def _organisation(d: Draw) -> Value:
    return f"{d.of('town')} {d.word('organisation')}"


@kind("team")
def _team(d: Draw) -> Value:
    return f"{d.of('town')} {d.word('team tail')}"


@kind("event")
def _event(d: Draw) -> Value:
    return f"{d.of('town')} {d.word('event')}" if d.chance(0.6) else d.word("event")


@kind("ship")
def _ship(d: Draw) -> Value:
    if d.chance(0.6):
        return d.own(words("ship"))
    return f"{d.of('first')} {d.any(('Rose', 'May', 'Ann', 'II', 'Louise'))}"


@kind("product")
def _product(d: Draw) -> Value:
    name = coined(d) if d.chance(0.5) else d.word("product word")
    return f"{name} {d.word('product tail')}" if d.chance(0.7) else name


@kind("book")
def _book(d: Draw) -> Value:
    return d.any(BOOKS).format(
        d.word("book word"), d.word("book word"), d.of("town"), d.of("first")
    )


def _listed(name: str) -> None:
    kind(name, split=False)(lambda d: d.own(words(name)))


for _name in (
    "pet", "colour", "material", "animal", "food", "drink", "plant", "job", "language",
    "instrument", "sport", "vehicle", "room", "subject", "hobby",
):  # fmt: skip
    _listed(_name)
