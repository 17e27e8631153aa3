"""What an endpoint of the REST API takes and answers, as the document says it."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from services.gateway.api.openapi.answers.common import Error
from services.gateway.api.resources.files import Anchor, Seconds
from services.gateway.api.schema import Body
from services.gateway.stores.files.file_record import PURPOSES


class Form(Body):
    """A multipart form, which is read as it arrives."""


class FileForm(Form):
    file: bytes = Field(
        description="PDF, HTML, .docx, .pptx, CSV, JSON, Markdown, text; for batches .jsonl"
    )
    purpose: Literal[PURPOSES]  # type: ignore[valid-type]
    anchor: Anchor | None = Field(None, alias="expires_after[anchor]")
    seconds: Seconds | None = Field(None, alias="expires_after[seconds]")


class PartForm(Form):
    data: bytes


class Raw(NamedTuple):
    """An answer that is no JSON."""

    media: str


class Operation(NamedTuple):
    tag: str
    summary: str
    answer: Any  # a type of openapi/answers, or Raw
    body: type[Body] | None = None
    example: Mapping[str, Any] = {}  # of the body
    query: type[Body] | None = None
    events: Any = None  # what a stream's events are, where `stream` may ask for one
    lasting: bool = False  # takes an Idempotency-Key (lasting.py)
    resumes: bool = False  # takes a Last-Event-ID
    error: Any = Error
    others: Mapping[int, Any] = {}  # answers of other statuses that are no errors
