"""Passages about a subject, composed of the bank's relations: prose, lists, records, tables."""

import random
import re
from dataclasses import dataclass, replace

from models.recipe.bank.noise import noise
from models.recipe.bank.relations import Relation
from models.recipe.bank.render import Rendered, render
from models.recipe.bank.subjects import Subject, alike
from models.recipe.bank.text import Slot, Text

LEADS = (
    "As everyone knows, ", "By the way, ", "According to the file, ", "For the record: ",
    "Note that ", "These days ", "As before, ",
)  # fmt: skip
JOINS = ("; ", ", and ", " – ", ", while ", ", and ", "; ")
OPENERS = re.compile(  # words with which a sentence may begin, that carry no name
    r"(The|It|Its|They|Their|A|An|In|On|At|Since|There|This|For|To|From|If|Until|When|His|Her|He|She)\b"
)


@dataclass
class Composed:
    """A text about subjects; its pieces are named `v:SUBJECT:RELATION` and `s:SUBJECT`."""

    subjects: list[Subject]
    body: Rendered

    @property
    def nameless(self) -> bool:
        """Whether it needs a title to say what it is about."""
        return not any(piece.name.startswith("s:") for piece in self.body.pieces)


def statement(
    rng: random.Random, subject: Subject, relation: Relation, full: bool, number: int
) -> Rendered:
    """One sentence that tells it, and does not tell what it should not."""
    told = [one.value for one in subject.kind.relations if one is not relation]
    options = relation.full if full else relation.short
    safe = [text for text in options if not any(alike(s, o) for s in _inline(text) for o in told)]
    text = rng.choice(safe or options)
    subject.extras += _inline(text)
    made = render(text, subject.within(relation, rng, text))
    return _capital(_named(made, relation, number))


def _inline(text: Text) -> list[Slot]:
    """The slots of a statement that say something beside the value."""
    return [slot for slot in text.slots() if not slot.name or slot.kind]


def _named(made: Rendered, relation: Relation, number: int) -> Rendered:
    names = {"v": f"v:{number}:{relation.name}", "s": f"s:{number}", "r": f"r:{number}"}
    made.pieces = [replace(piece, name=names.get(piece.name, piece.name)) for piece in made.pieces]
    return made


def _capital(made: Rendered) -> Rendered:
    """With a first letter in upper case, unless that belongs to an address."""
    first = made.text.split()[0]
    if first[0].islower() and "@" not in first and "." not in first:
        made.text = made.text[0].upper() + made.text[1:]
    return made


def prose(
    rng: random.Random,
    subject: Subject,
    relations: list[Relation],
    number: int,
    named: bool = False,
) -> Rendered:
    """Sentences: one that names the subject, unless it is `named`, then some that refer to it."""
    made = Rendered()
    for relation in relations:
        apart = rng.random() < 0.13
        if apart:
            _beside(rng, made, subject)
        full = not named or rng.random() < (0.6 if apart else 0.2)
        one = statement(rng, subject, relation, full, number)
        named = True
        joins = not (full or apart) and _ends_plainly(made) and rng.random() < 0.15
        leads = full and not made.text and rng.random() < 0.06
        if OPENERS.match(one.text) and (joins or leads):
            if joins:
                made.text = made.text[:-1]
            made.add(rng.choice(JOINS if joins else LEADS))
            one.text = one.text[0].lower() + one.text[1:]
        _sentence(made, one, "\n\n" if rng.random() < 0.08 else " ")
    if rng.random() < 0.15:
        _beside(rng, made, subject)
    return made


def listing(
    rng: random.Random, subject: Subject, relations: list[Relation], number: int
) -> Rendered:
    """Lines of a label and a value, below the subject's name or a sentence."""
    made = Rendered()
    bullet = rng.choice(("- ", "- ", "", "", "* ", "• "))
    mark = rng.choice((": ", ": ", ": ", " – ", " = ", ":\t"))
    if rng.random() < 0.7:
        name = subject.title(rng)
        made.put(f"s:{number}", name)
        made.add(rng.choice(("\n", ":\n", "\n\n")))
    for index, relation in enumerate(relations):
        label = rng.choice(relation.labels)
        made.add(("\n" if index else "") + bullet + label + mark)
        made.put(f"v:{number}:{relation.name}", subject.value(relation), False)
    return made


