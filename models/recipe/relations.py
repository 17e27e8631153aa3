"""The kinds of fact: how each is stated, asked and answered.

Placeholders: `{E}` the entity's name, `{v}` the value, `{it}` and `{its}` its pronouns, `{kind}`
`the lighthouse`; others are words that the relation draws for itself (a role, a verb, a unit).
"""

from collections.abc import Callable
from dataclasses import dataclass

from models.recipe import words
from models.recipe.names import Names


@dataclass(frozen=True)
class Relation:
    name: str
    make: Callable[[Names], dict[str, str]]
    full: list[str]  # statements that name the entity
    short: list[str]  # statements inside a passage about it
    ask: list[str]
    answer: str
    key: str
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
    return {"v": n.number(3, 900), "a": adjective, "u": n.pick(words.UNITS), "k": key}


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
    Relation(
        "role",
        lambda n: {"v": n.person(), "r": n.pick(words.ROLES)},
        ["the {r} of {E} is {v}.", "{v} is the {r} of {E}.", "the {r} of {E} is called {v}.",
         "{v} has been the {r} of {E} for many years.", "{v} works as the {r} of {E}.",
         "at {E}, the {r} is {v}.", "{E} has a {r} named {v}.", "the present {r} of {E} is {v}.",
         "{v} became the {r} of {E} last spring.", "{E} is run with care, and its {r} is {v}."],
        ["the {r} is {v}.", "{its} {r} is {v}.", "{v} is the {r}.", "the {r} there is {v}.",
         "{v} is {its} {r}.", "its {r}, {v}, knows every corner.", "the {r} of {kind} is {v}.",
         "{v} has been the {r} for years.", "{v} works there as the {r}.", "today the {r} is {v}.",
         "the {r}, {v}, lives nearby."],
        ["who is the {r} of {E}?", "what is the name of the {r} of {E}?",
         "who works as the {r} of {E}?", "can you tell me who the {r} of {E} is?",
         "name the {r} of {E}.", "what is the {r} of {E} called?", "who is the {r} at {E}?",
         "I would like to know who the {r} of {E} is."],
        "the {r} of {E} is {v}", "{r}", weight=3.0,
    ),
    Relation(
        "event", _event,
        ["{E} {p} in {v}.", "in {v}, {E} {p}.", "{E} {p} in the year {v}.",
         "it was in {v} that {E} {p}.", "{E} {p} in the spring of {v}.",
         "{E}, which {p} in {v}, is still well known."],
        ["it {p} in {v}.", "{kind} {p} in {v}.", "in {v} it {p}.", "it {p} in the year {v}.",
         "in {v}, {kind} {p}.", "after long talks it {p} in {v}."],
        ["when {q}?", "in what year {q}?", "what year {q}?", "in which year {q}?",
         "do you know when {E} {p}?", "tell me the year in which {E} {p}."],
        "{E} {p} in {v}", "{k}", weight=3.0, number=True,
    ),
    Relation(
        "maker", _maker,
        ["{E} was {p} by {v}.", "{v} is the person by whom {E} was {p}.",
         "it was {v} by whom {E} was {p}.", "records show that {E} was {p} by {v}."],
        ["it was {p} by {v}.", "{kind} was {p} by {v}.", "it was {p} long ago by {v}.",
         "it was first {p} by {v}."],
        ["who was {E} {p} by?", "by whom was {E} {p}?", "{E} was {p} by whom?",
         "tell me who {E} was {p} by."],
        "{E} was {p} by {v}", "{k}", weight=1.0,
    ),
    Relation(
        "maker_active", _maker,
        ["{v} {d} {E}.", "{E} was {p} by {v}.", "long ago, {v} {d} {E}.",
         "{v} was the one who {d} {E}."],
        ["{v} {d} it.", "it was {p} by {v}.", "{kind} was {p} by {v}.", "{v} {d} {kind}."],
        ["who {d} {E}?", "do you know who {d} {E}?", "what is the name of the person who {d} {E}?"],
        "{E} was {p} by {v}", "{k}", weight=1.5,
    ),
    Relation(
        "where",
        lambda n: {"v": n.place(), "w": n.pick(words.PREPOSITIONS)},
        ["{E} is {w} {v}.", "{E} stands {w} {v}.", "{E} lies {w} {v}.", "you find {E} {w} {v}.",
         "{E} is found {w} {v}.", "visitors find {E} {w} {v}.", "{E} is located {w} {v}."],
        ["it is {w} {v}.", "it stands {w} {v}.", "{kind} lies {w} {v}.", "{kind} is {w} {v}.",
         "it is located {w} {v}."],
        ["where is {E}?", "where does {E} stand?", "where can I find {E}?", "where does {E} lie?",
         "where is {E} located?"],
        "{E} is {w} {v}", "location", weight=1.5,
    ),
    Relation(
        "count",
        lambda n: {"v": n.number(2, 999), "n": n.pick(words.COUNTED)},
        ["{E} has {v} {n}.", "there are {v} {n} at {E}.", "{E} is home to {v} {n}.",
         "altogether {E} has {v} {n}.", "{E} counts {v} {n}."],
        ["it has {v} {n}.", "there are {v} {n}.", "{kind} has {v} {n}.",
         "it has about {v} {n} in all.", "visitors can see {v} {n}.",
         "with {v} {n} it is not small."],
        ["how many {n} does {E} have?", "how many {n} are there at {E}?",
         "what number of {n} does {E} have?", "how many {n} has {E}?",
         "tell me how many {n} {E} has."],
        "{E} has {v} {n}", "{n}", weight=2.0, number=True,
    ),
    Relation(
        "measure", _measure,
        ["{E} is {v} {u} {a}.", "at {v} {u} {a}, {E} is hard to miss.",
         "{E} measures {v} {u} and is that {a}."],
        ["it is {v} {u} {a}.", "{kind} is {v} {u} {a}.", "it is about {v} {u} {a}.",
         "{kind} is said to be {v} {u} {a}."],
        ["how {a} is {E}?", "do you know how {a} {E} is?", "tell me how {a} {E} is."],
        "{E} is {v} {u} {a}", "{k}", number=True,
    ),
    Relation(
        "price",
        lambda n: {"v": f"{n.number(2, 400)} {n.pick(words.CURRENCIES)}",
            "w": n.pick(words.WARES)},
        ["a {w} at {E} costs {v}.", "at {E}, a {w} costs {v}.", "the price of a {w} at {E} is {v}.",
         "{E} charges {v} for a {w}.", "for {v} you get a {w} at {E}."],
        ["a {w} costs {v}.", "the price of a {w} is {v}.", "{it} charges {v} for a {w}.",
         "you pay {v} for a {w}.", "a {w} there costs {v}."],
        ["how much does a {w} at {E} cost?", "what is the price of a {w} at {E}?",
         "what does a {w} cost at {E}?", "how much is a {w} at {E}?"],
        "a {w} at {E} costs {v}", "{w} price", weight=1.5,
    ),
    Relation(
        "hours", _hours,
        ["{E} {s} at {v}.", "{E} {s} each day at {v}.", "every morning or evening {E} {s} at {v}.",
         "at {v} {E} {s}."],
        ["it {s} at {v}.", "{kind} {s} at {v}.", "on most days it {s} at {v}.",
         "it {s} every day at {v}."],
        ["at what time does {E} {b}?", "what time does {E} {b}?", "when in the day does {E} {b}?",
         "at what hour does {E} {b}?"],
        "{E} {s} at {v}", "{s}",
    ),
    Relation(
        "produce", _produce,
        ["{E} {p} {v}.", "{E} mostly {p} {v}.", "it is well known that {E} {p} {v}.",
         "{E} {p} mainly {v}."],
        ["it {p} {v}.", "{kind} {p} {v}.", "it {p} mainly {v}.", "these days it {p} {v}."],
        ["what does {E} {b}?", "what sort of thing does {E} {b}?", "do you know what {E} {p}?",
         "tell me what {E} {p}."],
        "{E} {p} {v}", "{p}",
    ),
    Relation(
        "fame",
        lambda n: {"v": n.phrase(words.QUALITIES, words.THINGS)},
        ["{E} is known for {v}.", "{E} is famous for {v}.", "people know {E} for its {v}.",
         "{E} is best known for its {v}."],
        ["it is known for {v}.", "{kind} is famous for {v}.", "people come for the {v}.",
         "it is best known for {v}."],
        ["what is {E} known for?", "what is {E} famous for?", "for what is {E} known?",
         "why do people know {E}?"],
        "{E} is known for {v}", "known_for",
    ),
    Relation(
        "colour",
        lambda n: {"v": n.pick(words.COLOURS), "t": n.pick(words.PARTS)},
        ["the {t} of {E} is {v}.", "{E} has a {v} {t}.", "the {t} of {E} is painted {v}."],
        ["its {t} is {v}.", "it has a {v} {t}.", "the {t} is {v}.", "the {t} is painted {v}."],
        ["what colour is the {t} of {E}?", "which colour does the {t} of {E} have?",
         "what is the colour of the {t} of {E}?"],
        "the {t} of {E} is {v}", "{t} colour",
    ),
    Relation(
        "material",
        lambda n: {"v": n.pick(words.MATERIALS)},
        ["{E} is made of {v}.", "{E} is built of {v}.",
         "the walls of {E} are of {v}, as is the rest."],
        ["it is made of {v}.", "{kind} is made of {v}.", "it is built of {v}.",
         "all of it is made of {v}."],
        ["what is {E} made of?", "of what is {E} made?", "what is {E} built of?",
         "what material is {E} made of?"],
        "{E} is made of {v}", "material", weight=0.7,
    ),
    Relation(
        "called",
        lambda n: {"v": n.word(), "a": n.pick(words.ANIMALS)},
        ["the {a} of {E} is called {v}.", "{E} has a {a} called {v}.",
         "the {a} at {E} is named {v}.", "{v} is the {a} of {E}.",
         "a {a} named {v} belongs to {E}."],
        ["its {a} is called {v}.", "it has a {a} called {v}.", "the {a} is named {v}.",
         "there is a {a} named {v}.", "{v} is the name of the {a}."],
        ["what is the {a} of {E} called?", "what is the name of the {a} of {E}?",
         "how is the {a} at {E} called?", "what is the {a} at {E} called?", "name the {a} of {E}."],
        "the {a} of {E} is called {v}", "{a}", weight=1.5,
    ),
    Relation(
        "day", _day,
        ["the {e} at {E} is held on {v}.", "{E} holds its {e} on {v}.",
         "on {v} the {e} takes place at {E}.", "the {e} at {E} takes place on {v}."],
        ["the {e} is held on {v}.", "it holds its {e} on {v}.", "on {v} there is a {e}.",
         "the {e} takes place on {v}."],
        ["when is the {e} at {E}?", "on what day is the {e} at {E}?",
         "when is the {e} at {E} held?", "when does {E} hold its {e}?",
         "when does the {e} at {E} take place?"],
        "the {e} at {E} is held on {v}", "{e}", weight=1.5,
    ),
    Relation(
        "code",
        lambda n: {"v": n.code(), "c": n.pick(words.CODES)},
        ["the {c} of {E} is {v}.", "{E} has the {c} {v}.", "for {E} the {c} is {v}.",
         "{v} is the {c} of {E}."],
        ["its {c} is {v}.", "the {c} is {v}.", "it has the {c} {v}.", "{v} is the {c}."],
        ["what is the {c} of {E}?", "which {c} does {E} have?", "tell me the {c} of {E}.",
         "what is the {c} for {E}?"],
        "the {c} of {E} is {v}", "{c}",
    ),
    Relation(
        "attribute",
        lambda n: {"v": n.place(), "a": n.pick(words.ATTRIBUTES)},
        ["the {a} of {E} is {v}.", "{v} is the {a} of {E}.", "for {E}, the {a} is {v}.",
         "{E} has {v} as its {a}."],
        ["its {a} is {v}.", "the {a} is {v}.", "{v} is its {a}.", "the {a} of {kind} is {v}."],
        ["what is the {a} of {E}?", "which is the {a} of {E}?", "tell me the {a} of {E}.",
         "name the {a} of {E}."],
        "the {a} of {E} is {v}", "{a}", weight=1.5,
    ),
]  # fmt: skip

