"""The kinds of values that a slot may stand for: names, dates, amounts, things."""

import importlib
import random
import re
from collections.abc import Callable
from functools import cache

from models.recipe.bank import lexicon
from models.recipe.bank.people import Person, family_name, first_name, person
from models.recipe.bank.split import is_held_out

Value = str | Person
Maker = Callable[["Draw"], Value]

KINDS: dict[str, Maker] = {}
OPEN: set[str] = set()  # kinds of so many values that a whole one is on one side of the split
LITERAL_KINDS = {"email", "url", "file", "code"}  # never capitalised
CITIES = [
    "cs_CZ",
    "da_DK",
    "de_AT",
    "de_CH",
    "de_DE",
    "fi_FI",
    "en_IN",
    "id_ID",
    "nl_NL",
    "nl_BE",
    "pl_PL",
    "pt_PT",
    "hr_HR",
    "ro_RO",
    "sl_SI",
    "sv_SE",
]


def draw(rng: random.Random, kind: str, held_out: bool) -> Value:
    """A value of a kind, from one side of the split. Raises KeyError if there is no such kind."""
    source = Draw(rng, held_out)
    make = KINDS[kind]
    value = make(source)
    if kind in OPEN:
        while is_held_out(str(value)) is not held_out:
            value = make(source)
    return value


def kind(name: str, is_open: bool = True) -> Callable[[Maker], Maker]:
    """Names the kind that a function makes."""

    def register(make: Maker) -> Maker:
        KINDS[name] = make
        if is_open:
            OPEN.add(name)
        return make

    return register


class Draw:
    """Where makers draw from: a generator and one side of the split."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out

    def one(self, options: list[str] | tuple[str, ...]) -> str:
        """Any of a list, whichever side."""
        return self.rng.choice(options)

    def own(self, text: tuple[str, ...]) -> str:
        """One of a list that is on this side."""
        return self.rng.choice(_side(text, self.held_out))

    def whole(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def of(self, kind: str) -> str:
        """A value of another kind."""
        return str(draw(self.rng, kind, self.held_out))

    def family(self) -> str:
        return family_name(self.rng, self.held_out)


@cache
def _side(options: tuple[str, ...], held_out: bool) -> list[str]:
    return [option for option in options if is_held_out(option) is held_out]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.replace("_", " ") for word in text.split())


# --- people and places


@kind("person", is_open=False)
def _person(d: Draw) -> Value:
    made = person(d.rng, d.held_out)
    if d.rng.random() < 0.06:
        return Person(
            made.first,
            made.last,
            made.female,
            d.one(("Dr", "Professor", "Captain", "Revd", "Dr", "Prof.")),
        )
    return made


@kind("man", is_open=False)
def _man(d: Draw) -> Value:
    return person(d.rng, d.held_out, "m")


@kind("woman", is_open=False)
def _woman(d: Draw) -> Value:
    return person(d.rng, d.held_out, "f")


@kind("first", is_open=False)
def _first(d: Draw) -> Value:
    return first_name(d.rng, d.held_out)


@kind("family", is_open=False)
def _family(d: Draw) -> Value:
    return d.family()


@cache
def _cities() -> tuple[str, ...]:
    """Towns of many countries, from Faker's lists."""
    found: set[str] = set()
    for locale in CITIES:
        source = importlib.import_module(f"faker.providers.address.{locale}").Provider
        found |= {str(city).strip() for city in source.cities}
    return tuple(
        sorted(city for city in found if re.fullmatch(r"[^\W\d_]{3,12}", city) and city.istitle())
    )


TOWNS = _words(lexicon.TOWNS)
ROOTS, TAILS = lexicon.ROOTS.split(), lexicon.TAILS.split()


@kind("town")
def _town(d: Draw) -> Value:
    roll = d.rng.random()
    if roll < 0.4:
        return d.own(TOWNS)
    if roll < 0.65:
        return d.own(_cities())
    name = (d.one(ROOTS) + d.one(TAILS)).capitalize()
    if roll > 0.95:
        return (
            f"{d.one(('Upper', 'North', 'Little', 'Great', 'Port', 'Lower', 'Old', 'East'))} {name}"
        )
    return name


@kind("street")
def _street(d: Draw) -> Value:
    name = d.one(lexicon.STREET_NAMES) if d.rng.random() < 0.6 else d.family()
    return f"{name} {d.one(lexicon.STREETS)}"


@kind("place")
def _place(d: Draw) -> Value:
    name = d.one(lexicon.BUILDING_NAMES) if d.rng.random() < 0.6 else d.of("town")
    return f"{name} {d.one(lexicon.BUILDINGS)}"


