"""Cuts a document into chunks that can be embedded and quoted on their own.

Borders fall, in this order of preference, between sections (always), between paragraphs,
between sentences and list items, in an over-long sentence between lines or words, and only in an
over-long word inside it. Where each line is a row, they fall between rows. Chunks of one section
overlap by whole sentences, so that an answer across a border is still found in one piece; one that
begins inside a Markdown table has the table's header before it, if there is room.

What must hold for the chunks of any section:
- each is a slice of it: section.text[start:end], besides its table's header;
- every character that is not white space lies in at least one of them;
- none is larger than the limit, starts rise, and no chunk lies within another.

The time is in proportion to the text, whatever stands in it: no pattern here can start anew
within what it has read already.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tokenizers import Encoding

from protos.retrieval_pb2 import Section
from services.common.text.titles import titled
from services.retrieval.documents.chunks import Span

# A token stands for about 4 characters; text that is far denser (one unknown word of 10,000
# characters is one token) counts by its characters, so that no chunk is huge.
_CHARS_PER_TOKEN = 8

_TOKENIZED_AT_ONCE = 50_000  # characters; an encoding takes some 500 bytes a token

_PARAGRAPH_END = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE_END = re.compile(
    r"[.!?…][\"')\]»”’]*\s+|[。！？]\s*"
    r"|\n(?=[ \t]*(?:[-*+|>]|\d+[.)])[ \t])"  # an item of a list, a row, a quoted line
)


_LINE_END = re.compile(r"\n\s*")
_TABLE = re.compile(r"^(\|[^\n]*\n\|[ :]*-[-:| ]*\n)(?:\|[^\n]*\n?)+", re.M)


class Slice(NamedTuple):
    start: int
    end: int


class Cut(NamedTuple):
    """A chunk as a slice of a section, in characters."""

    title: str
    section: int
    start: int
    end: int
    tokens: int
    lead: Slice | None  # its table's header, which stands before it
    pages: Span | None
    rows: Span | None


class _Piece(NamedTuple):
    """A sentence, or part of a long one, or a row; pieces tile their section."""

    start: int
    end: int
    opens_paragraph: bool


class _Ruler:
    """Measures slices of a text by the tokens that start in them."""

    def __init__(self, text: str, encode: Callable[[str], Encoding]) -> None:
        self._starts = array("I")
        for start, end in _stretches(text):
            offsets = encode(text[start:end]).offsets
            self._starts.extend(start + offset for offset, _ in offsets)

    def tokens(self, start: int, end: int) -> int:
        return bisect_left(self._starts, end) - bisect_left(self._starts, start)

    def size(self, start: int, end: int) -> int:
        """In tokens, or in characters where these weigh more."""
        return max(self.tokens(start, end), -(-(end - start) // _CHARS_PER_TOKEN))

    def farthest(self, start: int, limit: int) -> int:
        """The largest end with size(start, end) <= limit, at a token's border; past `start`, even
        where one character makes more tokens than that.
        """
        end = start + limit * _CHARS_PER_TOKEN
        after = bisect_left(self._starts, start) + limit
        if after < len(self._starts):
            end = min(end, self._starts[after])
        return max(end, start + 1)


class _Section:
    """One that is being cut."""

    def __init__(self, section: Section, encode: Callable[[str], Encoding]) -> None:
        self.text = text = section.text
        self.ruler = _Ruler(text, encode)
        self.in_rows = bool(section.row)
        self._first_page, self._first_row = section.page, section.row
        self._turns = array("I", (m.start() for m in re.finditer("\f", text)))
        self._lines = array("I", (m.start() for m in re.finditer("\n", text)))
        tables = list(_TABLE.finditer(text))
        self._bodies = array("I", (table.end(1) for table in tables))
        self._tables = [(Slice(*table.span(1)), table.end()) for table in tables]

    def pages(self, start: int, end: int) -> Span | None:
        return _span(self._first_page, self._turns, start, end)

    def rows(self, start: int, end: int) -> Span | None:
        return _span(self._first_row, self._lines, start, end)

    def lead(self, start: int, end: int, limit: int) -> Slice | None:
        """The header of the table that `start` is in the body of, if it has room before the text
        until `end`."""
        number = bisect_right(self._bodies, start) - 1
        if number < 0 or start >= self._tables[number][1]:
            return None
        header = self._tables[number][0]
        fits = self.ruler.size(*header) + self.ruler.size(start, end) <= limit
        return header if fits else None


def _span(first: int, borders: "array[int]", start: int, end: int) -> Span | None:
    if not first:
        return None
    return Span(first + bisect_left(borders, start), first + bisect_left(borders, end - 1))


def chunk(
    sections: Iterable[Section],
    encode: Callable[[str], Encoding],
    title: str,
    limit: int,
    overlap: int,
) -> Iterator[Cut]:
    """`encode`: without special tokens. `limit`, `overlap`: tokens a chunk.

    Raises ValueError unless 0 <= overlap < limit.
    """
    if not 0 <= overlap < limit:
        raise ValueError(f"overlap {overlap} must be below the chunk size {limit}")
    for number, section in enumerate(sections):
        one = _Section(section, encode)
        full_title = titled(title, section.headings)
        pieces = list(_pieces(one, limit))
        for first, last, lead in _pack(pieces, one, limit, overlap):
            a, b = _strip(one.text, first, last)
            if a < b:
                tokens = one.ruler.tokens(a, b) + (one.ruler.tokens(*lead) if lead else 0)
                yield Cut(full_title, number, a, b, tokens, lead, one.pages(a, b), one.rows(a, b))


def _stretches(text: str) -> Iterator[tuple[int, int]]:
    """Tiles the text so that each can be tokenized on its own, with borders between words."""
    start = 0
    while start < len(text):
        end = min(start + _TOKENIZED_AT_ONCE, len(text))
        if end < len(text):
            end = _word_border(text, start, end)
        yield start, end
        start = end


def _pieces(section: _Section, limit: int) -> Iterator[_Piece]:
    text, ruler = section.text, section.ruler
    paragraph, sentence = _PARAGRAPH_END, _SENTENCE_END
    if section.in_rows:
        paragraph = sentence = _LINE_END
    for first, last in _tiles(paragraph, text, 0, len(text)):
        opens = True
        for a, b in _tiles(sentence, text, first, last):
            while b - a > 1 and ruler.size(a, b) > limit:
                cut = _word_border(text, a, min(ruler.farthest(a, limit), b))
                yield _Piece(a, cut, opens)
                a, opens = cut, False
            yield _Piece(a, b, opens)
            opens = False


def _tiles(border: re.Pattern[str], text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The stretches up to the end of each border, without gaps."""
    for match in border.finditer(text, start, end):
        if match.end() < end:
            yield start, match.end()
            start = match.end()
    if start < end:
        yield start, end


