"""A document as a loader finds it, piece by piece, and the sections that come of it.

Headings, tables and lists are written as Markdown has them, whatever the file was: so they read
alike in every passage.
"""

from collections.abc import Iterable, Sequence

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import too_large
from services.retrieval.documents.sections import names, short


class Draft:
    """Methods raise RefusedError for a document with more characters than one may have."""

    def __init__(self, max_chars: int) -> None:
        self._left = self._max = max_chars
        self._done: list[Section] = []
        self._path: list[tuple[int, str]] = []
        self._parts: list[str] = []
        self._has_body = self._in_list = False
        self._begins = self._page = 0

    def heading(self, level: int, text: str) -> None:
        """Opens a section, unless the one before has nothing but headings."""
        text = short(text)
        if not text:
            return
        self._end_list()
        if self._has_body:
            self._close()
        self._path = [(above, name) for above, name in self._path if above < level]
        self._path.append((level, text))
        self._add(f"{'#' * min(max(level, 1), 6)} {text}\n\n")

    def paragraph(self, text: str) -> None:
        if text := text.strip():
            self._end_list()
            self._body(text + "\n\n")

    def item(self, text: str) -> None:
        """Of a list."""
        if text := " ".join(text.split()):
            self._body(f"- {text}\n")
            self._in_list = True

    def table(self, rows: Iterable[Sequence[str]]) -> None:
        """The first row is its header."""
        self._end_list()
        for number, row in enumerate(rows):
            cells = [_cell(cell) for cell in row]
            self._body(f"| {' | '.join(cells)} |\n")
            if not number:
                self._body(f"|{' --- |' * len(cells)}\n")
        self._body("\n")

    def flow(self, text: str) -> None:
        """As it is: a paragraph may go on in what comes next."""
        self._body(text, is_body=bool(text.strip()))

    def turn(self, page: int) -> None:
        """What follows is on this page, which is none before the last."""
        if self._parts:
            self._add("\f" * (page - self._page))
        else:
            self._begins = page
        self._page = page

    def close(self) -> None:
        """Ends a section here, though no heading follows."""
        self._close()
        self._path = []

    def sections(self) -> list[Section]:
        self._close()
        return self._done

    def _end_list(self) -> None:
        if self._in_list:
            self._add("\n")
            self._in_list = False

    def _body(self, text: str, *, is_body: bool = True) -> None:
        self._has_body = self._has_body or is_body
        self._add(text)

    def _add(self, text: str) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise too_large(f"has more than {self._max:,} characters of text, the limit")
        self._parts.append(text)

    def _close(self) -> None:
        text = "".join(self._parts)
        if text.strip():
            self._done.append(Section(headings=names(self._path), text=text, page=self._begins))
        self._parts, self._has_body, self._begins = [], False, self._page


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
