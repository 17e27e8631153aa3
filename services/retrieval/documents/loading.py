"""A file's bytes to the sections of its text."""

from importlib import import_module
from typing import Protocol, cast

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import Limits, RefusedError
from services.retrieval.documents.kinds import Kind, kind_of

VERSION = 1
"""Of what the loaders make of a file: one more when that changes, so that who asks again has it."""

_LOADERS = {
    Kind.PDF: "pdf",
    Kind.DOCX: "docx",
    Kind.PPTX: "pptx",
    Kind.HTML: "html",
    Kind.CSV: "csv_rows",
    Kind.JSON: "json_values",
    Kind.JSON_LINES: "json_values",
    Kind.MARKDOWN: "markdown",
    Kind.TEXT: "text",
}


class Loader(Protocol):
    """A module of `loaders`: of libraries that are imported with the first document of its kind."""

    def load(self, content: bytes, limits: Limits) -> tuple[list[Section], str]:
        """And what is to be told of it, in words that go on behind its name. Raises RefusedError,
        and what its library raises of a broken file."""


def load(filename: str, content: bytes, limits: Limits) -> tuple[list[Section], str]:
    """Raises RefusedError, and whatever a library raises of a broken file."""
    kind, note = kind_of(filename, content)
    name = f"services.retrieval.documents.loaders.{_LOADERS[kind]}"
    sections, told = cast(Loader, import_module(name)).load(content, limits)
    if not any(section.text.strip() for section in sections):
        raise RefusedError("has no text")
    return sections, "; ".join(filter(None, (note, told)))
