"""What a file is: by its first bytes, and where those tell nothing by its name."""

import io
import zipfile
from enum import StrEnum
from pathlib import PurePath

from services.retrieval.documents.chunks import RefusedError


class Kind(StrEnum):
    """Its value is what people call it."""

    PDF = "PDF"
    DOCX = "Word document (.docx)"
    PPTX = "presentation (.pptx)"
    HTML = "HTML"
    CSV = "table (.csv)"
    JSON = "JSON"
    JSON_LINES = "JSON Lines"
    MARKDOWN = "Markdown"
    TEXT = "text"


_TEXTS = (
    "adoc c cc cfg cpp cs css go h hpp ini java jl js kt log lua org php pl proto py r rb rs rst "
    "scala sh sql swift tex toml ts xml yaml yml"
)
SUFFIXES = {
    ".pdf": Kind.PDF,
    ".docx": Kind.DOCX,
    ".pptx": Kind.PPTX,
    ".html": Kind.HTML,
    ".htm": Kind.HTML,
    ".xhtml": Kind.HTML,
    ".csv": Kind.CSV,
    ".tsv": Kind.CSV,
    ".json": Kind.JSON,
    ".jsonl": Kind.JSON_LINES,
    ".ndjson": Kind.JSON_LINES,
    ".md": Kind.MARKDOWN,
    ".markdown": Kind.MARKDOWN,
    ".txt": Kind.MARKDOWN,
    **{f".{suffix}": Kind.TEXT for suffix in _TEXTS.split()},
}
"""What is known by its name. Another name is no hindrance: the content may tell what it is, and any
other text is text."""
_PACKED = {Kind.PDF, Kind.DOCX, Kind.PPTX}
_PARTS = {
    "word/document.xml": Kind.DOCX,
    "ppt/presentation.xml": Kind.PPTX,
    "xl/workbook.xml": "a spreadsheet: save it as CSV",
    "mimetype": "an OpenDocument file or an e-book: save it as .docx, .pptx or PDF",
}
_REFUSED = {
    b"{\\rtf": "is an RTF document: save it as .docx",
    b"\x89PNG": "is an image",
    b"\xff\xd8\xff": "is an image",
    b"GIF8": "is an image",
    b"II*\0": "is an image",
    b"MM\0*": "is an image",
    b"\x1f\x8b": "is a compressed file: unpack it first",
    b"Rar!": "is an archive: unpack it first",
    b"7z\xbc\xaf": "is an archive: unpack it first",
    b"%!PS": "is a PostScript document: save it as PDF",
}
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
_HTML_STARTS = (b"<!doctype html", b"<html")
_HEAD_BYTES = 1024
_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")  # of UTF-8, and of UTF-16 and -32


def kind_of(filename: str, content: bytes) -> tuple[Kind, str]:
    """And what is to be told of a name that lies, in words that go on behind it; else nothing.

    Raises RefusedError ("unsupported_file").
    """
    named = SUFFIXES.get(PurePath(filename.lower()).suffix)
    found = _by_content(content)
    if found is None and named is Kind.PDF and b"%PDF-" in content[:_HEAD_BYTES]:
        found = named  # behind what something put before it
    if found is None:
        if named in _PACKED:
            raise RefusedError(f"is called {_suffix(filename)} and is no {named}")
        return named or Kind.TEXT, ""
    note = (
        "" if named in (found, None) else f"is called {_suffix(filename)} and was read as {found}"
    )
    return found, note


def _by_content(content: bytes) -> Kind | None:
    head = content[:_HEAD_BYTES]
    for magic, words in _REFUSED.items():
        if head.startswith(magic):
            raise RefusedError(words, "unsupported_file")
    if head.startswith(b"%PDF-"):
        return Kind.PDF
    if head.startswith(b"PK\x03\x04"):
        return _in_archive(content)
    if head.startswith(_OLE):
        if _ENCRYPTED in content:
            raise RefusedError("is encrypted: save it without a password")
        words = "is of an old Office format: save it as .docx or .pptx"
        raise RefusedError(words, "unsupported_file")
    if b"\0" in head and not head.startswith(_MARKS):
        raise RefusedError("is neither text nor a kind of document known here", "unsupported_file")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_HTML_STARTS):
        return Kind.HTML
    return None


def _in_archive(content: bytes) -> Kind:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError):
        raise RefusedError("is a broken archive, or a broken .docx or .pptx") from None
    for name, found in _PARTS.items():
        if name in names:
            if isinstance(found, Kind):
                return found
            raise RefusedError(f"is {found}", "unsupported_file")
    raise RefusedError("is an archive: unpack it first", "unsupported_file")


def _suffix(filename: str) -> str:
    return PurePath(filename).suffix[:16] or "so"
