"""Sets of passages from the bank's documents, with a question that one of them answers, or none."""

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from models.recipe.bank.documents import Filled, Question
from models.recipe.bank.store import side
from models.recipe.bank.text import Text
from models.recipe.lookup import naming, of_relations
from models.recipe.lookup.passage import (
    PATH,
    SENTENCE_END,
    Passage,
    Spans,
    cut,
    passage,
    titled,
    within,
)

ALONE = 0.35  # how often one passage will do where more were wanted and none could be beside it
CATCHWORD = 0.3  # how often it is asked in catchwords, against once in a question's form
TRIES = 12  # documents that are tried for a set of passages before it is made smaller


@dataclass(frozen=True)
class Size:
    """How much is shown."""

    count: int  # passages, or fewer
    whole: float = 0.5  # how often a document is shown whole, and not a chunk or two of it
    others_whole: float = 0.2  # … one beside it
    paired: bool = False  # whether a passage is of two documents, as a platform's chunks are long


@dataclass
class Asked:
    """A question, the values of the slots in it, and the passages it is put to."""

    question: str
    values: list[str]
    passages: list[Passage]


def asked(rng: random.Random, held_out: bool, size: Size, told: bool) -> tuple[str, list[Passage]]:
    """A question on a document, among some passages, told by one of them or by none."""
    count = size.count * (2 if size.paired else 1)
    for _ in range(TRIES):
        filled = rng.choice(side(held_out).documents).filled(rng, held_out)
        make = _told if told else rng.choices((_missing, _removed, _elsewhere), (50, 30, 20))[0]
        made = make(rng, filled, replace(size, count=count))
        if made and (len(made.passages) > 1 or count == 1 or rng.random() < ALONE):
            rng.shuffle(made.passages)
            return made.question, _paired(made.passages, size.count)
    return asked(rng, held_out, replace(size, count=1, paired=False), told)


def _paired(passages: list[Passage], count: int) -> list[Passage]:
    """No more than `count`: each that is left over stands behind one of those, as a section."""
    found = passages[:count]
    for at, other in enumerate(passages[count:]):
        one = found[at]
        heading = f"## {other.title.split(PATH)[-1]}\n\n" if other.title else ""
        lead = f"{one.text}\n\n{heading}"
        tells = [(len(lead) + start, len(lead) + end) for start, end in other.tells]
        found[at] = Passage(one.title, lead + other.text, one.tells + tells)
    return found


def _told(rng: random.Random, filled: Filled, size: Size) -> Asked | None:
    """A question that the document answers."""
    question = rng.choice(filled.template.told)
    own = _chunks(rng, filled, filled.found(question), size)
    made = _asked(rng, filled, question, own)
    _join_others(rng, filled, made, "\n".join(one.whole for one in own), size)
    return made


def _missing(rng: random.Random, filled: Filled, size: Size) -> Asked | None:
    """A question of the document's own that it does not answer."""
    if not filled.template.untold:
        return None
    own = _chunks(rng, filled, [], size)
    made = _asked(rng, filled, rng.choice(filled.template.untold), own)
    _join_others(rng, filled, made, "\n".join(one.whole for one in own), size)
    return made


def _elsewhere(rng: random.Random, filled: Filled, size: Size) -> Asked | None:
    """A question that the document answers, which is not among the passages."""
    made = _asked(rng, filled, rng.choice(filled.template.told), [])
    _join_others(rng, filled, made, f"{filled.title}\n{filled.body.text}", size)
    return made if made.passages else None


def _removed(rng: random.Random, filled: Filled, size: Size) -> Asked | None:
    """A question that the document answers, but for the sentence that does is left out."""
    question = rng.choice(filled.template.told)
    spans, text = filled.found(question), filled.body.text
    borders = [0, *(found.end() for found in SENTENCE_END.finditer(text)), len(text)]
    kept = [
        text[a:b]
        for a, b in pairwise(borders)
        if not any(a < end and start < b for start, end in spans)
    ]
    rest = "".join(kept).strip()
    assert question.answer
    values = [str(filled.bindings.values[name]) for name in question.answer.used]
    if len(rest.split()) < 15 or any(naming.holds(rest, value) for value in values):
        return None
    own = passage(rng, _title(rng, filled), rest, [])
    made = _asked(rng, filled, question, [own])
    _join_others(rng, filled, made, own.whole, size)
    return made


def _asked(rng: random.Random, filled: Filled, question: Question, own: list[Passage]) -> Asked:
    """The question in one of its wordings, put to the document's own passages."""
    made = filled.ask(_wording(rng, question))
    return Asked(made.text, [made.text[piece.start : piece.end] for piece in made.pieces], own)


def _wording(rng: random.Random, question: Question) -> Text:
    """How it is asked: mostly as a question. Two in five wordings are catchwords."""
    asked = [1.0 if str(one.parts[-1]).endswith("?") else CATCHWORD for one in question.wordings]
    return rng.choices(question.wordings, asked)[0]


def _title(rng: random.Random, filled: Filled) -> str:
    return titled(rng, filled.title, filled.template.kind, bare=not filled.title)


def _chunks(rng: random.Random, filled: Filled, spans: Spans, size: Size) -> list[Passage]:
    """The document whole, or up to as many of its chunks, the one with the answer among them."""
    title, text = _title(rng, filled), filled.body.text
    whole = [passage(rng, title, text, spans)]
    if len(text.split()) < 45 or rng.random() < size.whole:
        return whole
    chunks = [(within(spans, a, b), text[a:b]) for a, b in cut(text, rng.randint(25, 65))]
    telling = [chunk for chunk in chunks if chunk[0]][:1]
    if spans and not telling:
        return whole
    silent = [chunk for chunk in chunks if not chunk[0]]
    beside = min(len(silent), size.count - len(telling), rng.choice((0, 1, 1, 2)))
    some = telling + rng.sample(silent, max(beside, 1 - len(telling)))
    return [passage(rng, title, words, tells) for tells, words in some]


def _join_others(rng: random.Random, filled: Filled, made: Asked, own: str, size: Size) -> None:
    """Adds passages of other documents up to the count: alike, of the same writer, or any.

    Some are the same document with other values. Left out are those that might answer the
    question too. `own` is the text that it is about.
    """
    held_out = filled.bindings.held_out
    templates = side(held_out).documents
    near = [one for one in templates if one.file == filled.template.file]
    for _ in range(2 * (size.count - len(made.passages))):
        if rng.random() < 0.2:
            one, twin = of_relations.distractor(rng, held_out), False
        else:
            pool = rng.choices(([filled.template], near, templates), (30, 30, 40))[0]
            template = rng.choice(pool)
            one = _part(rng, template.filled(rng, held_out), size)
            twin = template is filled.template
        if len(made.passages) < size.count and _apart(made, own, one.whole, twin):
            made.passages.append(one)


def _part(rng: random.Random, filled: Filled, size: Size) -> Passage:
    """A document, or a chunk of it, for beside another."""
    text = filled.body.text
    if len(text.split()) > 40 and rng.random() < 1 - size.others_whole:
        start, end = rng.choice(cut(text, rng.randint(20, 55)))
        text = text[start:end]
    return passage(rng, _title(rng, filled), text, [])


def _apart(made: Asked, own: str, other: str, twin: bool) -> bool:
    """Whether the question is about something that the own text names, and the other does not."""
    if twin:
        return naming.names_only(set(made.values), own, other)
    if naming.names_only(naming.names(made.question, made.values), own, other):
        return True
    stems = naming.stems(made.question)
    shared = stems & naming.stems(other)
    return len(shared) <= 1 and bool((stems & naming.stems(own)) - shared)
