"""Documents, and questions of which it is known where their answers stand."""

from pathlib import Path
from typing import NamedTuple

from models.recipe.set_file import documents_of


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
    """A file as `models/recipe/set_file.py` says; what its text does not tell is left out.

    Raises ValueError that names the line that is written otherwise, or of an answer that its text
    does not hold.
    """
    documents, questions = [], []
    for number, told in enumerate(documents_of(path), 1):
        document = Document(f"{path.stem}-{number}", told.title, told.text)
        documents.append(document)
        for asked in told.questions:
            if asked.answer is None:
                continue
            answers = [a for a in asked.answers if holds(document.text, (a,))]
            if not answers:
                raise ValueError(f"{path}:{number}: the text holds no answer to a question of it")
            questions.append(Question(asked.question, document.id, tuple(answers), ""))
    return QuestionSet(path.stem, documents, questions)


def holds(passage: str, told: tuple[str, ...]) -> bool:
    """Whatever its white space and case."""
    flat = _flat(passage)
    return any(_flat(one) in flat for one in told)


def _flat(text: str) -> str:
    return " ".join(text.casefold().split())
