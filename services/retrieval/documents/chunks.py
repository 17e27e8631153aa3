"""What cutting a document makes, and what bounds it: all that the service itself needs of it."""

from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Pages or rows, from 1 on, both included."""

    first: int
    last: int


@dataclass(frozen=True)
class Chunk:
    """text[lead:] is document[start:end], in characters; before that stands the header of the
    table that it is of. `title` is "Document › Heading › …"."""

    title: str
    text: str
    start: int
    end: int
    tokens: int
    lead: int = 0
    pages: Span | None = None
    rows: Span | None = None


def passage(text: str, start: int, end: int, lead: tuple[int, int] | None) -> str:
    """A chunk's text, of its section's. A page's end is a line's end in it."""
    header = text[slice(*lead)] if lead else ""
    return (header + text[start:end]).replace("\f", "\n")


class Limits(NamedTuple):
    """Of one document; see RetrievalSettings."""

    chars: int  # of its text
    pages: int
    unpacked_bytes: int  # of an archive's contents


class ProcessOptions(NamedTuple):
    """What is the same for all documents; see RetrievalSettings."""

    folder: str  # of the embedding model
    max_chunks: int
    cpu_s: int  # to read a document, and again to cut it
    memory_bytes: int
    limits: Limits


class RefusedError(Exception):
    """A document is not taken. `words` go on behind its name."""

    def __init__(self, words: str, reason: str = "invalid_file") -> None:
        super().__init__(words)
        self.words = words
        self.reason = reason


def too_large(words: str) -> RefusedError:
    return RefusedError(words, "document_too_large")
