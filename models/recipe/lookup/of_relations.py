"""Sets of passages composed of the bank's relations, with a question that they answer or not."""

import random
from dataclasses import dataclass

from models.recipe.bank.compose import Composed, composed, together
from models.recipe.bank.relations import Kind, Relation
from models.recipe.bank.render import render
from models.recipe.bank.store import side
from models.recipe.bank.subjects import Subject, alike
from models.recipe.lookup.passage import Passage, Spans, merged, passage, titled

# Titles of texts about several subjects.
LISTS = ("Overview", "Register", "List", "At a glance", "Directory", "Comparison", "Table", "All")

Target = tuple[int, Spans]  # the text that answers, and where


@dataclass
class Scene:
    """Subjects and the texts that tell of them."""

    subjects: list[Subject]
    taken: set[str]  # what nothing else may be called
    texts: list[Composed]
    told: dict[tuple[int, str], Target]  # by the subject's number and the relation's name


def distractor(rng: random.Random, held_out: bool) -> Passage:
    """A passage about something."""
    return _about(rng, rng.choice(side(held_out).kinds), held_out)


def asked(
    rng: random.Random, held_out: bool, count: int, most: int, told: bool
) -> tuple[str, list[Passage]]:
    """A question and `count` passages, of up to `most` facts each, of which one tells or none."""
    while True:
        kind = rng.choice(side(held_out).kinds)
        scene = _scene(rng, kind, held_out, count, most)
        found = _question(rng, scene) if told else _unanswered(rng, scene, held_out)
        if found:
            question, target = found
            passages = _passages(rng, scene, target, held_out, count)
            rng.shuffle(passages)
            return question, passages


def _scene(rng: random.Random, kind: Kind, held_out: bool, count: int, most: int) -> Scene:
    """Texts about subjects of a kind, that tell much the same of each; some about one subject."""
    taken: set[str] = set()
    wanted = 1 if count == 1 or rng.random() < 0.15 else rng.randint(2, count)
    drawn = [Subject.drawn(rng, kind, held_out, taken) for _ in range(wanted)]
    subjects = list({one.names[0]: one for one in drawn}.values())
    number = len(subjects)
    common = rng.sample(kind.relations, min(len(kind.relations), max(1, most)))
    scene = Scene(subjects, taken, [], {})
    left = {n: rng.sample(kind.relations, len(kind.relations)) for n in range(number)}
    if number > 1 and rng.random() < 0.12:
        some = rng.sample(common, min(len(common), rng.randint(1, 3)))
        _note(scene, together(rng, subjects, some), list(range(number)))
        for n in left:
            left[n] = [one for one in left[n] if one not in some]
    order = list(range(number)) + [rng.randrange(number) for _ in range(count)]
    for n in order[: max(1, count - len(scene.texts))]:
        if some := _choice(rng, left[n], common, rng.randint(1, most)):
            left[n] = [one for one in left[n] if one not in some]
            _note(scene, composed(rng, subjects[n], some), [n])
    return scene


def _choice(
    rng: random.Random, left: list[Relation], common: list[Relation], count: int
) -> list[Relation]:
    """Up to `count` of the relations that are left, most of them among the common ones."""
    pool = [one for one in left if one in common]
    some = rng.sample(pool, min(len(pool), max(1, round(count * 0.7))))
    free = [one for one in left if one not in some]
    some += rng.sample(free, min(len(free), count - len(some)))
    return rng.sample(some, len(some))


def _note(scene: Scene, text: Composed, numbers: list[int]) -> None:
    """Adds a text about the subjects of these numbers."""
    index = len(scene.texts)
    scene.texts.append(text)
    for local, number in enumerate(numbers):
        for relation in scene.subjects[number].kind.relations:
            name = f"v:{local}:{relation.name}"
            if any(piece.name == name for piece in text.body.pieces):
                value = scene.subjects[number].facts[relation.name]
                scene.told[number, relation.name] = index, text.body.stretches(value, {name})


