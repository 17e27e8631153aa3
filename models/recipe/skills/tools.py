"""Calling a tool that the request offers, and telling its result.

A tool is put together from a family: what it does, ways to name it and its arguments, ways to ask
for it. A question gives each argument; the call repeats them as JSON.
"""

import json
from dataclasses import dataclass
from typing import Any

from models.recipe import words
from models.recipe.conversation import Conversation, Message, assistant, system, user
from models.recipe.skills import short
from models.recipe.skills.toolbox import FAMILIES
from models.recipe.world import World, capital

NO_TOOL = "I have no tool for that."


@dataclass
class Offer:
    """A tool as offered, with a question for it and the arguments that the question gives."""

    schema: dict[str, Any]
    question: str
    arguments: dict[str, str | int]


def offer(world: World, family: int) -> Offer:
    """One tool of a family, its name, argument names and texts drawn at random."""
    rng = world.rng
    labels, texts, parts, questions = FAMILIES[family]
    names: list[str] = []
    for part in parts:
        names.append(rng.choice([n for n in part.names if n not in names]))
    name = (
        rng.choice(labels)
        if rng.random() < 0.9
        else f"{rng.choice(labels)}_{world.names.lower_word()}"
    )
    properties: dict[str, Any] = {n: {"type": p.kind} for n, p in zip(names, parts, strict=True)}
    required = list(names)
    values = [p.make(world.names) for p in parts]
    if rng.random() < 0.12:  # an argument that the question does not give
        properties["unit" if rng.random() < 0.5 else "language"] = {"type": "string"}
    schema = {
        "name": name,
        "description": rng.choice(texts) if rng.random() < 0.9 else "",
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    asked = rng.choice(questions).format(*values)
    return Offer(
        {"type": "function", "function": schema},
        asked,
        dict(zip(names, values, strict=True)),
    )


def _call(world: World, one: Offer) -> Message:
    name = one.schema["function"]["name"]
    identity = f"call_{world.rng.randrange(10**6)}"
    arguments = json.dumps(one.arguments)
    call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _result(world: World) -> tuple[str, str]:
    """What a tool returns, and the sentence that reports it."""
    rng, names = world.rng, world.names
    roll = rng.random()
    if roll < 0.35:
        keys = rng.sample(
            [
                "temperature",
                "sky",
                "status",
                "price",
                "time",
                "count",
                "wind",
                "place",
                "result",
                "day",
            ],
            rng.randint(1, 3),
        )
        values: dict[str, Any] = {
            k: rng.choice((names.word(), int(names.number(1, 999)), rng.choice(words.COLOURS)))
            for k in keys
        }
        return json.dumps(values), "The result: " + ", ".join(
            f"{k} {v}" for k, v in values.items()
        ) + "."
    if roll < 0.6:
        value = rng.choice((names.number(1, 99999), names.word(), names.clock()))
        return value, f"The result: {value}."
    sky = capital(rng.choice(words.ANY_ADJECTIVE))
    text = f"{sky} in {names.place()}, {names.number(1, 99)} {rng.choice(words.UNITS)}"
    return text, f"The result: {text}."


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
    families = rng.sample(range(len(FAMILIES)), rng.randint(1, 5))
    offers = [offer(world, f) for f in families]
    messages: list[Message] = [system("You are a helpful assistant.")] if rng.random() < 0.4 else []
    for _ in range(turns):
        roll = rng.random()
        if roll < share_declined:
            messages += _declined(world, families)
            continue
        if roll < share_declined + share_other:
            messages += short.task(world).messages
            continue
        index = rng.randrange(len(offers))
        _, _, parts, questions = FAMILIES[families[index]]
        values = [p.make(world.names) for p in parts]
        arguments = dict(zip(offers[index].arguments, values, strict=True))
        one = Offer(offers[index].schema, rng.choice(questions).format(*values), arguments)
        call = _call(world, one)
        messages += [user(one.question), call]
        if with_results:
            returned, report = _result(world)
            identity = call["tool_calls"][0]["id"]
            messages += [
                {"role": "tool", "tool_call_id": identity, "content": returned},
                assistant(report),
            ]
    return Conversation("tools", messages, tools=[o.schema for o in offers])


def declined(world: World) -> Conversation:
    """1-5 tools offered, and a request that none of them serves."""
    families = world.rng.sample(range(len(FAMILIES)), world.rng.randint(1, 5))
    offered = [offer(world, family).schema for family in families]
    return Conversation("tools", _declined(world, families), tools=offered)


def _declined(world: World, families: list[int]) -> list[Message]:
    """A request for a tool of none of the families, and the reply."""
    free = world.rng.choice([f for f in range(len(FAMILIES)) if f not in families])
    return [user(offer(world, free).question), assistant(NO_TOOL)]


def beside(world: World, made: Conversation) -> Conversation:
    """Tools are offered, but the passages answer: no call is made."""
    made.tools = [offer(world, f).schema for f in world.rng.sample(range(len(FAMILIES)), 2)]
    return made
