"""Small documents of each kind, made here: what is in them is known to the word."""

import io
from collections.abc import Iterable, Sequence

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunking import chunk
from services.retrieval.documents.chunks import Chunk, passage


def pdf(
    pages: Iterable[str], outline: Sequence[tuple[str, int]] = (), encrypted: bool = False
) -> bytes:
    """One font, one line below the other. `outline`: titles, and their pages from 0 on."""
    parts: list[bytes] = [b""] * 3  # catalog, pages, outline
    parts.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    leaves: list[int] = []
    for page in pages:
        lines = (line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
                 for line in page.split("\n"))  # fmt: skip
        shown = " T* ".join(f"({line}) Tj" for line in lines)
        stream = f"BT /F1 10 Tf 12 TL 40 800 Td {shown} ET".encode("cp1252")
        parts.append(b"<< /Length %d >> stream\n%s\nendstream" % (len(stream), stream))
        fonts = b"/Resources << /Font << /F1 4 0 R >> >>"
        parts.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] %s /Contents %d 0 R >>"
            % (fonts, len(parts))
        )
        leaves.append(len(parts))
    kids = b" ".join(b"%d 0 R" % leaf for leaf in leaves)
    parts[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(leaves), kids)
    first = len(parts) + 1
    for number, (title, page_number) in enumerate(outline):
        following = b"/Next %d 0 R" % (first + number + 1) if number + 1 < len(outline) else b""
        parts.append(
            b"<< /Title (%s) /Parent 3 0 R /Dest [%d 0 R /XYZ null null null] %s >>"
            % (title.encode("cp1252"), leaves[page_number], following)
        )
    last = first + len(outline) - 1
    parts[2] = b"<< /Type /Outlines /First %d 0 R /Last %d 0 R >>" % (first, last)
    tops = b"/Outlines 3 0 R" if outline else b""
    parts[0] = b"<< /Type /Catalog /Pages 2 0 R %s >>" % tops
    return _file(parts, encrypted)


def _file(parts: Sequence[bytes], encrypted: bool) -> bytes:
    out, places = io.BytesIO(), list[int]()
    out.write(b"%PDF-1.4\n")
    for number, part in enumerate(parts, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, part))
    at = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(parts) + 1))
    out.writelines(b"%010d 00000 n \n" % place for place in places)
    lock = b""
    if encrypted:
        word = b"<%s>" % (b"5a" * 32)
        lock = b"/Encrypt << /Filter /Standard /V 1 /R 2 /O %s /U %s /P -4 >> /ID [%s %s]" % (
            (word,) * 4
        )
    out.write(b"trailer << /Size %d /Root 1 0 R %s >>\n" % (len(parts) + 1, lock))
    out.write(b"startxref\n%d\n%%%%EOF\n" % at)
    return out.getvalue()


def chunks(
    sections: Sequence[Section], encode: object, title: str, limit: int, overlap: int
) -> list[Chunk]:
    """As the service has them, whose positions are the document's."""
    found, begins = list[Chunk](), 0
    for section in sections:
        for cut in chunk([section], encode, title, limit, overlap):  # type: ignore[arg-type]
            found.append(
                Chunk(
                    cut.title,
                    passage(section.text, cut.start, cut.end, cut.lead),
                    begins + cut.start,
                    begins + cut.end,
                    cut.tokens,
                    cut.lead.end - cut.lead.start if cut.lead else 0,
                    cut.pages,
                    cut.rows,
                )
            )
        begins += len(section.text)
    return found
