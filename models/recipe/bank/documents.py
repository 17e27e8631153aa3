"""The bank's documents: templates of texts, with questions that they answer and do not answer.

The format is described in FORMAT.md beside this file.
"""

import random
import re
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from models.recipe.bank.render import Bindings, Rendered, render, validate
from models.recipe.bank.text import BankError, Slot, Text, definitions, parse, split


@dataclass(frozen=True)
class Question:
    """What may be asked of a document. `answer` is None if the document does not tell."""

    line: int
    wordings: tuple[Text, ...]
    answer: Text | None


@dataclass
class Template:
    """A document to be filled in."""

    file: str
    line: int
    heading: str  # `kind: title` as it stands in the file; some have no title
    kind: str
    title: Text
    body: Text
    questions: list[Question] = field(default_factory=list)

    @property
    def held_out(self) -> bool:
        """Whether it is kept for tests."""
        return zlib.crc32(self.heading.encode()) % 8 == 0

    @property
    def told(self) -> list[Question]:
        return [question for question in self.questions if question.answer]

    @property
    def untold(self) -> list[Question]:
        return [question for question in self.questions if not question.answer]

    @cached_property
    def definitions(self) -> dict[str, Slot]:
        """All slots, those of its questions too."""
        asked = (text for question in self.untold for text in question.wordings)
        return definitions(self.title, self.body, *asked)

    def filled(self, rng: random.Random, held_out: bool) -> "Filled":
        """The document with values drawn from one side of the split."""
        bindings = Bindings(rng, self.definitions, held_out)
        title = render(self.title, bindings).text
        return Filled(self, bindings, title, render(self.body, bindings))


@dataclass
class Filled:
    """A document with its values."""

    template: Template
    bindings: Bindings
    title: str
    body: Rendered

    def ask(self, wording: Text) -> Rendered:
        """A question's words."""
        return render(wording, self.bindings)

    def found(self, question: Question) -> list[tuple[int, int]]:
        """(start, end) of the answer wherever the body gives it; it holds one of its slots.

        Raises BankError if the body does not give it.
        """
        assert question.answer
        wanted = render(question.answer, self.bindings).text
        inside = self.body.stretches(wanted, question.answer.used)
        if not inside:
            raise BankError(f"the answer {wanted!r} does not stand in the text")
        return inside


def read(path: Path) -> list[Template]:
    """The documents of a file. Raises BankError with all that is wrong, a line each."""
    found: list[Template] = []
    wrong: list[str] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("# ")]
    if any(line.strip() for line in lines[: starts[0] if starts else None]):
        wrong.append(f"{path.name}:1: text before the first `# kind: title`")
    for first, after in pairwise([*starts, len(lines)]):
        try:
            found.append(_document(path.name, first + 1, lines[first:after]))
        except BankError as error:
            wrong.append(str(error))
    if wrong:
        raise BankError("\n".join(wrong))
    return found


def _wrong(source: str) -> int:
    """The first line of a text that is wrong by itself; the first, if none is."""
    for number, line in enumerate(source.split("\n")):
        try:
            validate(parse(line))
        except BankError:
            return number
    return 0


def _document(file: str, line: int, lines: list[str]) -> Template:
    """One document from its lines. Raises BankError naming file and line."""

    def at(offset: int, source: str) -> Text:
        try:
            text = parse(source)
            validate(text)
        except BankError as error:
            raise BankError(f"{file}:{line + offset + _wrong(source)}: {error}") from None
        return text

    heading = lines[0][2:].strip()
    kind, *rest = split(heading, ":")
    title = ": ".join(rest)
    if "{" in kind:  # a title that is its own kind
        kind, title = heading[: heading.index("{")].strip(), heading
    asked = next((i for i, s in enumerate(lines) if s.startswith(("? ", "! "))), len(lines))
    for offset, text in enumerate(lines[1:asked], 1):
        if re.match(r"[?!=]\S", text):
            raise BankError(f"{file}:{line + offset}: `{text[0]}` without a space behind it")
    body = "\n".join(text.rstrip() for text in lines[1:asked]).strip("\n")
    made = Template(file, line, heading, kind, at(0, title), at(1, body))
    pending: tuple[int, tuple[Text, ...]] | None = None
    for offset, text in enumerate(lines[asked:], asked):
        mark, words = text[:2].strip(), text[2:].strip()
        if not text.strip():
            continue
        if (mark == "=") is not bool(pending) or mark not in ("?", "=", "!"):
            raise BankError(
                f"{file}:{line + offset}: `=` follows each `?`; expected another line here"
            )
        if mark == "=" and pending:
            made.questions.append(Question(pending[0], pending[1], at(offset, words)))
            pending = None
            continue
        wordings = tuple(at(offset, wording) for wording in split(words, "|"))
        if mark == "?":
            pending = line + offset, wordings
        else:
            made.questions += [Question(line + offset, (wording,), None) for wording in wordings]
    if pending:
        raise BankError(f"{file}:{pending[0]}: no `=` after this question")
    _whole(made)
    return made


def _whole(made: Template) -> None:
    """Raises BankError if a slot is not defined, or an answer not certain to be told."""
    try:
        known = made.definitions
        definitions(made.title, made.body)
    except BankError as error:
        raise BankError(f"{made.file}:{made.line}: {error}") from None
    for question in made.told:
        assert question.answer
        where = f"{made.file}:{question.line}"
        for text in (*question.wordings, question.answer):
            if unknown := sorted(text.used - known.keys()):
                raise BankError(f"{where}: slot {{{unknown[0]}}} is nowhere defined")
        if not question.answer.used:
            raise BankError(f"{where}: the answer holds no slot")
        if missing := sorted(question.answer.used - made.body.certain):
            raise BankError(f"{where}: {{{missing[0]}}} is not told in each of the alternatives")
