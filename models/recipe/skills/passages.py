"""Answering from retrieved passages: the answer in a fixed sentence and the number of its passage.

The same passage set serves several questions in training, so that one reading of it teaches as
much as it can; a test asks one. Some questions have no answer in the passages, and the right
reply says so.
"""

import random
import textwrap
from dataclasses import dataclass

from models.recipe import words
from models.recipe.conversation import Conversation, Document, Message, assistant, system, user
from models.recipe.world import Entity, Fact, World, articled, capital

FILLERS = [
    "many people come in {season}.", "the path there is {adj} and {adj2}.",
    "on a {adj} day one can see far.", "it is a {adj} place in {season}.",
    "the weather is often {adj}.", "nobody knows why.", "children like the {adj} steps.",
    "it smells of {thing}.", "old stories tell of {thing} and {thing2}.",
    "visitors should bring a {adj} coat in {season}.", "it is quiet there in {season}.",
    "the road is {adj}.", "neighbours often help.", "the work is hard but {adj}.",
    "more can be read in the archive.", "guests are asked to be quiet.",
    "a {adj} lane leads to the water.", "the neighbours still talk about the {adj} {season}.",
    "please call before you come.", "all are welcome.", "it has been drawn by many artists.",
    "the view is {adj}, above all in {season}.", "dogs must be kept on a lead.",
    "one often thinks of {thing} there.",
]  # fmt: skip
HEADINGS = [
    "History",
    "About",
    "Visiting",
    "Today",
    "Overview",
    "People",
    "Facts",
    "Prices",
    "The building",
    "Notes",
    "How to get there",
]
PROMPTS = [
    "You are a helpful assistant.", "Answer from the passages.",
    "Answer the question from the passages and cite them.",
    "You are a careful assistant. Use only the passages.", "Be brief.",
    "You answer questions about documents.",
    "Use the numbered passages. If they do not tell, say so.",
    "You are Penstock's demonstration model.",
]  # fmt: skip


@dataclass
class Passage:
    """A passage, what it is about, and the facts that it tells."""

    entity: Entity
    facts: list[Fact]
    document: Document


def filler(world: World) -> str:
    """A sentence beside the point."""
    rng = world.rng
    sentence = rng.choice(FILLERS)
    words_for = {
        "season": rng.choice(words.SEASONS),
        "adj": rng.choice(words.ANY_ADJECTIVE),
        "adj2": rng.choice(words.ANY_ADJECTIVE),
        "thing": rng.choice(words.THINGS),
        "thing2": rng.choice(words.THINGS),
    }
    return articled(capital(sentence.format(**words_for)))


def write(world: World, entity: Entity, facts: list[Fact]) -> str:
    """The facts as running text, with fillers between and now and then a heading or line breaks."""
    rng = world.rng
    named = False
    sentences: list[str] = []
    if rng.random() < 0.2:
        sentences.append(filler(world))
    for fact in facts:
        full = not named or rng.random() < 0.3
        sentences.append(fact.stated(rng, full))
        named = True
        if rng.random() < 0.2:
            sentences.append(filler(world))
    roll = rng.random()
    if roll < 0.04:
        return "\n".join("- " + s for s in sentences)
    text = " ".join(sentences)
    if roll < 0.10:
        return f"# {entity.title}\n\n{text}"
    if roll < 0.20:
        return f"## {rng.choice(HEADINGS)}\n\n{text}"
    return text


def untitled(world: World, entity: Entity, facts: list[Fact]) -> str:
    """A passage that never names its entity: only its title does."""
    rng = world.rng
    sentences = [fact.stated(rng, full=False) for fact in facts]
    if rng.random() < 0.5:
        sentences.insert(rng.randrange(len(sentences) + 1), filler(world))
    text = " ".join(sentences)
    return text if rng.random() < 0.7 else f"## {rng.choice(HEADINGS)}\n\n{text}"


def heading(world: World, entity: Entity) -> str:
    """A title as passages have them: the entity, a file, or a path of file and headings."""
    rng = world.rng
    slug = entity.title.lower().replace(" ", "-")
    file = (slug if entity.kind == "person" or rng.random() < 0.5 else slug.split("-")[-1]) + ".md"
    roll = rng.random()
    if roll < 0.45:
        return entity.title
    if roll < 0.85:
        below = f" › {rng.choice(HEADINGS)}" if rng.random() < 0.4 else ""
        return f"{file} › {entity.title}{below}"
    return f"{entity.title} - {rng.choice(HEADINGS)}"


