"""The kinds of fact: how each is stated, asked and answered.

Placeholders: `{E}` the entity's name, `{v}` the value, `{it}` and `{its}` its pronouns, `{kind}`
`the lighthouse`; others are words that the relation draws for itself (a role, a verb, a unit).

A statement tells its value last, right after the words that say what it is, and the answer has the
same words there: what is asked for is then found by going on from them, which a model of this size
learns well. It learns badly what must be pieced together from afar.
"""

from collections.abc import Callable
from dataclasses import dataclass

from models.recipe import words
from models.recipe.names import Names


@dataclass(frozen=True)
class Relation:
    make: Callable[[Names], dict[str, str]]
    full: list[str]  # statements that name the entity
    short: list[str]  # statements inside a passage about it
    ask: list[str]
    answer: str
    key: str
    unknown: str = "not told"  # in the value's place
    weight: float = 1.0
    number: bool = False  # whether the value is a number in JSON


def _event(n: Names) -> dict[str, str]:
    past, question, key = n.rng.choice(words.EVENTS)
    return {"v": n.year(), "p": past, "q": question, "k": key}


def _maker(n: Names) -> dict[str, str]:
    participle, past, key = n.rng.choice(words.MAKERS)
    return {"v": n.person(), "p": participle, "d": past, "k": key}


def _measure(n: Names) -> dict[str, str]:
    adjective, key = n.rng.choice(words.MEASURES)
    return {"v": f"{n.number(3, 900)} {n.pick(words.UNITS)}", "a": adjective, "k": key}


def _hours(n: Names) -> dict[str, str]:
    verb = n.pick(("open", "close"))
    return {"v": n.clock(), "s": verb + "s", "b": verb}


def _produce(n: Names) -> dict[str, str]:
    verb, base = n.rng.choice(words.PRODUCE)
    return {"v": n.phrase(words.QUALITIES, words.THINGS), "p": verb, "b": base}


def _day(n: Names) -> dict[str, str]:
    day, roll = n.pick(words.DAYS), n.rng.random()
    if roll < 0.3:
        when = f"the {n.pick(('first', 'second', 'third', 'last'))} {day} of {n.pick(words.MONTHS)}"
    elif roll < 0.6:
        when = f"{n.rng.randint(1, 28)} {n.pick(words.MONTHS)}"
    else:
        when = f"{day}s" if roll < 0.85 else f"{day} mornings"
    return {"v": when, "e": n.pick(words.GATHERINGS)}


