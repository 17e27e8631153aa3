"""What cutting a document makes, and what bounds it: all that the service itself needs of it."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Chunk:
    """text[start:end] of the document, in characters; `title` is "Document › Heading › …"."""

    title: str
    text: str
    start: int
    end: int
    tokens: int


class CutOptions(NamedTuple):
    """What is the same for all documents; see RetrievalSettings."""

    folder: str  # of the embedding model
    chunk_tokens: int
    overlap_tokens: int
    max_chunks: int
    cpu_s: int  # a document
    memory_bytes: int