def line(rng: random.Random, subject: Subject, relations: list[Relation], number: int) -> Rendered:
    """All in one line: `Bristol office: manager Ann Lee, phone 1234.`"""
    made = Rendered()
    made.put(f"s:{number}", subject.title(rng))
    made.add(rng.choice((": ", " – ", ". ", " (")))
    opened = made.text.endswith("(")
    for index, relation in enumerate(relations):
        label = rng.choice(relation.labels)
        label = label if label[1:2].isupper() else label[:1].lower() + label[1:]
        made.add(rng.choice((", ", ", ", "; ")) if index else "")
        made.add(label + rng.choice((" ", ": ")))
        made.put(f"v:{number}:{relation.name}", subject.value(relation), False)
    made.add(")" if opened else ".")
    return made


def table(rng: random.Random, subjects: list[Subject], relations: list[Relation]) -> Rendered:
    """A row for each subject, a column for each relation; or for one subject a row for each."""
    kind = subjects[0].kind.name.capitalize()
    names = [(f"s:{n}", one.title(rng)) for n, one in enumerate(subjects)]
    columns = [names] + [
        [(f"v:{n}:{relation.name}", one.value(relation)) for n, one in enumerate(subjects)]
        for relation in relations
    ]
    labels = [rng.choice((kind, "Name", "")), *(rng.choice(one.labels) for one in relations)]
    rows = [[("", label), *column] for label, column in zip(labels, columns, strict=True)]
    if len(subjects) > 1:
        rows = [list(row) for row in zip(*rows, strict=True)]
    made = Rendered()
    ruled = rng.random() < 0.7
    for index, row in enumerate(rows):
        made.add("| " if index == 0 else "\n| ")
        for place, (name, words) in enumerate(row):
            made.add(" | " if place else "")
            made.put(name, words, False)
        made.add(" |")
        if index == 0 and ruled:
            made.add("\n|" + " --- |" * len(row))
    return made


def composed(rng: random.Random, subject: Subject, relations: list[Relation]) -> Composed:
    """A text about one subject that tells these relations of it."""
    roll = rng.random()
    if roll < 0.74 or len(relations) < 2:
        body = prose(rng, subject, relations, 0, named=rng.random() < 0.15)
    elif roll < 0.87:
        body = listing(rng, subject, relations, 0)
        if rng.random() < 0.3:
            _beside(rng, body, subject, "\n\n")
    elif roll < 0.93:
        body = line(rng, subject, relations, 0)
    else:
        body = table(rng, [subject], relations)
    return Composed([subject], body)


def recorded(rng: random.Random, subject: Subject, relations: list[Relation]) -> Composed:
    """A text about one subject in which each value stands behind a label."""
    shape = rng.choice((listing, listing, line))
    return Composed([subject], shape(rng, subject, relations, 0))


def together(rng: random.Random, subjects: list[Subject], relations: list[Relation]) -> Composed:
    """One text that tells the same of several subjects of one kind."""
    if rng.random() < 0.5:
        return Composed(subjects, table(rng, subjects, relations))
    body = Rendered()
    shape = prose if rng.random() < 0.6 else line
    for number, subject in enumerate(subjects):
        some = rng.sample(relations, len(relations))
        _sentence(body, shape(rng, subject, some, number), rng.choice((" ", "\n", "\n\n")))
    return Composed(subjects, body)


def _ends_plainly(made: Rendered) -> bool:
    """Whether its last letter is a full stop that belongs to no value."""
    return made.text.endswith(".") and made.pieces[-1].end < len(made.text)


def _beside(rng: random.Random, made: Rendered, subject: Subject, join: str = " ") -> None:
    """Adds a sentence beside the point."""
    _sentence(made, Rendered(noise(rng, subject.bindings.held_out)), join)


def _sentence(made: Rendered, one: Rendered, join: str) -> None:
    """Puts a text after what there is."""
    if made.text and not made.text[-1].isspace():
        made.add(join)
    made.append(one)