@kind("region", is_open=False)
def _region(d: Draw) -> Value:
    return d.own(tuple(lexicon.REGIONS))


@cache
def _countries() -> tuple[str, ...]:
    source = importlib.import_module("faker.providers.address.en").Provider
    return tuple(name for name in source.countries if re.fullmatch(r"[A-Za-z ]{3,14}", name))


@kind("country", is_open=False)
def _country(d: Draw) -> Value:
    return d.own(_countries())


@kind("company")
def _company(d: Draw) -> Value:
    roll = d.rng.random()
    if roll < 0.12:
        return f"{d.family()} and {d.family()}"
    if roll < 0.45:
        name = d.family()
    elif roll < 0.6:
        name = d.of("town")
    else:
        name = _coined(d)
    return f"{name} {d.one(lexicon.COMPANY_TAILS)}" if roll < 0.9 else name


def _coined(d: Draw) -> str:
    return d.one(lexicon.COINED.split()) + d.one(lexicon.COINED_ENDS.split())


@kind("organisation")
def _organisation(d: Draw) -> Value:
    return f"{d.of('town')} {d.one(lexicon.ORGANISATIONS)}"


@kind("team")
def _team(d: Draw) -> Value:
    return f"{d.of('town')} {d.one(lexicon.TEAM_TAILS)}"


@kind("event")
def _event(d: Draw) -> Value:
    name = d.one(lexicon.EVENTS)
    return f"{d.of('town')} {name}" if d.rng.random() < 0.6 else name


@kind("ship")
def _ship(d: Draw) -> Value:
    return (
        d.own(tuple(lexicon.SHIPS))
        if d.rng.random() < 0.6
        else f"{d.of('first')} {d.one(('Rose', 'May', 'Ann', 'II', 'Louise'))}"
    )


@kind("product")
def _product(d: Draw) -> Value:
    name = _coined(d) if d.rng.random() < 0.5 else d.one(lexicon.PRODUCT_WORDS)
    return f"{name} {d.one(lexicon.PRODUCT_TAILS)}" if d.rng.random() < 0.7 else name


@kind("book")
def _book(d: Draw) -> Value:
    one, other = d.one(lexicon.BOOK_WORDS), d.one(lexicon.BOOK_WORDS)
    shape = d.one(
        (
            "The {0} {1}",
            "A {0} in {2}",
            "The {0} of {2}",
            "{0} and {1}",
            "The Last {0}",
            "{3}'s {0}",
            "An {0} for {3}",
            "Under the {0}",
            "No More {0}s",
        )
    )
    if shape.startswith("An ") and one[0] not in "AEIOU":
        shape = "A" + shape[2:]
    return shape.format(one, other, d.of("town"), d.of("first"))


@kind("pet", is_open=False)
def _pet(d: Draw) -> Value:
    return d.own(tuple(lexicon.PETS.split()))


# --- things


def _listed(name: str, options: list[str]) -> None:
    values = tuple(options)
    kind(name, is_open=False)(lambda d: d.own(values))


for _name, _options in {
    "colour": lexicon.COLOURS,
    "material": lexicon.MATERIALS,
    "animal": lexicon.ANIMALS,
    "food": lexicon.FOODS,
    "drink": lexicon.DRINKS,
    "plant": lexicon.PLANTS,
    "job": lexicon.JOBS,
    "language": lexicon.LANGUAGES.split(),
    "instrument": lexicon.INSTRUMENTS,
    "sport": lexicon.SPORTS,
    "vehicle": lexicon.VEHICLES,
    "room": lexicon.ROOMS,
    "subject": lexicon.SUBJECTS,
    "hobby": lexicon.HOBBIES,
}.items():
    _listed(_name, _options)


# --- dates and times

MONTHS, WEEKDAYS = lexicon.MONTHS.split(), lexicon.WEEKDAYS.split()


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


@kind("date")
def _date(d: Draw) -> Value:
    day, month, year = d.whole(1, 28), d.whole(1, 12), d.whole(1950, 2031)
    name = MONTHS[month - 1]
    shapes = (
        f"{day} {name} {year}", f"{name} {day}, {year}", f"{day} {name} {year}", f"{_ordinal(day)} {name} {year}",
        f"{day:02}/{month:02}/{year}", f"{year}-{month:02}-{day:02}", f"{day} {name[:3]} {year}",
    )  # fmt: skip
    return d.one(shapes)