def _word_border(text: str, start: int, end: int) -> int:
    """Where the last line begins in the second half of text[start:end], or else its last word."""
    half = start + (end - start) // 2
    line = text.rfind("\n", half, end) + 1
    if line:
        return line
    return next((at for at in range(end, half, -1) if text[at - 1].isspace()), end)


def _pack(
    pieces: list[_Piece], section: _Section, limit: int, overlap: int
) -> Iterator[tuple[int, int, Slice | None]]:
    """Fills chunks with neighbouring pieces; yields their (start, end, lead)."""
    ruler = section.ruler
    first = done = 0
    while done < len(pieces):
        start = pieces[first].start
        lead = section.lead(start, pieces[done].end, limit)
        room = limit - (ruler.size(*lead) if lead else 0)
        after = first + 1
        while after < len(pieces) and ruler.size(start, pieces[after].end) <= room:
            after += 1
        if after < len(pieces):
            after = _paragraph_border(pieces, ruler, first, done, after)
        yield start, pieces[after - 1].end, lead
        done = after
        if done < len(pieces):
            back = 0 if section.in_rows else overlap
            first = _step_back(pieces, ruler, first, done, limit, back)


def _paragraph_border(
    pieces: list[_Piece], ruler: _Ruler, first: int, done: int, after: int
) -> int:
    """Ends the chunk at a paragraph instead of in one, if that leaves at least half of it and
    more than what earlier chunks have `done`.
    """
    start = pieces[first].start
    half = ruler.size(start, pieces[after - 1].end) / 2
    for border in range(after, max(first, done), -1):
        if ruler.size(start, pieces[border - 1].end) < half:
            break
        if pieces[border].opens_paragraph:
            return border
    return after


def _step_back(
    pieces: list[_Piece], ruler: _Ruler, first: int, after: int, limit: int, overlap: int
) -> int:
    """Where the next chunk begins: before `after` by at most `overlap`, with room for `after`."""
    back = after
    while (
        back - 1 > first
        and ruler.size(pieces[back - 1].start, pieces[after].start) <= overlap
        and ruler.size(pieces[back - 1].start, pieces[after].end) <= limit
    ):
        back -= 1
    return back


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    inner = text[start:end]
    return start + len(inner) - len(inner.lstrip()), start + len(inner.rstrip())
