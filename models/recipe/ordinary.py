"""Sets of short documents and questions by hands that had no part in the bank.

Each question is asked over its document and three others of the set (`set_file.py`), or over what
the platform's retrieval brings for it.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from models.recipe.conversation import Conversation, Document, Span, assistant, user
from models.recipe.set_file import SetDocument, SetQuestion, documents_of
from models.recipe.shown import Shelf
from models.recipe.skills.passages import NOT_TOLD
from models.recipe.tokenizer import END

OTHERS = 3
LONGEST = 64  # tokens of an answer
SEED = 5


class Writes(Protocol):
    """A checkpoint that answers."""

    tokenizer: Any

    def prompt(self, case: Conversation) -> list[int]: ...

    def write(self, prompt: list[int], longest: int) -> list[int]: ...


@dataclass
class Case:
    """A question of a set, put to some passages."""

    conversation: Conversation
    answers: list[str]  # the right one first; none: not told
    numbers: set[int]  # of the passages that tell; empty where none was found that does


def among_others(path: Path) -> list[Case]:
    """All questions of a file, each over its document and three others, all of them whole. Raises
    ValueError if there are no three others.
    """
    documents = documents_of(path)
    if len(documents) <= OTHERS:
        raise ValueError(f"{path} has {len(documents)} documents, none with {OTHERS} others")
    found = []
    for at, document in enumerate(documents):
        for number, asked in enumerate(document.questions):
            rng = random.Random(f"{SEED}/{at}/{number}")
            others = rng.sample([d for d in documents if d is not document], OTHERS)
            place = rng.randint(0, OTHERS)
            shown = [*others[:place], document, *others[place:]]
            found.append(_case(asked, list(map(_passage, shown)), [d is document for d in shown]))
    return found


def brought(path: Path) -> list[Case]:
    """All questions of a file, each over what retrieval brings for it from all its documents."""
    documents = documents_of(path)
    shelf = Shelf.of(list(map(_passage, documents)))
    found = []
    for at, document in enumerate(documents):
        for asked in document.questions:
            shown = shelf.brings(asked.question)
            found.append(_case(asked, [one for _, one in shown], [of == at for of, _ in shown]))
    return found


def _passage(document: SetDocument) -> Document:
    return {"title": document.title, "text": document.text}


def _case(asked: SetQuestion, passages: list[Document], own: list[bool]) -> Case:
    """`own`: which passages are of the question's document."""
    answers = asked.answers
    spans = [
        Span(number, start, start + len(answers[0]))
        for number, one in enumerate(passages)
        if answers and own[number] and (start := one["text"].find(answers[0])) >= 0
    ]
    right = f"{answers[0]} [{spans[0].document + 1}]." if spans else NOT_TOLD
    made = Conversation(
        "passages" if spans else "not_told",
        [user(asked.question), assistant(right)],
        documents=passages,
        tells=spans,
    )
    return Case(made, answers, {span.document + 1 for span in spans})


@dataclass
class Score:
    """How many answers of a set are right."""

    told: int = 0  # questions that a passage's document answers; of their answers:
    exact: int = 0  # the right words and number
    value: int = 0  # the right words
    cited: int = 0  # the right number
    denied: int = 0
    untold: int = 0  # questions that none answers
    silent: int = 0  # of these answers, those that say so
    ended: int = 0  # answers that ended by themselves

    def count(self, said: str, answers: list[str], numbers: set[int], ended: bool) -> bool:
        """Takes an answer; whether it is right. `answers` and `numbers` are those of a `Case`."""
        self.ended += ended
        if not answers:
            self.untold += 1
            self.silent += said == NOT_TOLD
            return said == NOT_TOLD
        words, _, number = said.removesuffix("].").rpartition(" [")
        same = _plain(words) in map(_plain, answers)
        there = number in map(str, numbers)
        right = same and there and said.endswith("].")
        self.told += 1
        self.exact += right
        self.value += same
        self.cited += there
        self.denied += said == NOT_TOLD
        return right

    def lines(self) -> list[str]:
        def share(some: int, of: int) -> str:
            return f"{100 * some / max(1, of):.1f} %"

        return [
            f"told ({self.told}): {share(self.exact, self.told)} right with the right number, "
            f"{share(self.value, self.told)} right whatever the number, "
            f"{share(self.cited, self.told)} with the right number, "
            f"{share(self.denied, self.told)} denied",
            f"not told ({self.untold}): {share(self.silent, self.untold)} right",
            f"ended by itself: {share(self.ended, self.told + self.untold)}",
        ]


def measure(writer: Writes, some: list[Case], show: bool = False) -> str:
    """What the model says to a set's questions, in a few lines; `show` adds its wrong answers."""
    score, lines = Score(), list[str]()
    for case in some:
        made = writer.write(writer.prompt(case.conversation), LONGEST)
        said = writer.tokenizer.decode(made).strip()
        right = score.count(said, case.answers, case.numbers, made[-1] == END)
        if show and not right:
            asked = case.conversation.messages[0]["content"]
            lines.append(
                f"{asked} = {' / '.join(case.answers) or '-'} {sorted(case.numbers)}: {said}"
            )
    return "\n".join(lines + score.lines())


def _plain(text: str) -> str:
    """The words alone, as two ways to write the same answer share them."""
    first, *rest = text.casefold().strip(" .,;:!?\"'").split() or [""]
    return " ".join(rest if rest and first in ("the", "a", "an") else [first, *rest])
