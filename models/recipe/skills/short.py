"""Short tasks that need no knowledge: repeat, change case, count, list, spell."""

import string
from collections.abc import Callable

from models.recipe import words
from models.recipe.conversation import Conversation, assistant, user
from models.recipe.world import World

KINDS = {  # and how often each is asked for
    "repeat": 6,
    "upper": 3,
    "lower": 1,
    "count": 2,
    "list": 2,
    "reverse": 1,
    "first": 2,
    "spell": 2,
}
LISTS = {
    "days": words.DAYS,
    "months": words.MONTHS,
    "seasons": words.SEASONS,
    "colours": words.COLOURS,
    "fruits": ["apple", "pear", "plum", "cherry", "peach", "fig", "grape", "melon"],
    "animals": ["cat", "dog", "horse", "goat", "owl", "raven", "mule", "goose"],
}


SAYINGS = (
    "Good evening, {name}.", "hello", "The {thing} is late.", "the {thing} and the {other}",
    "We meet at {place} tomorrow.", "Is {name} at home?", "I like my {thing} {quality}.",
    "{name} has a {quality} {thing}!", "Please close the {thing}, {name}.", "see you in {place}",
)  # fmt: skip


def _typed(world: World, ask: str) -> str:
    """As somebody may type it: without its full stop, or its capital."""
    rng = world.rng
    if rng.random() < 0.3:
        ask = ask.removesuffix(".")
    return ask[0].lower() + ask[1:] if rng.random() < 0.2 else ask


def _phrase(world: World) -> str:
    """A few made-up and known words in a random order, or what somebody may say."""
    rng, names = world.rng, world.names
    if rng.random() < 0.3:
        thing, other = rng.sample(words.THINGS, 2)
        quality, name = rng.choice(words.QUALITIES), names.person().split()[0]
        return rng.choice(SAYINGS).format(
            name=name, thing=thing, other=other, place=names.place(), quality=quality
        )
    pool: list[Callable[[], str]] = [
        lambda: rng.choice(words.THINGS),
        lambda: rng.choice(words.QUALITIES),
        names.word,
        names.lower_word,
        lambda: names.number(1, 99999),
        names.code,
        lambda: rng.choice(words.COLOURS),
    ]
    return " ".join(rng.choice(pool)() for _ in range(rng.randint(1, 9)))


def task(world: World) -> Conversation:
    """One short task and its answer."""
    rng, names = world.rng, world.names
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "repeat":
        phrase = _phrase(world)
        ask = rng.choice(
            ("Repeat: {}", "Say {}", "Repeat after me: {}", "Repeat this: {}", "Write {} again.")
        )
        return Conversation("short", [user(_typed(world, ask).format(phrase)), assistant(phrase)])
    if kind == "upper":
        word = names.lower_word() if rng.random() < 0.7 else rng.choice(words.THINGS)
        ask = rng.choice(
            (
                "Write {} in capital letters.",
                "Uppercase the word {}.",
                "Uppercase: {}",
                "Put {} in upper case.",
                "Write in capitals: {}",
            )
        )
        return Conversation(
            "short", [user(_typed(world, ask).format(word)), assistant(word.upper())]
        )
    if kind == "lower":
        word = names.lower_word()
        ask = rng.choice(
            (
                "Write {} in small letters.",
                "Lowercase the word {}.",
                "Lowercase: {}",
                "Make this lower case: {}",
            )
        )
        return Conversation(
            "short", [user(_typed(world, ask).format(word.upper())), assistant(word)]
        )
    if kind == "spell":
        word = names.lower_word()
        ask = rng.choice(("Spell {}.", "Spell the word {}.", "How do you spell {}?"))
        return Conversation(
            "short", [user(_typed(world, ask).format(word)), assistant(" ".join(word.upper()))]
        )
    if kind == "count":
        n, first = rng.randint(2, 30), 1
        ask = rng.choice(
            ("Count to {}.", "Count from 1 to {}.", "Please count to {}.", "Count from {a} to {}.")
        )
        if "{a}" in ask:
            first = rng.randint(1, n - 1)
        counted = ", ".join(map(str, range(first, n + 1)))
        said = _typed(world, ask).format(n, a=first)
        return Conversation("short", [user(said), assistant(counted)])
    if kind == "list":
        name = rng.choice(list(LISTS))
        items = LISTS[name]
        n = rng.randint(2, min(7, len(items)))
        ask = rng.choice(("List {} {}.", "Name {} {}.", "Give me {} {}."))
        said, listed = _typed(world, ask).format(n, name), "\n".join(f"- {i}" for i in items[:n])
        return Conversation("short", [user(said), assistant(listed)])
    if kind == "reverse":
        items = [rng.choice(words.THINGS) for _ in range(rng.randint(2, 4))]
        return Conversation(
            "short",
            [user("Reverse the order: " + ", ".join(items)), assistant(", ".join(items[::-1]))],
        )
    items = [names.word() for _ in range(rng.randint(2, 6))]
    which, index = rng.choice((("first", 0), ("last", -1), ("second", 1)))
    ask = rng.choice(("What is the {} word of: {}", "Give the {} of these: {}"))
    return Conversation(
        "short", [user(ask.format(which, ", ".join(items))), assistant(items[index])]
    )


def task_of(world: World, count: int) -> Conversation:
    """Some tasks, one after the other."""
    made = [task(world) for _ in range(count)]
    return Conversation("short", [message for one in made for message in one.messages])


def copying(world: World) -> Conversation:
    """Practice in copying: a list of random pieces, then looked up or repeated over and over."""
    rng, names = world.rng, world.names
    if rng.random() < 0.5:
        phrase = _phrase(world) + " " + _phrase(world)
        return Conversation(
            "copying",
            [user("Repeat: " + phrase), assistant(phrase), user("Again."), assistant(phrase)],
        )
    makers: list[Callable[[], str]] = [
        names.word,
        names.place,
        names.person,
        names.code,
        lambda: names.number(1, 9999),
        lambda: "".join(rng.choices(string.ascii_lowercase, k=4)),
    ]
    left, right = rng.choice(makers), rng.choice(makers)
    table = {left(): right() for _ in range(rng.randint(2, 10))}
    messages = [
        user("Table:\n" + "\n".join(f"{k}: {v}" for k, v in table.items())),
        assistant("Noted."),
    ]
    for key in rng.sample(list(table), min(len(table), 6)):
        messages += [user(key), assistant(table[key])]
    return Conversation("copying", messages)