@kind("day", is_open=False)
def _day(d: Draw) -> Value:
    day, name = d.whole(1, 28), d.one(MONTHS)
    return d.one((f"{day} {name}", f"{name} {day}", f"{day} {name}", f"{_ordinal(day)} {name}"))


@kind("month", is_open=False)
def _month(d: Draw) -> Value:
    return d.one(MONTHS)


@kind("weekday", is_open=False)
def _weekday(d: Draw) -> Value:
    return d.one(WEEKDAYS)


@kind("year")
def _year(d: Draw) -> Value:
    return str(d.whole(1700, 2029) if d.rng.random() < 0.5 else d.whole(1930, 2029))


@kind("time", is_open=False)
def _time(d: Draw) -> Value:
    hour, minute = (
        d.whole(5, 22),
        d.one(("00", "15", "30", "45", "05", "10", "20", "40", "50", "55", "00", "30")),
    )
    twelve, half = (hour - 1) % 12 + 1, "am" if hour < 12 else "pm"
    dotted = half[0] + ".m."
    shapes = [f"{hour}:{minute}", f"{hour:02}:{minute}", f"{twelve}.{minute} {half}", f"{twelve}:{minute} {half}",
              f"{twelve}.{minute} {dotted}", f"{twelve}:{minute} {half.upper()}"]  # fmt: skip
    if minute == "00":
        shapes += [f"{twelve} {half}", f"{twelve}{half}", f"{twelve} o'clock"]
    return d.one(shapes)


@kind("duration", is_open=False)
def _duration(d: Draw) -> Value:
    unit, most = d.rng.choice(
        (("minute", 90), ("hour", 48), ("day", 30), ("week", 12), ("month", 24), ("year", 30))
    )
    number = d.whole(2, most)
    words = lexicon.NUMBER_WORDS.split()
    if number <= 12 and d.rng.random() < 0.5:
        return f"{words[number - 2]} {unit}s"
    return f"{number} {unit}s"


# --- amounts


def _grouped(number: int, d: Draw) -> str:
    return (
        f"{number:,}"
        if number >= 10000 or (number >= 1000 and d.rng.random() < 0.6)
        else str(number)
    )


@kind("count", is_open=False)
def _count(d: Draw) -> Value:
    number = d.whole(2, 20)
    return lexicon.NUMBER_WORDS.split()[number - 2] if d.rng.random() < 0.5 else str(number)


@kind("number")
def _number(d: Draw) -> Value:
    high = d.rng.choice((99, 999, 999, 9999))
    return _grouped(d.whole(21, high), d)


@kind("percent", is_open=False)
def _percent(d: Draw) -> Value:
    number = d.one((str(d.whole(2, 98)), str(d.whole(2, 98)), f"{d.whole(1, 40)}.{d.whole(1, 9)}"))
    return number + d.one(("%", "%", "%", " per cent", " percent"))


@kind("money")
def _money(d: Draw) -> Value:
    roll = d.rng.random()
    if roll < 0.45:
        amount = f"{d.whole(1, 60)}.{d.one(('50', '25', '75', '99', '20', '80', '95', '40', '00', '10'))}"
    elif roll < 0.88:
        amount = str(d.whole(2, d.rng.choice((20, 60, 400))))
    else:
        amount = _grouped(d.whole(4, 400) * d.rng.choice((50, 100, 125)), d)
    shape = d.one(
        (
            "£{}",
            "£{}",
            "${}",
            "${}",
            "€{}",
            "{} euros",
            "{} pounds",
            "{} dollars",
            "€{}",
            "£{}",
            "CHF {}",
            "{} kr",
        )
    )
    return shape.format(amount)


def _measure(name: str, *units: tuple[str, int, int]) -> None:
    """A kind of amounts in one of some units, each with its least and greatest number."""

    def make(d: Draw) -> Value:
        unit, low, high = d.rng.choice(units)
        number = d.whole(low, high)
        shown = (
            f"{number}.{d.whole(1, 9)}"
            if number < 20 and d.rng.random() < 0.3
            else _grouped(number, d)
        )
        return unit.format(shown)

    kind(name, is_open=False)(make)