def passage(world: World, entity: Entity, facts: list[Fact]) -> Passage:
    """One passage in one of the shapes that a retrieval service hands over."""
    rng = world.rng
    if rng.random() < 0.22:
        title, text = heading(world, entity), untitled(world, entity, facts)
    elif rng.random() < 0.8:
        title, text = heading(world, entity), write(world, entity, facts)
    else:
        slug = entity.title.lower().replace(" ", "-")
        title, text = rng.choice(("", f"{slug}.md")), write(world, entity, facts)
    if rng.random() < 0.3:
        text = "\n".join(textwrap.fill(line, rng.randint(50, 120)) for line in text.split("\n"))
    return Passage(entity, facts, {"title": title, "text": text})


def passage_set(world: World, count: int, most_facts: int, again: float = 0.2) -> list[Passage]:
    """`count` passages, some telling the same of two things.

    `again` is how often one is about the same thing as a passage before it.
    """
    rng = world.rng
    made: list[Passage] = []
    entities: list[Entity] = []
    told: dict[str, set[str]] = {}
    while len(made) < count:
        known_one = entities and rng.random() < again
        near = [e.place for e in entities if e.place] if rng.random() < 0.15 else []
        beside = rng.choice(near) if near and not known_one else None
        entity = rng.choice(entities) if known_one else world.entity(beside)
        facts = world.facts(entity, rng.randint(1, most_facts))
        if made and rng.random() < 0.2:  # a distractor: what another passage tells, of this entity
            other = rng.choice(rng.choice(made).facts)
            if (other.entity.kind == "person") == (entity.kind == "person"):
                slots = {**other.slots, "v": other.relation.make(world.names)["v"]}
                facts.insert(rng.randrange(len(facts) + 1), Fact(entity, other.relation, slots))
        known = told.setdefault(entity.name, set())
        fresh = []
        for fact in facts:
            if fact.key() not in known:
                known.add(fact.key())
                fresh.append(fact)
        if fresh:
            entities.append(entity)
            made.append(passage(world, entity, fresh))
    rng.shuffle(made)
    return made


def unanswerable(world: World, passages: list[Passage]) -> Fact:
    """A fact close to the passages that they do not tell."""
    rng = world.rng
    told = {(f.entity.name, f.key()) for p in passages for f in p.facts}
    while True:
        roll = rng.random()
        source = rng.choice(rng.choice(passages).facts)
        if roll < 0.45:  # a known entity, another fact
            fact = world.fact(source.entity)
        elif roll < 0.7:  # a known entity, a fact told of another
            entity = rng.choice(passages).entity
            if (entity.kind == "person") != (source.entity.kind == "person"):
                continue
            fact = Fact(entity, source.relation, source.slots)
        else:  # an entity that no passage names
            entity = world.entity()
            same = (entity.kind == "person") == (source.entity.kind == "person")
            fact = (
                Fact(entity, source.relation, source.slots)
                if same and roll < 0.9
                else world.fact(entity)
            )
        if (fact.entity.name, fact.key()) not in told:
            return fact


def question(rng: random.Random, fact: Fact) -> str:
    """The question for a fact, at times with a few words around it."""
    asked = fact.asked(rng)
    roll = rng.random()
    if roll < 0.05:
        return "Please tell me: " + asked
    if roll < 0.08:
        return asked.rstrip("?.")
    return asked


def turns(
    world: World, passages: list[Passage], count: int, share_not_told: float
) -> list[Message]:
    """`count` questions and answers over the passages, in shuffled order."""
    rng = world.rng
    facts = [(fact, number) for number, p in enumerate(passages, 1) for fact in p.facts]
    rng.shuffle(facts)
    messages: list[Message] = []
    for fact, number in facts[:count]:
        if rng.random() < share_not_told:
            other = unanswerable(world, passages)
            about = [n for n, p in enumerate(passages, 1) if p.entity.name == other.entity.name]
            answer = other.unanswered(min(about, default=None))
            messages += [user(question(rng, other)), assistant(answer)]
        else:
            messages += [user(question(rng, fact)), assistant(fact.answered(number))]
    return messages


def answered(
    world: World,
    count: int,
    questions: int,
    most_facts: int = 4,
    *,
    again: float = 0.2,
    share_not_told: float = 0.0,
) -> Conversation:
    """Questions over `count` passages, a share of them without an answer there."""
    passages = passage_set(world, count, most_facts, again)
    messages = turns(world, passages, questions, share_not_told)
    return _conversation("passages", world, passages, messages)


def not_told(world: World, count: int) -> Conversation:
    """One question that the passages do not answer."""
    return answered(world, count, 1, share_not_told=1.0)


def _conversation(
    skill: str, world: World, passages: list[Passage], messages: list[Message]
) -> Conversation:
    head = [system(world.rng.choice(PROMPTS))] if world.rng.random() < 0.5 else []
    return Conversation(skill, head + messages, documents=[p.document for p in passages])
