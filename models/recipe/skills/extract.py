"""Answering as JSON: the requested keys, filled from a passage; null where it does not tell.

The passages are records, lines of name and value.
"""

import json

from models.recipe.conversation import Conversation, Message, assistant, system, user
from models.recipe.skills.passages import Passage, heading, passage_set
from models.recipe.world import Fact, World

ASKS = [
    "Give the {keys} of {E} as JSON.", "Answer as JSON with the keys {keys} about {E}.",
    "Reply in JSON for {E}: {keys}.", "Describe {E} as a JSON object with the keys {keys}.",
    "Extract {keys} of {E} as JSON.", "Return a JSON object with {keys} for {E}.",
]  # fmt: skip


def record(facts: list[Fact]) -> str:
    """The facts as lines of name and value."""
    return "\n".join(f"{fact.key()}: {fact.value}" for fact in facts)


def _value(fact: Fact) -> str | int:
    return int(fact.value) if fact.relation.number else fact.value


def _request(world: World, passage: Passage) -> tuple[str, str]:
    """A request for some keys of the passage's entity, and the JSON that answers it."""
    rng, entity = world.rng, passage.entity
    facts = {fact.key(): fact for fact in passage.facts}
    keys = rng.sample(list(facts), rng.randint(1, min(4, len(facts))))
    answer: dict[str, str | int | None] = {key: _value(facts[key]) for key in keys}
    if rng.random() < 0.2:
        other = world.fact(entity).key()
        if other not in facts:
            answer[other] = None
            keys = rng.sample([*keys, other], len(keys) + 1)
    answer = {key: answer[key] for key in keys}
    if rng.random() < 0.2:
        types = {k: {"type": "integer" if isinstance(answer[k], int) else "string"} for k in keys}
        schema = json.dumps({"type": "object", "properties": types, "required": keys})
        request = f"Describe {entity.name} as JSON that fits this schema: {schema}"
        return request, json.dumps(answer)
    if rng.random() < 0.75:  # in quotes they are the same tokens as in the answer
        keys = [f'"{key}"' for key in keys]
    listed = (
        ", ".join(keys)
        if rng.random() < 0.6 or len(keys) == 1
        else ", ".join(keys[:-1]) + " and " + keys[-1]
    )
    return rng.choice(ASKS).format(keys=listed, E=entity.name), json.dumps(answer)


def extract(world: World, count: int, questions: int) -> Conversation:
    """JSON from one of `count` passages, or from a text in the question itself."""
    rng = world.rng
    messages: list[Message] = []
    if rng.random() < 0.3:
        entity = world.entity()
        facts = world.facts(entity, rng.randint(2, 5))
        text = f"{entity.name}\n{record(facts)}"
        request, answer = _request(world, Passage(entity, facts, {}))
        shape = "{text}\n\n{request}" if rng.random() < 0.5 else "{request}\n\n{text}"
        return Conversation(
            "json", [user(shape.format(text=text, request=request)), assistant(answer)]
        )
    passages = passage_set(world, count, 5)
    by_entity: dict[str, Passage] = {}
    for p in passages:  # several passages about one entity count as one
        seen = by_entity.setdefault(p.entity.name, Passage(p.entity, [], {}))
        seen.facts.extend(p.facts)
    for _ in range(questions):
        request, answer = _request(world, rng.choice(list(by_entity.values())))
        messages += [user(request), assistant(answer)]
    head = [system("Answer in JSON.")] if rng.random() < 0.3 else []
    documents = [{"title": heading(world, p.entity), "text": record(p.facts)} for p in passages]
    return Conversation("json", head + messages, documents=documents)
