"""Remembering what the user said: facts stated in one turn, asked for in a later one."""

from models.recipe import words
from models.recipe.conversation import Conversation, Message, assistant, system, user
from models.recipe.skills import short
from models.recipe.world import World, articled, capital

NOTED = "Noted."
UNKNOWN = "You have not told me."

NAMED = ["dog", "cat", "horse", "boat", "sister", "brother", "teacher", "doctor", "neighbour",
         "street", "school", "town", "company", "best friend", "project", "team", "daughter", "son",
         "bicycle", "favourite island", "village", "parrot"]  # fmt: skip
CODED = [
    "locker code",
    "phone number",
    "order number",
    "room number",
    "ticket number",
    "password",
    "seat number",
    "badge number",
]

STATE = ["my {k} is {v}.", "please note: my {k} is {v}.", "as you know, my {k} is {v}."]
ASK = [
    "what is my {k} called?",
    "what is the name of my {k}?",
    "what is my {k}?",
    "do you remember my {k}?",
    "tell me my {k}.",
]
ASK_CODE = [
    "what is my {k}?",
    "do you remember my {k}?",
    "tell me my {k}.",
    "which {k} do I have?",
    "please repeat my {k}.",
]

Item = tuple[str, list[str], list[str], str]  # key, statements, questions, answer


def _item(world: World) -> Item:
    """A fact about the user, its forms filled in."""
    names, rng = world.names, world.rng
    roll = rng.random()
    if roll < 0.2:
        v = names.person()
        return ("name", [f"my name is {v}.", f"hello, my name is {v}."],
                ["what is my name?", "who am I?", "do you remember my name?", "what am I called?"],
                 f"Your name is {v}.")  # fmt: skip
    if roll < 0.3:
        v = names.place()
        return ("home", [f"I live in {v}.", f"these days I live in {v}."],
                ["where do I live?", "where is my home?", "in which place do I live?"],
                 f"You live in {v}.")  # fmt: skip
    if roll < 0.38:
        v = rng.choice(words.JOBS)
        return ("job", [articled(f"{said} a {v}.")
                for said in ("I work as", "these days I work as")],
                ["what is my job?", "what do I do for work?", "what do I work as?"],
                 articled(f"You work as a {v}."))  # fmt: skip
    if roll < 0.48:
        k, v = "favourite colour", rng.choice(words.COLOURS)
        return (
            k,
            [f"my {k} is {v}.", f"as you know, my {k} is {v}."],
            [f"what is my {k}?", f"which is my {k}?"],
            f"Your {k} is {v}.",
        )
    if roll < 0.58:
        k, v = "favourite food", names.phrase(words.QUALITIES, words.FOODS)
        return (k, [f"my {k} is {v}.", f"as you know, my {k} is {v}."],
                [f"what is my {k}?", "what food do I like best?"],
                 f"Your {k} is {v}.")  # fmt: skip
    if roll < 0.75:
        k, v = rng.choice(CODED), names.code()
        asks = ASK_CODE
    else:
        k, v = rng.choice(NAMED), names.word()
        asks = ASK
    return (
        k,
        [s.format(k=k, v=v) for s in STATE],
        [a.format(k=k) for a in asks],
        f"Your {k} is {v}.",
    )


def recall(world: World, facts: int, questions: int, between: int = 0) -> Conversation:
    """The user states `facts` facts over some turns, does `between` other things, then asks."""
    rng = world.rng
    items, messages = _statements(world, facts)
    for _ in range(between):
        messages += short.task(world).messages
    asked = rng.sample(list(items.values()), min(questions, len(items)))
    if questions > 2 and rng.random() < 0.3:
        messages += _unknown(world, items)
    for item in asked:
        messages += [user(capital(rng.choice(item[2]))), assistant(item[3])]
    return Conversation("recall", messages)


def not_stated(world: World, facts: int) -> Conversation:
    """The user states `facts` facts, then asks for another."""
    items, messages = _statements(world, facts)
    return Conversation("recall", messages + _unknown(world, items))


def _statements(world: World, facts: int) -> tuple[dict[str, Item], list[Message]]:
    """Facts by their keys, and the turns in which the user states them."""
    rng = world.rng
    items: dict[str, Item] = {}
    while len(items) < facts:
        item = _item(world)
        items.setdefault(item[0], item)
    pending = list(items.values())
    messages: list[Message] = [system("You are a helpful assistant.")] if rng.random() < 0.4 else []
    while pending:
        part = [pending.pop() for _ in range(min(len(pending), rng.randint(1, 3)))]
        messages += [
            user(" ".join(capital(rng.choice(item[1])) for item in part)),
            assistant(NOTED),
        ]
    return items, messages


def _unknown(world: World, items: dict[str, Item]) -> list[Message]:
    """A question for something that none of the items tells."""
    while (other := _item(world))[0] in items:
        pass
    return [user(capital(world.rng.choice(other[2]))), assistant(UNKNOWN)]