OF_THINGS = [
    Relation(  # role
        lambda n: {"v": n.person(), "r": n.pick(words.ROLES)},
        ["at {E}, the {r} is {v}."],
        ["the {r} is {v}.", "{its} {r} is {v}.", "today the {r} is {v}."],
        ["who is the {r} of {E}?", "what is the name of the {r} of {E}?",
         "who works as the {r} of {E}?", "who is the {r} at {E}?", "name the {r} of {E}.",
         "can you tell me who the {r} of {E} is?"],
        "at {E}, the {r} is {v}", "{r}", weight=3.0,
    ),
    Relation(  # event
        _event,
        ["{E} {p} in {v}."],
        ["it {p} in {v}.", "{kind} {p} in {v}."],
        ["when {q}?", "in what year {q}?", "what year {q}?", "do you know when {E} {p}?"],
        "{E} {p} in {v}", "{k}", "a year not told", weight=3.0, number=True,
    ),
    Relation(  # maker
        _maker,
        ["{E} was {p} by {v}."],
        ["it was {p} by {v}.", "{kind} was {p} by {v}.", "long ago it was {p} by {v}."],
        ["who {d} {E}?", "who was {E} {p} by?", "by whom was {E} {p}?",
         "do you know who {d} {E}?"],
        "{E} was {p} by {v}", "{k}", "somebody not told", weight=2.0,
    ),
    Relation(  # where
        lambda n: {"v": f"{n.pick(words.PREPOSITIONS)} {n.place()}"},
        ["{E} is located {v}."],
        ["it is located {v}.", "{kind} is located {v}."],
        ["where is {E}?", "where does {E} stand?", "where can I find {E}?", "where does {E} lie?",
         "where is {E} located?"],
        "{E} is located {v}", "location", "in a place not told", weight=1.5,
    ),
    Relation(  # count
        lambda n: {"v": n.number(2, 999), "n": n.pick(words.COUNTED)},
        ["at {E}, the number of {n} is {v}."],
        ["the number of {n} is {v}.", "{its} number of {n} is {v}."],
        ["how many {n} does {E} have?", "how many {n} are there at {E}?",
         "how many {n} has {E}?", "tell me how many {n} {E} has."],
        "at {E}, the number of {n} is {v}", "{n}", weight=2.0, number=True,
    ),
    Relation(  # measure
        _measure,
        ["at {E}, the {k} is {v}."],
        ["the {k} is {v}.", "{its} {k} is {v}."],
        ["how {a} is {E}?", "do you know how {a} {E} is?", "what is the {k} of {E}?"],
        "at {E}, the {k} is {v}", "{k}",
    ),
    Relation(  # price
        lambda n: {"v": f"{n.number(2, 400)} {n.pick(words.CURRENCIES)}", "w": n.pick(words.WARES)},
        ["at {E}, a {w} costs {v}."],
        ["a {w} costs {v}.", "these days a {w} costs {v}."],
        ["how much does a {w} at {E} cost?", "what is the price of a {w} at {E}?",
         "what does a {w} cost at {E}?", "how much is a {w} at {E}?"],
        "at {E}, a {w} costs {v}", "{w} price", "an amount not told", weight=1.5,
    ),
    Relation(  # hours
        _hours,
        ["{E} {s} at {v}."],
        ["it {s} at {v}.", "{kind} {s} at {v}.", "on most days it {s} at {v}."],
        ["at what time does {E} {b}?", "what time does {E} {b}?", "at what hour does {E} {b}?"],
        "{E} {s} at {v}", "{s}", "a time not told",
    ),
    Relation(  # produce
        _produce,
        ["{E} {p} {v}."],
        ["it {p} {v}.", "{kind} {p} {v}.", "these days it {p} {v}."],
        ["what does {E} {b}?", "what sort of thing does {E} {b}?", "do you know what {E} {p}?",
         "tell me what {E} {p}."],
        "{E} {p} {v}", "{p}", "something not told",
    ),
    Relation(  # fame
        lambda n: {"v": n.phrase(words.QUALITIES, words.THINGS)},
        ["{E} is known for {v}."],
        ["it is known for {v}.", "{kind} is known for {v}."],
        ["what is {E} known for?", "what is {E} famous for?", "for what is {E} known?"],
        "{E} is known for {v}", "known_for", "something not told",
    ),
    Relation(  # colour
        lambda n: {"v": n.pick(words.COLOURS), "t": n.pick(words.PARTS)},
        ["at {E}, the {t} is {v}."],
        ["its {t} is {v}.", "the {t} is {v}."],
        ["what colour is the {t} of {E}?", "which colour does the {t} of {E} have?",
         "what is the colour of the {t} of {E}?"],
        "at {E}, the {t} is {v}", "{t} colour",
    ),
    Relation(  # material
        lambda n: {"v": n.pick(words.MATERIALS)},
        ["{E} is made of {v}."],
        ["it is made of {v}.", "{kind} is made of {v}."],
        ["what is {E} made of?", "of what is {E} made?", "what is {E} built of?"],
        "{E} is made of {v}", "material", "something not told", weight=0.7,
    ),
    Relation(  # called
        lambda n: {"v": n.word(), "a": n.pick(words.ANIMALS)},
        ["at {E}, the {a} is called {v}."],
        ["its {a} is called {v}.", "the {a} is called {v}."],
        ["what is the {a} of {E} called?", "what is the name of the {a} of {E}?",
         "what is the {a} at {E} called?", "name the {a} of {E}."],
        "at {E}, the {a} is called {v}", "{a}", "something not told", weight=1.5,
    ),
    Relation(  # day
        _day,
        ["at {E}, the {e} is held on {v}."],
        ["the {e} is held on {v}.", "its {e} is held on {v}."],
        ["when is the {e} at {E}?", "on what day is the {e} at {E}?",
         "when is the {e} at {E} held?", "when does the {e} at {E} take place?"],
        "at {E}, the {e} is held on {v}", "{e}", "a day not told", weight=1.5,
    ),
    Relation(  # code
        lambda n: {"v": n.code(), "c": n.pick(words.CODES)},
        ["at {E}, the {c} is {v}."],
        ["its {c} is {v}.", "the {c} is {v}."],
        ["what is the {c} of {E}?", "which {c} does {E} have?", "tell me the {c} of {E}.",
         "what is the {c} for {E}?"],
        "at {E}, the {c} is {v}", "{c}",
    ),
    Relation(  # attribute
        lambda n: {"v": n.place(), "a": n.pick(words.ATTRIBUTES)},
        ["at {E}, the {a} is {v}."],
        ["its {a} is {v}.", "the {a} is {v}."],
        ["what is the {a} of {E}?", "which is the {a} of {E}?", "tell me the {a} of {E}.",
         "name the {a} of {E}."],
        "at {E}, the {a} is {v}", "{a}", weight=1.5,
    ),
]  # fmt: skip

