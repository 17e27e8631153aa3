"""Documents, and questions of which it is known where their answers stand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Document(NamedTuple):
    id: str
    title: str
    text: str


class Question(NamedTuple):
    text: str
    document: str  # its id
    told: tuple[str, ...]  # a passage of that document that holds one of these answers it
    sort: str  # of question, for figures by sort; empty: of none


class QuestionSet(NamedTuple):
    name: str
    documents: list[Document]
    questions: list[Question]


def read(path: Path) -> QuestionSet:
    """JSON lines, a document each: title, text, and questions with `answer` as it stands in the
    text, or null where the text does not tell it: those are left out. `also`: other wordings.

    Raises ValueError that names the line of an answer that its text does not hold.
    """
    documents, questions = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        told = json.loads(line)
        document = Document(f"{path.stem}-{number}", told["title"], told["text"])
        documents.append(document)
        for asked in told["questions"]:
            if asked["answer"] is None:
                continue
            answers = [a for a in _wordings(asked) if holds(document.text, (a,))]
            if not answers:
                raise ValueError(f"{path}:{number}: the text holds no answer to a question of it")
            question = Question(asked["question"], document.id, tuple(answers), "")
            questions.append(question)
    return QuestionSet(path.stem, documents, questions)


def holds(passage: str, told: tuple[str, ...]) -> bool:
    """Whatever its white space and case."""
    flat = _flat(passage)
    return any(_flat(one) in flat for one in told)


def _wordings(asked: dict[str, object]) -> Iterator[str]:
    yield str(asked["answer"])
    also = asked.get("also")
    if isinstance(also, list):
        yield from map(str, also)


def _flat(text: str) -> str:
    return " ".join(text.casefold().split())
