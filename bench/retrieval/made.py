"""A set made up here: the same documents and 2,000 questions from the same seed, on any machine.

Subjects of ten kinds share streets, makers, surnames and near-alike codes, and each relation of a
subject is told once, in one of several ways, in one of several kinds of document: a sheet about the
subject (which names it in its title and then says "it"), a survey of many subjects (with headings
or without), a table, a letter about this and that, a firm's long handbook. Around them stand what
was so in the past, of the same subject and relation, and sentences that share words with questions
and answer none. Questions are worded unlike the statements, or are keywords, or ask for the subject
by a name, a number, a code: words alone do not find the first, meaning alone not the last.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from bench.retrieval.kinds import Kind, Relation, kinds
from bench.retrieval.sets import Document, Question, QuestionSet
from bench.retrieval.values import value

QUESTIONS = 2_000
SEED = 16
_SUBJECTS = {"fault": 120, "handbook": 24}
_SUBJECTS_ELSE = 60
_CODED = ("machine", "service", "contract", "fault")
_UNIQUE = ("person", "phone", "code", "variable")  # of two subjects never the same
_PAST = 0.6  # of the facts, told of the past too
_IN_LETTERS = 0.12
_IN_TABLES = 0.3  # of a kind's subjects, with one relation of theirs


@dataclass
class _Subject:
    kind: Kind
    names: list[str]


@dataclass
class _Fact:
    subject: _Subject
    relation: Relation
    value: str
    told: str = ""  # the sentence or row, once a document has it
    document: str = ""


def made(seed: int = SEED, questions: int = QUESTIONS) -> QuestionSet:
    writer = _Writer(Random(seed))
    writer.write()
    return QuestionSet("made", writer.documents, list(writer.ask(questions)))


class _Writer:
    def __init__(self, draw: Random) -> None:
        self._draw = draw
        self._drawn: set[str] = set()
        self._facts: list[_Fact] = []
        self.documents: list[Document] = []

    # ---- documents ----------------------------------------------------------------------------

    def write(self) -> None:
        letters: list[_Fact] = []
        for kind in kinds():
            facts = [self._facts_of(subject) for subject in self._subjects(kind)]
            self._facts += (fact for own in facts for fact in own)
            if kind.name != "handbook":
                self._tables(kind, facts)
                letters += self._set_aside(facts)
            self._rest(kind, facts)
        self._letters(letters)
        self._histories()

    def _subjects(self, kind: Kind) -> list[_Subject]:
        found: dict[str, _Subject] = {}
        while len(found) < _SUBJECTS.get(kind.name, _SUBJECTS_ELSE):
            slots: dict[str, str] = {}
            names = [self._filled(form, slots) for form in kind.named]
            found.setdefault(names[0], _Subject(kind, names))
        return list(found.values())

    def _facts_of(self, subject: _Subject) -> list[_Fact]:
        return [
            _Fact(subject, relation, self._value(relation)) for relation in subject.kind.relations
        ]

    def _tables(self, kind: Kind, facts: list[list[_Fact]]) -> None:
        """Of one relation, for some of the subjects; what is told here is told nowhere else."""
        if kind.name == "fault":
            return
        number = self._draw.randrange(len(kind.relations))
        some = self._draw.sample(facts, round(_IN_TABLES * len(facts)))
        heading = _without_subject(kind.relations[number].keywords[0])
        rows = [f"| {kind.name} | {heading} |", "| --- | --- |"]
        document = self._id()
        for own in some:
            fact = own.pop(number)
            row = f"| {self._draw.choice(fact.subject.names)} | {fact.value} |"
            fact.told, fact.document = row, document
            rows.append(row)
        self._keep(document, f"{kind.name.capitalize()}: {heading}", "\n".join(rows))

    def _set_aside(self, facts: list[list[_Fact]]) -> list[_Fact]:
        found = []
        for own in facts:
            for fact in list(own):
                if self._draw.random() < _IN_LETTERS:
                    own.remove(fact)
                    found.append(fact)
        return found

    def _rest(self, kind: Kind, facts: list[list[_Fact]]) -> None:
        """In a sheet for each subject, or in surveys of several."""
        if kind.name == "handbook":
            sheets, surveyed = facts, []
        elif kind.name == "fault":
            sheets, surveyed = [], facts
        else:
            sheets, surveyed = facts[: len(facts) // 2], facts[len(facts) // 2 :]
        for own in sheets:
            if own:
                self._sheet(own)
        while surveyed:
            size = self._draw.randint(3, 24)
            self._survey([own for own in surveyed[:size] if own], self._draw.random() < 0.5)
            surveyed = surveyed[size:]

    def _sheet(self, facts: list[_Fact]) -> None:
        """About one subject; a handbook is a long one."""
        subject, document = facts[0].subject, self._id()
        asides = 2 if subject.kind.name == "handbook" else self._draw.randint(0, 2)
        sentences = [self._aside(subject, subject.names[0])]
        for fact in self._draw.sample(facts, len(facts)):
            name = self._draw.choice([subject.kind.again, subject.names[0]])
            sentences.append(self._tell(fact, name, document))
            sentences += (self._aside(subject, subject.kind.again) for _ in range(asides))
        self._keep(document, subject.names[0], self._paragraphs(sentences))

    def _survey(self, facts: list[list[_Fact]], headed: bool) -> None:
        document, parts = self._id(), []
        for own in facts:
            subject = own[0].subject
            name = self._draw.choice(subject.names)
            sentences = [
                self._tell(fact, subject.kind.again if headed and number else name, document)
                for number, fact in enumerate(self._draw.sample(own, len(own)))
            ]
            sentences.append(self._aside(subject, name))
            parts.append((f"## {_capital(name)}\n" if headed else "") + " ".join(sentences))
        if parts:
            kind = facts[0][0].subject.kind.name
            title = self._draw.choice(["Notes on every {}", "{}: an overview", "What to know: {}"])
            self._keep(document, _capital(title.format(kind)), "\n\n".join(parts))

    def _letters(self, facts: list[_Fact]) -> None:
        self._draw.shuffle(facts)
        while facts:
            size, document, sentences = self._draw.randint(2, 8), self._id(), []
            for fact in facts[:size]:
                name = self._draw.choice(fact.subject.names)
                sentences.append(self._tell(fact, name, document))
                other = self._draw.choice(self._facts).subject
                sentences.append(self._aside(other, other.names[-1]))
            title = f"Letter of {self._drawn_value('weekday')}, {self._drawn_value('month')}"
            self._keep(document, title, self._paragraphs(sentences))
            facts = facts[size:]

    def _histories(self) -> None:
        """What was so once, of the same subjects and relations."""
        sentences = [
            self._sentence(fact, self._draw.choice(fact.relation.past), past=True)
            for fact in self._facts
            if fact.relation.past and self._draw.random() < _PAST
        ]
        self._draw.shuffle(sentences)
        while sentences:
            size = self._draw.randint(4, 40)
            title = f"From the chronicle, {self._drawn_value('year')}"
            self._keep(self._id(), title, self._paragraphs(sentences[:size]))
            sentences = sentences[size:]

    def _tell(self, fact: _Fact, name: str, document: str) -> str:
        template = self._draw.choice(fact.relation.statements)
        fact.told, fact.document = _put(template, name, fact.value), document
        return fact.told

    def _sentence(self, fact: _Fact, template: str, past: bool) -> str:
        then = self._value(fact.relation)
        name = self._draw.choice(fact.subject.names)
        return _put(template, name, then, self._drawn_value("year"))

    def _aside(self, subject: _Subject, name: str) -> str:
        return _put(self._draw.choice(subject.kind.asides), name)

    def _paragraphs(self, sentences: list[str]) -> str:
        parts, rest = [], sentences
        while rest:
            size = self._draw.randint(2, 5)
            parts.append(" ".join(rest[:size]))
            rest = rest[size:]
        return "\n\n".join(parts)

    def _id(self) -> str:
        return f"made-{len(self.documents)}"

    def _keep(self, id: str, title: str, text: str) -> None:
        self.documents.append(Document(id, title, text))

    # ---- questions ----------------------------------------------------------------------------

    def ask(self, count: int) -> Iterator[Question]:
        """Each of another fact."""
        for fact in self._draw.sample(self._facts, count):
            sort, template = self._wording(fact)
            text = _put(template, self._draw.choice(fact.subject.names), fact.value)
            yield Question(text, fact.document, (fact.told,), sort)

    def _wording(self, fact: _Fact) -> tuple[str, str]:
        relation, kind = fact.relation, fact.subject.kind.name
        form = self._draw.choices(["questions", "keywords", "reversed"], [6, 2, 2])[0]
        if form == "reversed" and not relation.reversed:
            form = "questions"
        sort = {"questions": "words", "keywords": "keywords", "reversed": "names"}[form]
        if kind == "handbook" or kind in _CODED:
            sort = "handbooks" if kind == "handbook" else "codes"
        return sort, self._draw.choice(getattr(relation, form))

    # ---- values -------------------------------------------------------------------------------

    def _value(self, relation: Relation) -> str:
        while True:
            drawn = value(relation.value, self._draw)
            if relation.value not in _UNIQUE:
                return drawn
            if drawn not in self._drawn:
                self._drawn.add(drawn)
                return drawn

    def _drawn_value(self, kind: str) -> str:
        return value(kind, self._draw)

    def _filled(self, form: str, slots: dict[str, str]) -> str:
        for kind in re.findall(r"{(\w+)}", form):
            slots.setdefault(kind, value(kind, self._draw))
        return form.format(**slots)


def _put(template: str, subject: str, its: str = "", year: str = "") -> str:
    """A template with its slots filled, and a capital at the beginning."""
    return _capital(template.format(s=subject, v=its, y=year))


def _without_subject(keywords: str) -> str:
    return " ".join(keywords.replace("{s}", "").split())


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
