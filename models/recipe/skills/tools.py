"""Calling a tool that the request offers, and telling its result.

A tool is of a family: what it does, ways to name it and its arguments, ways to ask for it. A
question gives each argument; the call repeats them as JSON.
"""

import json
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from models.recipe.bank.values import is_held_out
from models.recipe.bank.wording import varied
from models.recipe.conversation import Conversation, Message, assistant, system, user
from models.recipe.skills import short
from models.recipe.skills.toolbox import FAMILIES, SERVES, Argument, Family
from models.recipe.world import World

NO_TOOL = "I have no tool for that."
RESULTS = {  # keys of what tools return, and the kinds of their values
    "temperature": "temperature", "sky": "colour", "price": "money", "time": "time",
    "place": "town", "day": "weekday", "name": "person", "code": "code", "wind": "speed",
    "size": "area", "length": "distance", "since": "year", "owner": "company",
}  # fmt: skip
VERBS = [  # that tell nothing of what is done
    "do", "request", "ask", "handle", "run", "start", "perform", "use", "process", "invoke",
    "execute", "try", "trigger", "launch", "apply", "go", "ext", "my", "the", "new",
]  # fmt: skip
ENDINGS = [
    "v2", "now", "for_me", "api", "service", "local", "tool", "request", "action", "lookup",
    "info", "helper", "client", "task",
]  # fmt: skip
PLAIN = ["town", "time", "money", "person", "code", "number", "temperature", "date", "book", "url"]


@dataclass
class Tool:
    """A tool as offered."""

    family: Family
    name: str
    arguments: list[str]  # their names
    schema: dict[str, Any]

    def asked(self, world: World) -> tuple[str, dict[str, str | int]]:
        """A question for it, and the arguments that the question gives."""
        values = [one.value(world.names) for one in self.family.arguments]
        question = varied(world.rng, world.rng.choice(self.family.questions)).format(*values)
        return question, dict(zip(self.arguments, values, strict=True))


def tool(world: World, family: Family, taken: Collection[str] = ()) -> Tool:
    """One of a family, its name, argument names and texts drawn at random; the name is none of
    those taken.
    """
    rng = world.rng
    names: list[str] = []
    for argument in family.arguments:
        while (key := _key(rng, argument)) in names:
            pass
        names.append(key)
    while (name := _named(world, family)) in taken:
        pass
    pairs = zip(names, family.arguments, strict=True)
    properties: dict[str, Any] = {name: {"type": one.type} for name, one in pairs}
    if rng.random() < 0.12:  # an argument that the question does not give
        properties["unit" if rng.random() < 0.5 else "format"] = {"type": "string"}
    described = rng.random() < 0.9 or name not in family.names
    function = {
        "name": name,
        "description": rng.choice(family.descriptions) if described else "",
        "parameters": {"type": "object", "properties": properties, "required": list(names)},
    }
    return Tool(family, name, names, {"type": "function", "function": function})


def offered(world: World, families: list[Family]) -> list[Tool]:
    """One of each family, of different names."""
    made: list[Tool] = []
    for family in families:
        made.append(tool(world, family, {one.name for one in made}))
    return made


def _named(world: World, family: Family) -> str:
    """A name that the family is known by; or one as programs have them, made of that, so that a
    call repeats what is offered and not what is usual: in tests one that no training sees.
    """
    while True:
        usual = world.rng.choice(family.names)
        if not world.held_out and world.rng.random() < 0.4:
            return usual
        name = _made(world.rng, usual)
        if is_held_out(name) is world.held_out:
            return name


def _made(rng: random.Random, name: str) -> str:
    about = max(name.split("_"), key=len)
    roll, style = rng.random(), rng.random()
    if roll < 0.5:
        name = f"{rng.choice(VERBS)}_{about}"
    else:
        name = f"{about if roll < 0.7 else name}_{rng.choice(ENDINGS)}"
    if style < 0.2:
        first, *rest = name.split("_")
        return first + "".join(map(str.capitalize, rest))
    return name.replace("_", "-") if style < 0.3 else name


def _key(rng: random.Random, argument: Argument) -> str:
    """One of an argument's names, at times with more to it."""
    key = rng.choice(argument.names)
    if rng.random() < 0.7 or len(key) == 1:
        return key
    form = rng.choice(("{}_name", "{}_value", "the_{}", "user_{}", "{}_id", "{}Name", "new_{}"))
    return form.format(key)


def _call(world: World, name: str, arguments: dict[str, str | int]) -> Message:
    call = {
        "id": f"call_{world.rng.randrange(10**6)}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _result(world: World) -> tuple[str, str]:
    """What a tool returns, and the sentence that reports it."""
    rng, names = world.rng, world.names
    if rng.random() < 0.45:
        keys = rng.sample(list(RESULTS), rng.randint(1, 3))
        values = {key: names.of(RESULTS[key]) for key in keys}
        told = ", ".join(f"{key} {value}" for key, value in values.items())
        return json.dumps(values, ensure_ascii=False), _sentence(told)
    value = names.of(rng.choice(PLAIN))
    if rng.random() < 0.4:
        value = f"{names.of('colour')} in {names.place()}, {names.of('temperature')}"
    return value, _sentence(value)


def _sentence(told: str) -> str:
    return f"The result: {told}" + ("" if told.endswith(".") else ".")


def calls(
    world: World,
    turns: int,
    with_results: bool = True,
    *,
    share_declined: float = 0.0,
    share_other: float = 0.0,
) -> Conversation:
    """1-5 tools offered; each turn asks for one, or for one that is not there, or for no tool."""
    rng = world.rng
    families = rng.sample(FAMILIES, rng.randint(1, 5))
    tools = offered(world, families)
    messages: list[Message] = [system("You are a helpful assistant.")] if rng.random() < 0.3 else []
    for _ in range(turns):
        roll = rng.random()
        if roll < share_declined:
            messages += _declined(world, families)
        elif roll < share_declined + share_other:
            messages += short.task(world).messages
        else:
            messages += _turn(world, rng.choice(tools), with_results)
    return Conversation("tools", messages, tools=[one.schema for one in tools], rote={NO_TOOL})


def _turn(world: World, one: Tool, with_result: bool) -> list[Message]:
    """A question and the call, and what came of it."""
    question, arguments = one.asked(world)
    call = _call(world, one.name, arguments)
    if not with_result:
        return [user(question), call]
    returned, report = _result(world)
    identity = call["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": identity, "content": returned}
    return [user(question), call, result, assistant(report)]


def declined(world: World) -> Conversation:
    """1-5 tools offered, and a request that none of them serves."""
    families = world.rng.sample(FAMILIES, world.rng.randint(1, 5))
    schemas = [one.schema for one in offered(world, families)]
    return Conversation("tools", _declined(world, families), tools=schemas, rote={NO_TOOL})


def _declined(world: World, families: list[Family]) -> list[Message]:
    """A request for a tool of none of the families, and the reply."""
    serves = {name for one in families for name in (one.names[0], *SERVES.get(one.names[0], ()))}
    free = world.rng.choice([family for family in FAMILIES if family.names[0] not in serves])
    return [user(tool(world, free).asked(world)[0]), assistant(NO_TOOL)]


def beside(world: World, made: Conversation) -> Conversation:
    """Tools are offered, but the passages answer: no call is made."""
    made.tools = [one.schema for one in offered(world, world.rng.sample(FAMILIES, 2))]
    return made
