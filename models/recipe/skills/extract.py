"""Answering as JSON: the requested keys, filled from a passage; null where it does not tell."""

import json
import re

from models.recipe.bank.compose import Subject, alike, composed
from models.recipe.bank.relations import Relation
from models.recipe.bank.store import side
from models.recipe.conversation import Conversation, Document, Message, assistant, system, user
from models.recipe.lookup.passage import passage, titled
from models.recipe.world import World

ASKS = [
    "Give the {keys} of {E} as JSON.", "Answer as JSON with the keys {keys} about {E}.",
    "Reply in JSON for {E}: {keys}.", "Describe {E} as a JSON object with the keys {keys}.",
    "Extract {keys} of {E} as JSON.", "Return a JSON object with {keys} for {E}.",
    "JSON please: {keys} for {E}", "From the documents, fill in {keys} for {E}, as JSON.",
    "Put {keys} of {E} into JSON.", "I need {keys} for {E} in JSON format.", "{E}: {keys} as a JSON object",
]  # fmt: skip
HERE = [
    "Give {keys} as JSON.", "Extract {keys} as JSON.", "Return JSON with the keys {keys}.",
    "Turn this into JSON with {keys}.", "Read {keys} from this text and answer in JSON.",
]  # fmt: skip


def key(relation: Relation) -> str:
    """A relation's name as a key of a JSON object."""
    return re.sub(r"[^a-z0-9]+", "_", relation.name.lower()).strip("_")


def _request(
    world: World, subject: Subject, told: dict[str, str], asks: list[str]
) -> tuple[str, str]:
    """A request for some keys of a subject, and the JSON that answers it."""
    rng = world.rng
    some = rng.sample(list(told), rng.randint(1, min(4, len(told))))
    found: dict[str, str | int | None] = {name: _value(told[name]) for name in some}
    silent = [
        one
        for one in subject.kind.relations
        if key(one) not in told and not any(alike(one.value, extra) for extra in subject.extras)
    ]
    if silent and rng.random() < 0.2:
        found[key(rng.choice(silent))] = None
    keys = rng.sample(list(found), len(found))
    answer = json.dumps({name: found[name] for name in keys}, ensure_ascii=False)
    name = rng.choice(subject.names)
    if rng.random() < 0.2:
        types = {k: {"type": "integer" if isinstance(found[k], int) else "string"} for k in keys}
        schema = json.dumps({"type": "object", "properties": types, "required": keys})
        return f"Describe {name} as JSON that fits this schema: {schema}", answer
    shown = [f'"{k}"' for k in keys] if rng.random() < 0.7 else keys
    listed = ", ".join(shown)
    if len(shown) > 1 and rng.random() < 0.4:
        listed = ", ".join(shown[:-1]) + " and " + shown[-1]
    return rng.choice(asks).format(keys=listed, E=name), answer


def _value(value: str) -> str | int:
    """A number as one, but for what begins with a zero."""
    plain = value.isascii() and value.isdigit() and not value.startswith("0")
    return int(value) if plain and len(value) < 5 else value


def extract(world: World, count: int) -> Conversation:
    """JSON from one of `count` passages, or from a text in the question itself."""
    rng = world.rng
    taken: set[str] = set()
    kind = rng.choice(side(world.held_out).kinds)
    documents: list[Document] = []
    told: list[tuple[Subject, dict[str, str]]] = []
    for _ in range(count):
        subject = Subject.drawn(rng, kind, world.held_out, taken)
        relations = rng.sample(kind.relations, rng.randint(2, min(5, len(kind.relations))))
        body = composed(rng, subject, relations).body
        one = passage(rng, titled(rng, subject.title(rng), kind.name), body.text, [])
        documents.append({"title": one.title, "text": one.text})
        facts: dict[str, str] = {}
        for relation in relations:  # as the text spells them
            spans = body.stretches(subject.facts[relation.name], {f"v:0:{relation.name}"})
            facts |= {key(relation): body.text[a:b] for a, b in spans[:1]}
        told.append((subject, facts))
    subject, facts = rng.choice([one for one in told if one[1]])
    head: list[Message] = [system("Answer in JSON.")] if rng.random() < 0.2 else []
    if count == 1 and rng.random() < 0.6:
        request, answer = _request(world, subject, facts, HERE)
        text = documents[0]["text"]
        shape = "{text}\n\n{request}" if rng.random() < 0.5 else "{request}\n\n{text}"
        asked = user(shape.format(text=text, request=request))
        return Conversation("json", [*head, asked, assistant(answer)])
    request, answer = _request(world, subject, facts, ASKS)
    return Conversation("json", [*head, user(request), assistant(answer)], documents=documents)
