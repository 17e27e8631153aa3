"""Remembering what the user said: facts stated in one turn, asked for in a later one."""

from dataclasses import dataclass

from models.recipe.bank.wording import varied
from models.recipe.conversation import Conversation, Message, assistant, system, user
from models.recipe.skills import short
from models.recipe.world import World, articled, capital

NOTED = "Noted."
UNKNOWN = "You have not told me."
ROTE = {NOTED, UNKNOWN}
UNSAID = 0.6  # of the longer conversations, those that ask for what nobody said
SAME = [  # what names one thing
    {"company", "employer"}, {"ship", "boat"}, {"home", "home town", "village", "street"},
    {"club", "team"},
]  # fmt: skip
BESIDE = 0.5  # of what is asked for and nobody said, what is of a kind that somebody did say

NAMED = {  # what the user may have that has a name, and the kind of that
    "dog": "pet", "cat": "pet", "horse": "pet", "parrot": "pet", "hamster": "pet",
    "sister": "first", "brother": "first", "daughter": "first", "son": "first", "aunt": "first",
    "cousin": "first", "best friend": "first", "flatmate": "first", "teacher": "person",
    "doctor": "person", "neighbour": "person", "boss": "person", "landlord": "person",
    "dentist": "person", "colleague": "person", "boat": "ship", "company": "company",
    "team": "team", "school": "organisation", "project": "product", "village": "town",
}  # fmt: skip
VALUED = {  # what the user may have, and the kind of its value
    "locker code": "code", "order number": "code", "room number": "number", "ticket number": "code",
    "password": "code", "seat number": "code", "badge number": "number", "phone number": "phone",
    "email address": "email", "birthday": "day", "budget": "money", "favourite colour": "colour",
    "favourite food": "food", "favourite drink": "drink", "favourite sport": "sport",
    "favourite animal": "animal", "favourite book": "book", "hobby": "hobby", "flight": "code",
    "appointment": "time", "day off": "weekday", "home town": "town", "street": "street",
    "mother tongue": "language", "instrument": "instrument", "year of birth": "year",
    "height": "height", "car": "vehicle", "favourite flower": "plant", "website": "url",
    "ship": "ship", "club": "organisation", "employer": "company", "rent": "money",
}  # fmt: skip
STATE = [
    "my {k} is {v}.", "please note: my {k} is {v}.", "as you know, my {k} is {v}.",
    "{v} is my {k}.",
    "remember that my {k} is {v}.", "my {k}: {v}.", "for later: my {k} is {v}.",
]  # fmt: skip
STATE_NAMED = [
    *STATE[:6],
    "my {k} is called {v}.",
    "I have a {k} called {v}.",
    "I call my {k} {v}.",
]
ASK = [
    "what is my {k}?", "do you remember my {k}?", "tell me my {k}.", "what's my {k}?", "my {k}?",
    "what did I say my {k} is?", "which {k} do I have?", "what was my {k} again?",
    "remind me of my {k}",
]  # fmt: skip
ASK_NAMED = [
    "what is my {k} called?", "what is the name of my {k}?", "do you remember my {k}'s name?",
    "what's my {k}'s name?", "how is my {k} called?", "what do I call my {k}?", "who is my {k}?",
]  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A fact about the user: ways to state it and to ask for it, and the answer."""

    key: str
    statements: list[str]
    questions: list[str]
    answer: str


def _item(world: World) -> Item:
    names, rng = world.names, world.rng
    roll = rng.random()
    if roll < 0.15:
        v = names.person()
        return Item("name", [f"my name is {v}.", f"hello, my name is {v}.", f"I am {v}.",
                             f"I'm {v}.", f"call me {v}.", f"hi, {v} here."],
                    ["what is my name?", "who am I?", "do you remember my name?", "what's my name?",
                     "what am I called?", "do you know who I am?", "my name?"],
                    f"Your name is {v}.")  # fmt: skip
    if roll < 0.25:
        v = names.place()
        return Item("home", [f"I live in {v}.", f"these days I live in {v}.", f"I'm from {v}.",
                             f"we moved to {v} last year.", f"my home is in {v}."],
                    ["where do I live?", "where is my home?", "in which town do I live?",
                     "what town am I in?", "where am I based?"],
                    f"You live in {v}.")  # fmt: skip
    if roll < 0.33:
        v = names.of("job")
        said = [
            "I work as a {v}.",
            "these days I work as a {v}.",
            "I am a {v}.",
            "I'm a {v} by trade.",
        ]
        return Item("job", [articled(one.format(v=v)) for one in said],
                    ["what is my job?", "what do I do for work?", "what do I work as?",
                     "what's my profession?", "how do I earn my living?"],
                    articled(f"You work as a {v}."))  # fmt: skip
    return _of(world, rng.choice(list(NAMED if roll < 0.6 else VALUED)))


def _of(world: World, k: str) -> Item:
    """Something that the user may have."""
    if k in NAMED:
        v, states, asks = world.names.of(NAMED[k]), STATE_NAMED, ASK_NAMED
    else:
        v, states, asks = world.names.of(VALUED[k]), STATE, ASK
    return Item(
        k,
        [articled(one.format(k=k, v="{v}")).format(v=v) for one in states],
        [one.format(k=k) for one in asks],
        f"Your {k} is {v}" + ("" if v.endswith(".") else "."),
    )


def recall(world: World, facts: int, questions: int, between: int = 0) -> Conversation:
    """The user states `facts` facts over some turns, does `between` other things, then asks."""
    rng = world.rng
    items, messages = _statements(world, facts)
    messages += short.task_of(world, between).messages
    asked = rng.sample(list(items.values()), min(questions, len(items)))
    turns = [[_asked(world, item), assistant(item.answer)] for item in asked]
    if questions > 2 and rng.random() < UNSAID:
        turns.insert(rng.randint(0, len(turns)), _unknown(world, items))
    messages += [one for turn in turns for one in turn]
    return Conversation("recall", messages, rote=ROTE)


def not_stated(world: World, facts: int) -> Conversation:
    """The user states `facts` facts, then asks for another."""
    items, messages = _statements(world, facts)
    return Conversation("recall", messages + _unknown(world, items), rote=ROTE)


def _asked(world: World, item: Item) -> Message:
    return user(varied(world.rng, capital(world.rng.choice(item.questions))))


def _statements(world: World, facts: int) -> tuple[dict[str, Item], list[Message]]:
    """Facts by their keys, and the turns in which the user states them."""
    rng = world.rng
    items: dict[str, Item] = {}
    while len(items) < facts:
        item = _item(world)
        items.setdefault(item.key, item)
    pending = list(items.values())
    messages: list[Message] = [system("You are a helpful assistant.")] if rng.random() < 0.3 else []
    while pending:
        part = [pending.pop() for _ in range(min(len(pending), rng.randint(1, 3)))]
        said = " ".join(capital(rng.choice(item.statements)) for item in part)
        messages += [user(said), assistant(NOTED)]
    return items, messages


def _unknown(world: World, items: dict[str, Item]) -> list[Message]:
    """A question for something that none of the items tells: of the cat, where they tell of a
    dog, at times.
    """
    kinds = NAMED | VALUED
    told = {*items, *(key for same in SAME if same & items.keys() for key in same)}
    said = {kinds[key] for key in items if key in kinds}
    beside = [key for key, kind in kinds.items() if kind in said and key not in told]
    if beside and world.rng.random() < BESIDE:
        other = _of(world, world.rng.choice(beside))
    else:
        while (other := _item(world)).key in told:
            pass
    return [_asked(world, other), assistant(UNKNOWN)]
