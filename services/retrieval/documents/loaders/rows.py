"""Rows of a table, or records: a line for each, in which each value stands behind its name."""

from collections.abc import Iterable

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import too_large


class Rows:
    """`add` raises RefusedError for more characters than a document may have."""

    def __init__(self, max_chars: int) -> None:
        self._left = self._max = max_chars
        self._lines: list[str] = []
        self._first = self._next = 0
        self._done: list[Section] = []

    def add(self, number: int, values: Iterable[tuple[str, str]]) -> None:
        """Numbers rise. One that has no values is passed over, and what follows is a section of its
        own: in each, line after line is row after row."""
        line = "; ".join(f"{name}: {text}" for name, text in _told(values))
        self._left -= len(line) + 1
        if self._left < 0:
            raise too_large(f"has more than {self._max:,} characters of text, the limit")
        if not line:
            return
        if number != self._next:
            self._close()
            self._first = number
        self._lines.append(line)
        self._next = number + 1

    def sections(self) -> list[Section]:
        self._close()
        return self._done

    def _close(self) -> None:
        if self._lines:
            self._done.append(Section(text="\n".join(self._lines), row=self._first))
        self._lines = []


def _told(values: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    for name, value in values:
        if text := " ".join(value.split()):
            yield name, text
