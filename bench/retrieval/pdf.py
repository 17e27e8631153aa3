"""A PDF as a word processor leaves it: headings, which its outline names, paragraphs and tables."""

import textwrap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, groupby, islice
from typing import NamedTuple

from bench.retrieval.made import made
from bench.retrieval.sets import Document

LINES, COLUMNS = 56, 88  # of a page
_PAGES_A_FILE = 50
_LEFT, _TOP, _WIDTH, _LEADING = 60, 780, 475, 13  # points
_FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /%s /Encoding /WinAnsiEncoding >>"
_CATALOGUE, _TREE, _OUTLINE, _PLAIN, _BOLD = range(1, 6)  # objects by their numbers


class Line(NamedTuple):
    """Its cells stand side by side, one column each; without any it is empty."""

    cells: Sequence[str] = ()
    is_heading: bool = False


def pdfs(count: int) -> list[bytes]:
    """Files of so many pages together: the made set's documents, again and again."""
    pages = list(islice(pages_of(cycle(made().documents)), count))
    return [pdf(pages[at : at + _PAGES_A_FILE]) for at in range(0, count, _PAGES_A_FILE)]


def pages_of(documents: Iterable[Document]) -> Iterator[list[Line]]:
    """Lines of each page, as many pages as the documents fill. Their texts are Markdown, of
    paragraphs and tables."""
    page: list[Line] = []
    for document in documents:
        for line in _lines(document):
            page.append(line)
            if len(page) == LINES:
                yield page
                page = []


def pdf(pages: Iterable[Sequence[Line]]) -> bytes:
    """Characters outside of Windows' code page become question marks."""
    fonts = [(_FONT % name).encode() for name in ("Helvetica", "Helvetica-Bold")]
    objects: list[bytes] = [b"", b"", b"", *fonts]  # what names all pages comes last
    kids: list[int] = []
    titles: list[tuple[str, int]] = []
    for page in pages:
        stream = zlib.compress(_content(page))
        head = f"<< /Length {len(stream)} /Filter /FlateDecode >>\nstream\n".encode()
        objects.append(head + stream + b"\nendstream")
        kids.append(len(objects) + 1)
        objects.append(
            f"<< /Type /Page /Parent {_TREE} 0 R /MediaBox [0 0 595 842] "
            f"/Contents {len(objects)} 0 R "
            f"/Resources << /Font << /F1 {_PLAIN} 0 R /F2 {_BOLD} 0 R >> >> >>".encode()
        )
        titles += [(line.cells[0], kids[-1]) for line in page if line.is_heading]
    items = list(_outline(titles, len(objects) + 1))
    objects[_CATALOGUE - 1] = (
        f"<< /Type /Catalog /Pages {_TREE} 0 R /Outlines {_OUTLINE} 0 R >>".encode()
    )
    tree = " ".join(f"{kid} 0 R" for kid in kids)
    objects[_TREE - 1] = f"<< /Type /Pages /Kids [{tree}] /Count {len(kids)} >>".encode()
    first, last = len(objects) + 1, len(objects) + len(items)
    ends = f"/First {first} 0 R /Last {last} 0 R " if items else ""
    objects[_OUTLINE - 1] = f"<< /Type /Outlines {ends}/Count {len(items)} >>".encode()
    return _file([*objects, *items])


def _lines(document: Document) -> Iterator[Line]:
    yield Line([document.title], is_heading=True)
    yield Line()
    for paragraph in document.text.split("\n\n"):
        for in_table, its in groupby(paragraph.split("\n"), lambda line: line.startswith("|")):
            if in_table:
                rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in its)
                yield from (Line(row) for row in rows if any(cell.strip(" :-") for cell in row))
            else:
                yield from (Line([line]) for line in textwrap.wrap(" ".join(its), COLUMNS))
        yield Line()


def _content(page: Sequence[Line]) -> bytes:
    written = [b"BT"]
    for number, line in enumerate(page):
        written.append(b"/F2 14 Tf" if line.is_heading else b"/F1 11 Tf")
        for column, cell in enumerate(line.cells):
            x = _LEFT + column * _WIDTH // len(line.cells)
            at = f"1 0 0 1 {x} {_TOP - number * _LEADING} Tm".encode()
            written.append(b"%s (%s) Tj" % (at, _escaped(cell)))
    return b"\n".join([*written, b"ET"])


def _outline(titles: Sequence[tuple[str, int]], first: int) -> Iterator[bytes]:
    """An item for each, on its page; the first one's object has this number."""
    for number, (title, page) in enumerate(titles, first):
        beside = f"/Prev {number - 1} 0 R " if number > first else ""
        if number + 1 < first + len(titles):
            beside += f"/Next {number + 1} 0 R "
        place = f"/Parent {_OUTLINE} 0 R {beside}/Dest [{page} 0 R /Fit]".encode()
        yield b"<< /Title (%s) %s >>" % (_escaped(title), place)


def _escaped(text: str) -> bytes:
    for sign in "\\()":
        text = text.replace(sign, f"\\{sign}")
    return text.encode("cp1252", "replace")


def _file(objects: Sequence[bytes]) -> bytes:
    written, places = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(written))
        written += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(written)
    written += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    written += b"".join(b"%010d 00000 n \n" % place for place in places)
    written += b"trailer\n<< /Size %d /Root %d 0 R >>\n" % (len(objects) + 1, _CATALOGUE)
    return bytes(written + b"startxref\n%d\n%%%%EOF\n" % table)
