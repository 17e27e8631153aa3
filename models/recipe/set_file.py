"""Sets of documents and questions in a file: a line of JSON is a document.

It has `title`, `text` and `questions`; these have `question`, `answer` and, some of them, `also`.
`answer` stands in the text, `also` are other ways to say it; it is null for what is not told.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Wording = Annotated[str, Field(pattern=r"\S")]


class SetQuestion(BaseModel):
    model_config = ConfigDict(strict=True)

    question: Wording
    answer: Wording | None
    also: list[Wording] = []

    @property
    def answers(self) -> list[str]:
        """The right one first; none: not told."""
        return [] if self.answer is None else [self.answer, *self.also]


class SetDocument(BaseModel):
    model_config = ConfigDict(strict=True)

    title: str
    text: str
    questions: list[SetQuestion]


def documents_of(path: Path) -> list[SetDocument]:
    """A set's, at least one. Raises ValueError, which names the line and what of it is wrong."""
    lines = path.read_bytes().splitlines()
    if not lines:
        raise ValueError(f"{path} holds no document")
    return [_document(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _document(line: bytes, where: str) -> SetDocument:
    try:
        return SetDocument.model_validate_json(line)
    except ValidationError as why:
        first = why.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {field or 'the line'}: {first['msg']}") from None
