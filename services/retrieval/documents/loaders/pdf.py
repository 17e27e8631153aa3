"""PDF: the text of its pages, which go on in each other, below the titles of its outline."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import pypdfium2
import pypdfium2.raw as pdfium

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import Limits, RefusedError, too_large
from services.retrieval.documents.draft import Draft

_LOCKED = (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY)
_HYPHENS = ("\ufffe\n", "\x02\n")  # of a word that is parted at the end of a line
_OUTLINE_DEPTH = 6
_OUTLINE_ITEMS = 10_000


class _Title(NamedTuple):
    level: int
    text: str


def load(content: bytes, limits: Limits) -> tuple[list[Section], str]:
    try:
        pdf = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        if error.err_code in _LOCKED:
            raise RefusedError("is encrypted: save it without a password") from None
        raise RefusedError("is a broken PDF") from None
    pages = len(pdf)
    if pages > limits.pages:
        raise too_large(f"has {pages:,} pages, more than {limits.pages:,}, the limit")
    draft, titles, empty = Draft(limits.chars), _titles(pdf), 0
    for number in range(pages):
        text = _text(pdf, number)
        empty += not text.strip()
        draft.turn(number + 1)
        for title, below in _parts(text, titles[number]):
            if title is not None:
                draft.heading(*title)
            draft.flow(below)
    if empty == pages:
        raise RefusedError(
            "has no text in it: it is scanned, or made of drawings; recognize its text first"
        )
    return draft.sections(), f"has no text on {empty} of its {pages} pages" if empty else ""


def _text(pdf: pypdfium2.PdfDocument, number: int) -> str:
    try:
        page = pdf[number]
        text = page.get_textpage()
    except pypdfium2.PdfiumError:  # this page is broken
        return ""
    try:
        found: str = text.get_text_bounded()
    finally:
        text.close()
        page.close()
    found = found.replace("\r\n", "\n").replace("\f", "\n").replace("\0", "")
    for hyphen in _HYPHENS:
        found = found.replace(hyphen, "")
    return found


def _titles(pdf: pypdfium2.PdfDocument) -> dict[int, list[_Title]]:
    """By page, from 0 on, in their order."""
    found: dict[int, list[_Title]] = defaultdict(list)
    try:
        for item in islice(pdf.get_toc(max_depth=_OUTLINE_DEPTH), _OUTLINE_ITEMS):
            dest = item.get_dest()
            page = dest.get_index() if dest else None
            title = " ".join(item.get_title().split())
            if page is not None and title:
                found[page].append(_Title(item.level + 1, title))
    except pypdfium2.PdfiumError:  # an outline is good to have, and no more
        pass
    return found


def _parts(text: str, titles: list[_Title]) -> Iterator[tuple[_Title | None, str]]:
    """The page's text before its first title, and what is below each that stands there as a line;
    that line is left out. A title which is not found opens nothing: where, nobody could say."""
    lines = text.split("\n")
    plain = [" ".join(line.split()) for line in lines]
    below, begins, looked = None, 0, 0
    for title in titles:
        try:
            at = plain.index(title.text, looked)
        except ValueError:
            continue
        yield below, _joined(lines[begins:at])
        below, begins, looked = title, at + 1, at + 1
    yield below, _joined(lines[begins:])


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n" if lines else ""