OF_PEOPLE = [
    Relation(
        "born", lambda n: {"v": n.year()},
        ["{E} was born in {v}.", "in {v} {E} was born.", "{E}, born in {v}, has many friends."],
        ["{it} was born in {v}.", "{it} was born in the year {v}."],
        ["when was {E} born?", "in what year was {E} born?", "in which year was {E} born?",
         "what year was {E} born?"],
        "{E} was born in {v}", "born", number=True,
    ),
    Relation(
        "home", lambda n: {"v": n.place()},
        ["{E} lives in {v}.", "{E} has a house in {v}.", "{E} has lived in {v} for years."],
        ["{it} lives in {v}.", "{its} home is in {v}.", "{it} has lived in {v} for years.",
         "today {it} lives in {v}."],
        ["where does {E} live?", "in what place does {E} live?", "where is the home of {E}?",
         "which town does {E} live in?"],
        "{E} lives in {v}", "home",
    ),
    Relation(
        "job", lambda n: {"v": n.pick(words.JOBS)},
        ["{E} works as a {v}.", "{E} is a {v}.", "{E} has long been a {v}."],
        ["{it} works as a {v}.", "{it} is a {v}.", "{it} earns a living as a {v}."],
        ["what does {E} do for work?", "what is the job of {E}?", "what does {E} work as?",
         "what work does {E} do?"],
        "{E} works as a {v}", "job",
    ),
    Relation(
        "hobby", lambda n: {"v": n.pick(words.HOBBIES)},
        ["{E} enjoys {v}.", "{E} is fond of {v}.", "in the evenings {E} enjoys {v}."],
        ["{it} enjoys {v}.", "{it} is fond of {v}.", "{its} hobby is {v}."],
        ["what does {E} enjoy?", "what is the hobby of {E}?", "what hobby does {E} have?"],
        "{E} enjoys {v}", "hobby",
    ),
    Relation(
        "instrument", lambda n: {"v": n.pick(words.INSTRUMENTS)},
        ["{E} plays the {v}.", "{E} learned to play the {v}."],
        ["{it} plays the {v}.", "{it} learned to play the {v}."],
        ["what instrument does {E} play?", "which instrument does {E} play?",
         "what does {E} play?"],
        "{E} plays the {v}", "instrument", weight=0.7,
    ),
    Relation(
        "pet", lambda n: {"v": n.word(), "a": n.pick(("cat", "dog", "horse", "parrot", "goat",
        "pony", "boat", "rabbit"))},
        ["{E} has a {a} called {v}.", "the {a} of {E} is called {v}.", "{E} owns a {a} named {v}."],
        ["{it} has a {a} called {v}.", "{its} {a} is called {v}.", "{it} owns a {a} named {v}."],
        ["what is the {a} of {E} called?", "what is the name of the {a} of {E}?",
         "how does {E} call the {a}?"],
        "the {a} of {E} is called {v}", "{a}", weight=1.5,
    ),
    Relation(
        "wrote", lambda n: {"v": f"The {n.pick(words.QUALITIES).capitalize()} {n.word()}"},
        ["{E} wrote {v}.", "{E} is the author of {v}.", "{v} was written by {E}."],
        ["{it} wrote {v}.", "{it} is the author of {v}.", "{its} best book is {v}."],
        ["what did {E} write?", "which book did {E} write?", "what book is {E} the author of?"],
        "{E} wrote {v}", "book", weight=0.7,
    ),
    Relation(
        "kin", lambda n: {"v": n.person(), "k": n.pick(("sister", "brother", "mother", "father",
        "teacher", "friend", "cousin", "uncle", "aunt", "daughter", "son"))},
        ["the {k} of {E} is {v}.", "{v} is the {k} of {E}.", "{E} has a {k} called {v}."],
        ["{its} {k} is {v}.", "{v} is {its} {k}.", "{it} has a {k} called {v}."],
        ["who is the {k} of {E}?", "what is the name of the {k} of {E}?",
         "what is the {k} of {E} called?"],
        "the {k} of {E} is {v}", "{k}", weight=2.0,
    ),
]  # fmt: skip