OF_PEOPLE = [
    Relation(  # born
        lambda n: {"v": n.year()},
        ["{E} was born in {v}."],
        ["{it} was born in {v}."],
        ["when was {E} born?", "in what year was {E} born?", "what year was {E} born?"],
        "{E} was born in {v}", "born", "a year not told", number=True,
    ),
    Relation(  # home
        lambda n: {"v": n.place()},
        ["{E} lives in {v}."],
        ["{it} lives in {v}.", "today {it} lives in {v}."],
        ["where does {E} live?", "in what place does {E} live?", "which town does {E} live in?"],
        "{E} lives in {v}", "home", "a place not told",
    ),
    Relation(  # job
        lambda n: {"v": f"a {n.pick(words.JOBS)}"},
        ["{E} works as {v}."],
        ["{it} works as {v}.", "today {it} works as {v}."],
        ["what does {E} do for work?", "what is the job of {E}?", "what does {E} work as?"],
        "{E} works as {v}", "job", "something not told",
    ),
    Relation(  # hobby
        lambda n: {"v": n.pick(words.HOBBIES)},
        ["{E} enjoys {v}."],
        ["{it} enjoys {v}.", "in the evenings {it} enjoys {v}."],
        ["what does {E} enjoy?", "what is {E} fond of?", "what hobby does {E} have?"],
        "{E} enjoys {v}", "hobby", "something not told",
    ),
    Relation(  # instrument
        lambda n: {"v": f"the {n.pick(words.INSTRUMENTS)}"},
        ["{E} plays {v}."],
        ["{it} plays {v}.", "in the evenings {it} plays {v}."],
        ["what instrument does {E} play?", "which instrument does {E} play?",
         "what does {E} play?"],
        "{E} plays {v}", "instrument", "something not told", weight=0.7,
    ),
    Relation(  # pet
        lambda n: {"v": n.word(), "a": n.pick(words.PETS)},
        ["{E} has a {a} called {v}."],
        ["{it} has a {a} called {v}."],
        ["what is the {a} of {E} called?", "what is the name of the {a} of {E}?"],
        "{E} has a {a} called {v}", "{a}", "something not told", weight=1.5,
    ),
    Relation(  # wrote
        lambda n: {"v": f"The {n.pick(words.QUALITIES).capitalize()} {n.word()}"},
        ["{E} wrote {v}."],
        ["{it} wrote {v}.", "long ago {it} wrote {v}."],
        ["what did {E} write?", "which book did {E} write?", "what book is {E} the author of?"],
        "{E} wrote {v}", "book", "something not told", weight=0.7,
    ),
    Relation(  # kin
        lambda n: {"v": n.person(), "k": n.pick(words.KIN)},
        ["{E} has a {k} named {v}."],
        ["{it} has a {k} named {v}."],
        ["who is the {k} of {E}?", "what is the name of the {k} of {E}?",
         "what is the {k} of {E} called?"],
        "{E} has a {k} named {v}", "{k}", "somebody not told", weight=2.0,
    ),
]  # fmt: skip
