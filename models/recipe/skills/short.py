"""Short tasks that need no knowledge: repeat, change case, count, list, spell."""

import string
from collections.abc import Callable

from models.recipe import words
from models.recipe.conversation import Conversation, assistant, user
from models.recipe.world import World

LISTS = {
    "days": words.DAYS,
    "months": words.MONTHS,
    "seasons": words.SEASONS,
    "colours": words.COLOURS,
    "fruits": ["apple", "pear", "plum", "cherry", "peach", "fig", "grape", "melon"],
    "animals": ["cat", "dog", "horse", "goat", "owl", "raven", "mule", "goose"],
}


SAYINGS = (
    "Good evening, {name}.", "hello", "The {thing} are late.", "the {thing} and the {other}",
    "We meet at {place} tomorrow.", "Is {name} at home?", "I like my {thing} {quality}.",
    "{name} has {quality} {thing}!", "Please bring the {thing}, {name}.", "see you in {place}",
)  # fmt: skip
ASKS = {
    "repeat": ("Repeat: {}", "Say {}", "Repeat after me: {}", "Repeat this: {}", "Write {} again."),
    "upper": ("Write {} in capital letters.", "Uppercase the word {}.", "Uppercase: {}",
              "Put {} in upper case.", "Write in capitals: {}"),
    "lower": ("Write {} in small letters.", "Lowercase the word {}.", "Lowercase: {}",
              "Make this lower case: {}"),
    "count": ("Count to {}.", "Count from 1 to {}.", "Please count to {}."),
    "count on": ("Count from {}.",),
    "list": ("List {}.", "Name {}.", "Give me {}."),
    "reverse": ("Reverse the order: {}", "Say these the other way round: {}"),
    "pick": ("What is the {}", "Give the {}"),
    "spell": ("Spell {}.", "Spell the word {}.", "How do you spell {}?"),
}  # fmt: skip
OFTEN = {
    "repeat": 6, "upper": 3, "lower": 1, "count": 3, "count on": 1, "list": 2, "reverse": 1,
    "pick": 2, "spell": 2,
}  # fmt: skip


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


def _given(world: World, kind: str) -> tuple[str, str]:
    """What a task of a kind is given, and its answer."""
    rng, names = world.rng, world.names
    if kind == "repeat":
        phrase = _phrase(world)
        return phrase, phrase
    if kind in ("upper", "lower", "spell"):
        word = names.lower_word() if rng.random() < 0.7 else rng.choice(words.THINGS)
        if kind == "lower":
            return word.upper(), word
        return word, word.upper() if kind == "upper" else " ".join(word.upper())
    if kind in ("count", "count on"):
        last = rng.randint(2, 30)
        first = rng.randint(1, last - 1) if kind == "count on" else 1
        given = f"{first} to {last}" if kind == "count on" else str(last)
        return given, ", ".join(map(str, range(first, last + 1)))
    if kind == "list":
        name = rng.choice(list(LISTS))
        n = rng.randint(2, min(7, len(LISTS[name])))
        return f"{n} {name}", "\n".join(f"- {one}" for one in LISTS[name][:n])
    if kind == "reverse":
        some = rng.sample(words.THINGS, rng.randint(2, 4))
        return ", ".join(some), ", ".join(some[::-1])
    some = [names.word() for _ in range(rng.randint(2, 6))]
    which, at = rng.choice((("first", 0), ("last", -1), ("second", 1)))
    listed = f"{rng.choice(('word of', 'of these'))}: {', '.join(some)}"
    return f"{which} {listed}", some[at]


def task(world: World) -> Conversation:
    """One short task as somebody may type it, at times without its full stop or its capital, and
    its answer.
    """
    rng = world.rng
    kind = rng.choices(list(OFTEN), list(OFTEN.values()))[0]
    ask = rng.choice(ASKS[kind])
    if rng.random() < 0.3:
        ask = ask.removesuffix(".")
    if rng.random() < 0.2:
        ask = ask[0].lower() + ask[1:]
    given, answer = _given(world, kind)
    return Conversation("short", [user(ask.format(given)), assistant(answer)])


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
