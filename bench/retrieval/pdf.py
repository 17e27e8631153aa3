"""A PDF of plain text, as a word processor would leave it: a page's lines one below the other."""

import textwrap
import zlib
from collections.abc import Iterable, Iterator

LINES, COLUMNS = 48, 88  # of a page
_FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"


def pages_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lines of each page, as many pages as the texts fill."""
    page: list[str] = []
    for text in texts:
        for line in textwrap.wrap(text, COLUMNS):
            page.append(line)
            if len(page) == LINES:
                yield page
                page = []


def pdf(pages: Iterable[list[str]]) -> bytes:
    """Characters outside of Windows' code page become question marks."""
    objects: list[bytes] = [b"", b"", _FONT.encode()]  # catalogue and tree come last
    kids = []
    for page in pages:
        stream = zlib.compress(_content(page))
        head = f"<< /Length {len(stream)} /Filter /FlateDecode >>\nstream\n".encode()
        objects.append(head + stream + b"\nendstream")
        kids.append(len(objects) + 1)
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {len(objects)} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
    objects[0] = b"<< /Type /Catalog /Pages 2 0 R >>"
    tree = " ".join(f"{kid} 0 R" for kid in kids)
    objects[1] = f"<< /Type /Pages /Kids [{tree}] /Count {len(kids)} >>".encode()
    return _file(objects)


def _content(page: list[str]) -> bytes:
    lines = (
        line.replace("\\", r"\\")
        .replace("(", r"\(")
        .replace(")", r"\)")
        .encode("cp1252", "replace")
        for line in page
    )
    return b"BT /F1 11 Tf 14 TL 60 780 Td\n" + b"".join(b"(%s) '\n" % one for one in lines) + b"ET"


def _file(objects: list[bytes]) -> bytes:
    written, places = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(written))
        written += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(written)
    written += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    written += b"".join(b"%010d 00000 n \n" % place for place in places)
    written += b"trailer\n<< /Size %d /Root 1 0 R >>\n" % (len(objects) + 1)
    return bytes(written + b"startxref\n%d\n%%%%EOF\n" % table)