_measure(
    "distance",
    ("{} miles", 2, 90),
    ("{} km", 2, 300),
    ("{} kilometres", 2, 90),
    ("{} metres", 20, 900),
    ("{} m", 20, 900),
    ("{} yards", 20, 900),
)
_measure(
    "weight",
    ("{} kg", 2, 900),
    ("{} kilos", 2, 90),
    ("{} grams", 20, 900),
    ("{} g", 20, 900),
    ("{} tonnes", 2, 90),
    ("{} lb", 2, 200),
    ("{} ounces", 2, 30),
)
_measure(
    "height",
    ("{} metres", 2, 300),
    ("{} m", 2, 300),
    ("{} feet", 3, 900),
    ("{} cm", 20, 300),
    ("{} ft", 3, 900),
)
_measure(
    "area",
    ("{} hectares", 2, 900),
    ("{} acres", 2, 900),
    ("{} square metres", 12, 9000),
    ("{} m²", 12, 900),
    ("{} sq ft", 100, 9000),
)
_measure(
    "volume",
    ("{} litres", 2, 900),
    ("{} ml", 20, 900),
    ("{} gallons", 2, 90),
    ("{} pints", 2, 30),
    ("{} cubic metres", 2, 900),
)
_measure(
    "temperature", ("{}°C", 2, 250), ("{} °C", 2, 250), ("{} degrees", 2, 90), ("{}°F", 30, 450)
)
_measure(
    "speed", ("{} mph", 5, 90), ("{} km/h", 5, 300), ("{} knots", 3, 40), ("{} rpm", 200, 9000)
)


# --- codes and addresses


@kind("code")
def _code(d: Draw) -> Value:
    letters = "".join(d.rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=3))
    shapes = (f"{letters[:2]}-{d.whole(100, 999)}", f"{letters[0]}{d.whole(2, 99)}", str(d.whole(1000, 99999)), f"{letters}-{d.whole(1000, 9999)}",
              f"{letters[0]}-{d.whole(10, 999)}-{letters[1]}", f"{letters[:2]}{d.whole(1000, 9999)}", f"#{d.whole(100, 9999)}")  # fmt: skip
    return d.one(shapes)


@kind("phone")
def _phone(d: Draw) -> Value:
    def digits(count: int) -> str:
        return "".join(d.rng.choices("0123456789", k=count))

    shapes = (f"0{d.whole(1, 9)}{digits(3)} {digits(6)}", f"0{d.whole(1, 9)}{digits(2)} {digits(3)} {digits(4)}", f"+{d.whole(31, 98)} {d.whole(10, 99)} {digits(3)} {digits(4)}",
              f"({d.whole(201, 989)}) {d.whole(200, 999)}-{digits(4)}", f"{d.whole(200, 999)}-{digits(4)}", f"07{digits(3)} {digits(6)}", digits(5).replace("0", "4"),
              f"extension {d.whole(10, 999)}")  # fmt: skip
    return d.one(shapes)


def _domain(d: Draw) -> str:
    name = re.sub(
        r"[^a-z]",
        "",
        d.one((_coined(d), d.family(), d.of("town"), d.one(lexicon.BUILDING_NAMES))).lower(),
    )
    tail = d.one(
        (
            "",
            "",
            "",
            "-"
            + d.one(("online", "hall", "club", "arts", "group", "works", "care", "farm", "shop")),
        )
    )
    return f"{name}{tail}.{d.one(('com', 'org', 'co.uk', 'org.uk', 'net', 'eu', 'example', 'info', 'de'))}"


@kind("email")
def _email(d: Draw) -> Value:
    office = d.one(
        (
            "info",
            "hello",
            "bookings",
            "office",
            "help",
            "enquiries",
            "contact",
            "team",
            "orders",
            "jobs",
            "press",
            "events",
            "accounts",
            "membership",
            "support",
            "quotes",
        )
    )
    first, last = (
        re.sub(r"[^a-z]", "", name.lower()) or "kit" for name in (d.of("first"), d.family())
    )
    return f"{d.one((office, office, f'{first}.{last}', first, f'{first[0]}.{last}', f'{first}_{last}'))}@{_domain(d)}"


@kind("url")
def _url(d: Draw) -> Value:
    path = d.one(
        (
            "",
            "",
            "/"
            + d.one(
                (
                    "tickets",
                    "book",
                    "help",
                    "join",
                    "map",
                    "jobs",
                    "news",
                    "apply",
                    "menu",
                    "returns",
                    "faq",
                )
            ),
            f"/{d.whole(100, 9999)}",
        )
    )
    return d.one(("www.", "https://", "", "www.")) + _domain(d) + path


@kind("file")
def _file(d: Draw) -> Value:
    words = lexicon.FILE_WORDS.split()
    stem = d.one(
        (
            f"{d.one(words)}_{d.whole(2001, 2029)}",
            f"{d.one(words)}-{d.one(words)}",
            f"{d.one(words)}_v{d.whole(2, 9)}",
            f"{d.one(words)}{d.whole(2, 99)}",
        )
    )
    return f"{stem}.{d.one(lexicon.FILE_ENDS.split())}"
