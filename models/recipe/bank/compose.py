"""Passages about a subject, composed of the bank's relations: prose, lists, records, tables."""

import random
import re
from dataclasses import dataclass, field

from models.recipe.bank.noise import noise
from models.recipe.bank.relations import Kind, Relation
from models.recipe.bank.render import Bindings, Rendered, render
from models.recipe.bank.text import Slot, Text

PRONOUNS = {"it": "its", "they": "their", "she": "her", "he": "his", "we": "our"}
# Kinds of values that answer the same question word: to tell one may seem to tell another.
ALIKE = [
    {"person", "man", "woman", "first", "family", "company", "organisation"},
    {"year", "date", "day", "month", "weekday", "time", "duration"},
    {"town", "street", "place", "region", "country", "room"},
    {"count", "number", "percent", "money"},
    {"distance", "height", "area", "weight", "volume", "speed", "temperature"},
    {"phone", "email", "code", "url", "file"},
]
LEADS = (
    "As everyone knows, ", "By the way, ", "According to the file, ", "For the record: ",
    "Note that ", "These days ", "As before, ",
)  # fmt: skip
JOINS = ("; ", ", and ", " – ", ", while ", ", and ", "; ")
OPENERS = re.compile(  # words with which a sentence may begin, that carry no name
    r"(The|It|Its|They|Their|A|An|In|On|At|Since|There|This|For|To|From|If|Until|When|His|Her|He|She)"
)


def alike(one: Slot, other: Slot) -> bool:
    """Whether values of the two slots could answer the same question."""
    if not one.kind or not other.kind:
        return False
    return one.kind == other.kind or any({one.kind, other.kind} <= group for group in ALIKE)


@dataclass
class Subject:
    """Something that passages tell of, with a value for each relation that they tell."""

    kind: Kind
    bindings: Bindings
    names: list[str]  # the ways to name it in full
    again: list[str]  # the ways to refer to it
    facts: dict[str, str] = field(default_factory=dict)  # by the relation's name
    extras: list[Slot] = field(default_factory=list)  # what else its statements tell

    @classmethod
    def drawn(cls, rng: random.Random, kind: Kind, held_out: bool, taken: set[str]) -> "Subject":
        """A new one of a kind."""
        bindings = Bindings(rng, kind.definitions, held_out, taken)
        used = rng.choice(kind.named).used  # names that do not share a word are of different things
        names = [render(text, bindings).text for text in kind.named if text.used == used]
        return cls(kind, bindings, names, [render(text, bindings).text for text in kind.again])

    def value(self, relation: Relation) -> str:
        """What the relation says of it; drawn when first asked for."""
        if relation.name not in self.facts:
            self.facts[relation.name] = self.bindings.within().value(relation.value)
        return self.facts[relation.name]

    def within(self, relation: Relation, rng: random.Random, text: Text) -> Bindings:
        """Bindings in which a text of the relation can be rendered."""
        starts = (
            bool(text.parts) and isinstance(text.parts[0], Slot) and text.parts[0].name[0] == "r"
        )
        plain = [form for form in self.again if form not in PRONOUNS or form == "it"]
        form = rng.choice(self.again if starts or not plain else plain)
        values = {"s": rng.choice(self.names), "v": self.value(relation), "r": form}
        values["r_own"] = PRONOUNS.get(form, form + "'s")
        return self.bindings.within(**values)

    def title(self, rng: random.Random) -> str:
        """Its name as a heading has it."""
        name = re.sub(r"^(?:the|our|my|his|her|your|their|this|a|an) ", "", rng.choice(self.names))
        return name[:1].upper() + name[1:]


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
    made.pieces = [
        type(piece)(names.get(piece.name, piece.name), piece.start, piece.end)
        for piece in made.pieces
    ]
    return made


def _capital(made: Rendered) -> Rendered:
    """With a first letter in upper case, unless that belongs to an address."""
    if (
        made.text[:1].islower()
        and "@" not in made.text.split()[0]
        and "." not in made.text.split()[0]
    ):
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
            _sentence(made, Rendered(noise(rng, subject.bindings.held_out)), " ")
        full = not named or rng.random() < (0.6 if apart else 0.2)
        one = statement(rng, subject, relation, full, number)
        plain = OPENERS.match(one.text) is not None
        if (
            made.text
            and plain
            and not full
            and not apart
            and _ends_plainly(made)
            and rng.random() < 0.15
        ):
            made.text = made.text[:-1]
            _sentence(made, _uncapital(one), rng.choice(JOINS))
        else:
            if not made.text and full and plain and rng.random() < 0.06:
                made.add(rng.choice(LEADS))
                one = _uncapital(one)
            _sentence(made, one, "\n\n" if rng.random() < 0.08 else " ")
        named = True
    if rng.random() < 0.15:
        _sentence(made, Rendered(noise(rng, subject.bindings.held_out)), " ")
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
        made.add(
            (rng.choice((", ", ", ", "; ")) if index else "") + label + rng.choice((" ", ": "))
        )
        made.put(f"v:{number}:{relation.name}", subject.value(relation), False)
    made.add(")" if opened else ".")
    return made


def table(rng: random.Random, subjects: list[Subject], relations: list[Relation]) -> Rendered:
    """A row for each subject, a column for each relation; or for one subject a row for each."""
    made = Rendered()
    if len(subjects) == 1:
        rows: list[list[tuple[str, str]]] = [
            [("", rng.choice(one.labels)), (f"v:0:{one.name}", subjects[0].value(one))]
            for one in relations
        ]
        head = [
            ("", rng.choice(("Item", "", "What", subjects[0].kind.name.capitalize()))),
            ("s:0", subjects[0].title(rng)),
        ]
    else:
        head = [("", rng.choice((subjects[0].kind.name.capitalize(), "Name", "")))]
        head += [("", rng.choice(one.labels)) for one in relations]
        rows = [
            [(f"s:{n}", one.title(rng)), *((f"v:{n}:{r.name}", one.value(r)) for r in relations)]
            for n, one in enumerate(subjects)
        ]
    for index, row in enumerate([head, *rows]):
        made.add("\n| " if index else "| ")
        for place, (name, words) in enumerate(row):
            made.add(" | " if place else "")
            made.put(name, words, False) if name else made.add(words)
        made.add(
            " |" + ("\n" + "| --- " * len(row) + "|" if index == 0 and rng.random() < 0.7 else "")
        )
    return made


def composed(rng: random.Random, subject: Subject, relations: list[Relation]) -> Composed:
    """A text about one subject that tells these relations of it."""
    roll = rng.random()
    if roll < 0.74 or len(relations) < 2:
        body = prose(rng, subject, relations, 0, named=rng.random() < 0.15)
    elif roll < 0.87:
        body = listing(rng, subject, relations, 0)
        if rng.random() < 0.3:
            _sentence(body, Rendered(noise(rng, subject.bindings.held_out)), "\n\n")
    elif roll < 0.93:
        body = line(rng, subject, relations, 0)
    else:
        body = table(rng, [subject], relations)
    return Composed([subject], body)


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


def _uncapital(made: Rendered) -> Rendered:
    made.text = made.text[0].lower() + made.text[1:]
    return made


def _sentence(made: Rendered, one: Rendered, join: str) -> None:
    """Puts a text after what there is."""
    if made.text and not made.text[-1].isspace():
        made.add(join)
    made.append(one)
