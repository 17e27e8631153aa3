"""Answering as JSON: the requested keys, filled from a passage; null where it does not tell."""

import json
import re
from dataclasses import dataclass, replace

from models.recipe.bank.compose import Composed, composed, recorded
from models.recipe.bank.relations import Kind
from models.recipe.bank.store import side
from models.recipe.bank.subjects import Subject, alike
from models.recipe.conversation import Conversation, Document, Message, assistant, system, user
from models.recipe.lookup.passage import passage, titled
from models.recipe.world import World

ASKS = [
    "Give the {keys} of {E} as JSON.", "Answer as JSON with the keys {keys} about {E}.",
    "Reply in JSON for {E}: {keys}.", "Describe {E} as a JSON object with the keys {keys}.",
    "Extract {keys} of {E} as JSON.", "Return a JSON object with {keys} for {E}.",
    "JSON please: {keys} for {E}", "From the documents, fill in {keys} for {E}, as JSON.",
    "Put {keys} of {E} into JSON.", "I need {keys} for {E} in JSON format.",
    "{E}: {keys} as a JSON object",
]  # fmt: skip
HERE = [
    "Give {keys} as JSON.", "Extract {keys} as JSON.", "Return JSON with the keys {keys}.",
    "Turn this into JSON with {keys}.", "Read {keys} from this text and answer in JSON.",
]  # fmt: skip


@dataclass
class Told:
    """A subject with a text about it, and what the text tells by keys."""

    subject: Subject
    text: Composed
    facts: dict[str, str]
    silent: list[str]  # keys that it does not tell


def extract(world: World, count: int, records: bool, share_silent: float = 0.2) -> Conversation:
    """JSON from one of `count` passages, or from a text in the question itself. `records`: of
    values behind labels, which are the keys, or else of any form. `share_silent`: of the requests
    without a schema, those for a key that the passage does not tell, where there is one.
    """
    rng = world.rng
    kind = rng.choice(side(world.held_out).kinds)
    labels, taken = _labels(world, kind, records), set[str]()

    def told() -> Told:
        return _told(world, kind, labels, records, taken)

    some = [told() for _ in range(count)]
    while not any(one.facts for one in some):
        some = [told() for _ in range(count)]
    one = rng.choice([one for one in some if one.facts])
    head: list[Message] = [system("Answer in JSON.")] if rng.random() < 0.2 else []
    if count == 1 and rng.random() < 0.6:
        request, answer = _request(world, one, HERE, share_silent)
        text = one.text.body.text
        asked = f"{text}\n\n{request}" if rng.random() < 0.5 else f"{request}\n\n{text}"
        return Conversation("json", [*head, user(asked), assistant(answer)])
    request, answer = _request(world, one, ASKS, share_silent)
    documents = [_document(world, one) for one in some]
    return Conversation("json", [*head, user(request), assistant(answer)], documents=documents)


def _labels(world: World, kind: Kind, records: bool) -> dict[str, str]:
    """What each relation of a kind is called by: one of its labels, or its name."""
    found: dict[str, str] = {}
    for one in kind.relations:
        if records:
            names = one.labels
        else:
            names = [one.name, *one.labels] if world.rng.random() < 0.5 else [one.name]
        label = world.rng.choice(names)
        others = map(_slug, found.values())
        found[one.name] = f"the {one.name}" if _slug(label) in others else label
    return found


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _told(world: World, kind: Kind, labels: dict[str, str], records: bool, taken: set[str]) -> Told:
    """A new subject of a kind; its values are spelled as its text spells them."""
    rng = world.rng
    subject = Subject.drawn(rng, kind, world.held_out, taken)
    relations = rng.sample(kind.relations, rng.randint(2, min(5, len(kind.relations))))
    if records:
        labelled = [replace(one, labels=[labels[one.name]]) for one in relations]
        text = recorded(rng, subject, labelled)
    else:
        text = composed(rng, subject, relations)
    keys = {name: _slug(label) for name, label in labels.items()}
    facts: dict[str, str] = {}
    for one in relations:
        spans = text.body.stretches(subject.facts[one.name], {f"v:0:{one.name}"})
        if spans:
            facts[keys[one.name]] = text.body.text[slice(*spans[0])]
    silent = [
        keys[one.name]
        for one in kind.relations
        if one not in relations and not any(alike(one.value, extra) for extra in subject.extras)
    ]
    return Told(subject, text, facts, silent)


def _document(world: World, one: Told) -> Document:
    title = one.subject.title(world.rng)
    title = titled(world.rng, title, one.subject.kind.name, bare=not one.text.nameless)
    made = passage(world.rng, title, one.text.body.text, [])
    return {"title": made.title, "text": made.text}


def _request(world: World, one: Told, asks: list[str], share_silent: float) -> tuple[str, str]:
    """A request for some keys, and the JSON that answers it."""
    rng = world.rng
    some = rng.sample(list(one.facts), rng.randint(1, min(4, len(one.facts))))
    found: dict[str, str | int | None] = {key: _value(one.facts[key]) for key in some}
    by_schema = rng.random() < 0.2
    # A schema holds: no null there.
    if one.silent and not by_schema and rng.random() < share_silent:
        found[rng.choice(one.silent)] = None
    keys = rng.sample(list(found), len(found))
    answer = json.dumps({key: found[key] for key in keys}, ensure_ascii=False)
    name = rng.choice(one.subject.names)
    if by_schema:
        types = {k: {"type": "integer" if isinstance(found[k], int) else "string"} for k in keys}
        schema = json.dumps({"type": "object", "properties": types, "required": keys})
        return f"Describe {name} as JSON that fits this schema: {schema}", answer
    shown = [f'"{key}"' for key in keys] if rng.random() < 0.7 else keys
    listed = ", ".join(shown)
    if len(shown) > 1 and rng.random() < 0.4:
        listed = ", ".join(shown[:-1]) + " and " + shown[-1]
    return rng.choice(asks).format(keys=listed, E=name), answer


def _value(value: str) -> str | int:
    """A number as one, but for long ones and for what begins with a zero."""
    plain = value.isascii() and value.isdigit() and not value.startswith("0")
    return int(value) if plain and len(value) < 5 else value