def _question(rng: random.Random, scene: Scene) -> tuple[str, Target | None] | None:
    """One that a text answers."""
    (number, name), target = rng.choice(list(scene.told.items()))
    relation = _relation(scene, name)
    subject = scene.subjects[number]
    if relation.finds and rng.random() < 0.12:
        text = rng.choice(relation.finds)
        spans = [
            (piece.start, piece.end)
            for piece in scene.texts[target[0]].body.pieces
            if piece.name.startswith("s:")
            and _is_name(scene, target[0], piece.start, piece.end, subject)
        ]
        if spans:
            asked = render(text, subject.within(relation, rng, text)).text
            return _sentence(asked), (target[0], spans)
    if not target[1]:
        return None
    return _ask(rng, scene, subject, relation), target


def _is_name(scene: Scene, index: int, start: int, end: int, subject: Subject) -> bool:
    words = scene.texts[index].body.text[start:end].lower()
    return any(words == name.lower() for name in subject.names)


def _unanswered(rng: random.Random, scene: Scene, held_out: bool) -> tuple[str, None] | None:
    """One that no text answers: of a subject that they tell of, or of one that they do not."""
    kind = scene.subjects[0].kind
    told = sorted({name for _, name in scene.told})
    if rng.random() < 0.3:
        subject = Subject.drawn(rng, kind, held_out, scene.taken)
        if any(subject.names[0] == one.names[0] for one in scene.subjects):
            return None
        relation = _relation(scene, rng.choice(told))
        return _ask(rng, scene, subject, relation, sole=False), None
    number = rng.randrange(len(scene.subjects))
    subject = scene.subjects[number]
    silent = [
        relation
        for relation in kind.relations
        if (number, relation.name) not in scene.told
        and not any(alike(relation.value, extra) for extra in subject.extras)
    ]
    if not silent:
        return None
    elsewhere = [relation for relation in silent if relation.name in told]
    relation = rng.choice(elsewhere if elsewhere and rng.random() < 0.6 else silent)
    return _ask(rng, scene, subject, relation), None


def _relation(scene: Scene, name: str) -> Relation:
    return next(one for one in scene.subjects[0].kind.relations if one.name == name)


def _ask(
    rng: random.Random, scene: Scene, subject: Subject, relation: Relation, sole: bool = True
) -> str:
    """A question for the relation; of a sole subject at times by `it` or `the office`."""
    texts = [text for text in relation.asks if "v" not in text.used]
    text = rng.choice(texts or relation.asks)
    bindings = subject.within(relation, rng, text)
    plain = [form for form in subject.again if " " in form]
    if sole and len(scene.subjects) == 1 and plain and rng.random() < 0.15:
        bindings.values["s"] = rng.choice(plain)
    return _sentence(render(text, bindings).text)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _passages(
    rng: random.Random, scene: Scene, target: Target | None, held_out: bool, count: int
) -> list[Passage]:
    """The texts with their titles, and some passages about other things."""
    made, plain = [], []
    for index, text in enumerate(scene.texts):
        one = text.subjects[0]
        name = one.title(rng) if len(text.subjects) == 1 else rng.choice(LISTS)
        title = titled(rng, name, one.kind.name, bare=not text.nameless)
        spans = target[1] if target and target[0] == index else []
        made.append(passage(rng, title, text.body.text, spans))
        if not text.nameless:
            plain.append(made[-1])
    others = [kind for kind in side(held_out).kinds if kind is not scene.subjects[0].kind]
    while others and len(made) < count:
        made.append(_about(rng, rng.choice(others), held_out))
    if len(plain) > 1 and rng.random() < 0.12:
        some = rng.sample(plain, min(len(plain), rng.randint(2, 3)))
        made = [one for one in made if one not in some] + [merged(rng, some, rng.choice(LISTS))]
    return made


def _about(rng: random.Random, kind: Kind, held_out: bool) -> Passage:
    subject = Subject.drawn(rng, kind, held_out, set())
    text = composed(rng, subject, rng.sample(kind.relations, rng.randint(1, 4)))
    title = titled(rng, subject.title(rng), kind.name, bare=not text.nameless)
    return passage(rng, title, text.body.text, [])
