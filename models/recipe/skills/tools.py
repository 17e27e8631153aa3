"""Calling a tool that the request offers, and telling its result.

A tool is of a family: what it does, ways to name it and its arguments, ways to ask for it. A
question gives each argument; the call repeats them as JSON.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from models.recipe.bank.wording import varied
from models.recipe.conversation import Conversation, Message, assistant, system, user
from models.recipe.skills import short
from models.recipe.skills.toolbox import FAMILIES, Family
from models.recipe.world import World

NO_TOOL = "I have no tool for that."
RESULTS = {  # keys of what tools return, and the kinds of their values
    "temperature": "temperature", "sky": "colour", "price": "money", "time": "time",
    "place": "town", "day": "weekday", "name": "person", "code": "code", "wind": "speed",
    "size": "area", "length": "distance", "since": "year", "owner": "company",
}  # fmt: skip
VERBS = [
    "fetch", "query", "do", "make", "request", "ask", "show", "handle", "read", "run", "load",
    "retrieve", "create", "start", "perform", "check", "compute", "give", "lookup", "use",
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
        question = world.rng.choice(self.family.questions).format(*values)
        return varied(world.rng, question), dict(zip(self.arguments, values, strict=True))


def tool(world: World, family: Family, taken: set[str] | None = None) -> Tool:
    """One of a family, its name, argument names and texts drawn at random; the name is none of
    those taken.
    """
    rng = world.rng
    names: list[str] = []
    for argument in family.arguments:
        names.append(rng.choice([name for name in argument.names if name not in names]))
    names = [_another_key(rng, name) for name in names]
    while (name := _named(rng, family)) in (taken or ()):
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


def tools(world: World, families: list[Family]) -> list[Tool]:
    """One of each family, of different names."""
    made: list[Tool] = []
    for family in families:
        made.append(tool(world, family, {one.name for one in made}))
    return made


def _named(rng: random.Random, family: Family) -> str:
    """A name as programs have them: one that the family is known by, or made of a verb and what
    the family is about, so that a call repeats what is offered and not what is usual.
    """
    name, roll = rng.choice(family.names), rng.random()
    if roll < 0.4:
        return name
    about = name.removeprefix("get_").removeprefix("find_").split("_")[-1]
    if roll < 0.7:
        name = f"{rng.choice(VERBS)}_{about}"
    elif roll < 0.8:
        name = f"{about}_{rng.choice(ENDINGS)}"
    else:
        name = f"{name}_{rng.choice(ENDINGS)}"
    style = rng.random()
    if style < 0.2:
        first, *rest = name.split("_")
        return first + "".join(map(str.capitalize, rest))
    return name.replace("_", "-") if style < 0.3 else name


def _another_key(rng: random.Random, key: str) -> str:
    """The key of an argument, at times with more to it."""
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
    offered = tools(world, families)
    messages: list[Message] = [system("You are a helpful assistant.")] if rng.random() < 0.3 else []
    for _ in range(turns):
        roll = rng.random()
        if roll < share_declined:
            messages += _declined(world, families)
        elif roll < share_declined + share_other:
            messages += short.task(world).messages
        else:
            messages += _turn(world, rng.choice(offered), with_results)
    return Conversation("tools", messages, tools=[one.schema for one in offered])


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
    offered = [one.schema for one in tools(world, families)]
    return Conversation("tools", _declined(world, families), tools=offered)


def _declined(world: World, families: list[Family]) -> list[Message]:
    """A request for a tool of none of the families, and the reply."""
    free = world.rng.choice([family for family in FAMILIES if family not in families])
    return [user(tool(world, free).asked(world)[0]), assistant(NO_TOOL)]


def beside(world: World, made: Conversation) -> Conversation:
    """Tools are offered, but the passages answer: no call is made."""
    made.tools = [one.schema for one in tools(world, world.rng.sample(FAMILIES, 2))]
    return made
