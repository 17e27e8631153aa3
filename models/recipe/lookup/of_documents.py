"""Sets of passages from the bank's documents, with a question that one of them answers, or none."""

import random
from dataclasses import dataclass

from models.recipe.bank.documents import Filled, Question
from models.recipe.bank.store import side
from models.recipe.lookup import naming, of_relations
from models.recipe.lookup.passage import SENTENCE_END, Passage, Spans, cut, passage, titled, within

TRIES = 12  # questions that are tried against a set of passages before it is made smaller


@dataclass
class Other:
    """A passage beside; `twin` if it is the same document with other values."""

    passage: Passage
    twin: bool = False


@dataclass
class Asked:
    """A question and the passages it is put to."""

    question: str
    passages: list[Passage]


def asked(rng: random.Random, held_out: bool, count: int, told: bool) -> Asked:
    """A question on a document, among `count` passages or fewer, told by one of them or by none."""
    templates = side(held_out).documents
    for _ in range(TRIES):
        template = rng.choice(templates)
        filled = template.filled(rng, held_out)
        if told:
            made = _told(rng, filled, count, held_out)
        else:
            roll = rng.random()
            if roll < 0.5:
                made = _missing(rng, filled, count, held_out)
            elif roll < 0.72 and count > 1:
                made = _elsewhere(rng, filled, count, held_out)
            else:
                made = _removed(rng, filled, count, held_out)
        if made:
            rng.shuffle(made.passages)
            return made
    return asked(rng, held_out, 1, told)


def _told(rng: random.Random, filled: Filled, count: int, held_out: bool) -> Asked | None:
    question = rng.choice(filled.template.told)
    spans = filled.found(question)
    own = _chunks(rng, filled, spans, count)
    words, values = _ask(rng, filled, question)
    others = _others(rng, filled, count - len(own), held_out)
    own_text = "\n".join(one.whole for one in own)
    return Asked(words, [*own, *_kept_apart(words, values, own_text, others)])


def _missing(rng: random.Random, filled: Filled, count: int, held_out: bool) -> Asked | None:
    """A question of the document's own that it does not answer."""
    if not filled.template.untold:
        return None
    question = rng.choice(filled.template.untold)
    words, values = _ask(rng, filled, question)
    own = _chunks(rng, filled, [], count)
    others = _others(rng, filled, count - len(own), held_out)
    own_text = "\n".join(one.whole for one in own)
    return Asked(words, [*own, *_kept_apart(words, values, own_text, others)])


def _elsewhere(rng: random.Random, filled: Filled, count: int, held_out: bool) -> Asked | None:
    """A question that the document answers, which is not among the passages."""
    question = rng.choice(filled.template.told)
    words, values = _ask(rng, filled, question)
    own_text = f"{filled.title}\n{filled.body.text}"
    others = _others(rng, filled, count, held_out)
    kept = _kept_apart(words, values, own_text, others)
    return Asked(words, kept) if kept else None


def _removed(rng: random.Random, filled: Filled, count: int, held_out: bool) -> Asked | None:
    """A question that the document answers, but for the sentence that does is left out."""
    question = rng.choice(filled.template.told)
    spans = filled.found(question)
    text = filled.body.text
    borders = [0, *(found.end() for found in SENTENCE_END.finditer(text)), len(text)]
    kept = [
        text[a:b]
        for a, b in zip(borders, borders[1:], strict=False)
        if not any(a < end and start < b for start, end in spans)
    ]
    rest = "".join(kept).strip()
    assert question.answer
    values = [str(filled.bindings.values[name]) for name in question.answer.used]
    if len(rest.split()) < 15 or any(naming.holds(rest, value) for value in values):
        return None
    words, slots = _ask(rng, filled, question)
    own = [passage(rng, _title(rng, filled), rest, [])]
    others = _others(rng, filled, count - 1, held_out)
    return Asked(words, [*own, *_kept_apart(words, slots, own[0].whole, others)])


def _ask(rng: random.Random, filled: Filled, question: Question) -> tuple[str, list[str]]:
    """A wording, and the values of the slots in it."""
    made = filled.ask(rng.choice(question.wordings))
    return made.text, [made.text[piece.start : piece.end] for piece in made.pieces]


def _title(rng: random.Random, filled: Filled) -> str:
    return titled(rng, filled.title, filled.template.kind, bare=not filled.title)


def _chunks(rng: random.Random, filled: Filled, spans: Spans, most: int) -> list[Passage]:
    """The document whole, or the chunk with the answer and some of the others."""
    title, text = _title(rng, filled), filled.body.text
    if most < 2 or len(text.split()) < 70 or rng.random() < 0.5:
        return [passage(rng, title, text, spans)]
    chunks = [(within(spans, a, b), text[a:b]) for a, b in cut(text, rng.randint(40, 90))]
    telling = [chunk for chunk in chunks if chunk[0]][:1]
    if spans and not telling:
        return [passage(rng, title, text, spans)]
    rest = [chunk for chunk in chunks if chunk not in telling]
    if not spans:  # what is not told may not be told by what is left out, either
        return [passage(rng, title, words, []) for _, words in rest[:most]]
    silent = [chunk for chunk in rest if not chunk[0]]
    some = rng.sample(silent, min(len(silent), most - 1))
    return [passage(rng, title, words, tells) for tells, words in telling + some]


def _others(rng: random.Random, filled: Filled, count: int, held_out: bool) -> list[Other]:
    """Passages of other documents, with their templates: alike, of the same writer, or any."""
    templates = side(held_out).documents
    near = [one for one in templates if one.file == filled.template.file]
    found: list[Other] = []
    for _ in range(count):
        roll = rng.random()
        if roll < 0.2:
            found.append(Other(of_relations.distractor(rng, held_out)))
            continue
        template = filled.template
        if roll > 0.45:
            template = rng.choice(near if roll < 0.65 else templates)
        other = template.filled(rng, held_out)
        text = other.body.text
        if len(text.split()) > 60 and rng.random() < 0.5:
            start, end = rng.choice(cut(text, rng.randint(35, 80)))
            text = text[start:end]
        one = passage(rng, _title(rng, other), text, [])
        found.append(Other(one, template is filled.template))
    return found


def _kept_apart(question: str, values: list[str], own: str, others: list[Other]) -> list[Passage]:
    """The others without those that might answer the question too."""
    proper = naming.names(question, values)
    stems = naming.stems(question)
    kept = []
    for other in others:
        text = other.passage.whole
        shared = stems & naming.stems(text)
        named = naming.names_only(set(values) if other.twin else proper, own, [text])
        if named or (not other.twin and len(shared) <= 1 and (stems & naming.stems(own)) - shared):
            kept.append(other.passage)
    return kept
