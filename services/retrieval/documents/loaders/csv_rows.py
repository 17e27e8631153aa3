"""Tables as CSV: a line for each row, in which each value stands behind its column's name."""

import csv
from collections.abc import Iterator
from itertools import islice

from protos.retrieval_pb2 import Section
from services.retrieval.documents.chunks import Limits, RefusedError
from services.retrieval.documents.loaders.decoding import decode
from services.retrieval.documents.loaders.rows import Rows

_DELIMITERS = ",;\t|"
_LOOKED_AT = 20  # rows
_LOOKED_AT_CHARS = 64 * 1024


def load(content: bytes, limits: Limits) -> tuple[list[Section], str]:
    text = decode(content, limits.chars)
    csv.field_size_limit(limits.chars)
    try:
        return _read(text, _delimiter(text), limits), ""
    except csv.Error as error:
        raise RefusedError(f"cannot be read as CSV: {error}") from None


def _read(text: str, delimiter: str, limits: Limits) -> list[Section]:
    lines = _rows(text, delimiter)
    first = next(lines, [])
    names = [name.strip() for name in first]
    rows = Rows(limits.chars)
    number = 1
    if not (headed := _is_header(names)):
        names = [f"column {column}" for column in range(1, len(first) + 1)]
        rows.add(number, zip(names, first, strict=True))
    for number, row in enumerate(lines, 2):
        names.extend(f"column {column}" for column in range(len(names) + 1, len(row) + 1))
        rows.add(number, zip(names, row, strict=False))
    sections = rows.sections()
    if headed and first and not sections:
        raise RefusedError("has a header and no rows below it")
    return sections


def _rows(text: str, delimiter: str) -> Iterator[list[str]]:
    return csv.reader(text.splitlines(keepends=True), delimiter=delimiter)


def _delimiter(text: str) -> str:
    """With which most of the first rows have as many columns as the first, and more than one."""

    def columns(delimiter: str) -> tuple[int, int]:
        rows = list(islice(_rows(text[:_LOOKED_AT_CHARS], delimiter), _LOOKED_AT))
        width = len(rows[0]) if rows else 0
        return (sum(len(row) == width for row in rows), width) if width > 1 else (0, 0)

    return max(_DELIMITERS, key=columns)


def _is_header(names: list[str]) -> bool:
    """No number among them, and no two alike."""
    return len({*names}) == len(names) and all(n and not _is_number(n) for n in names)


def _is_number(text: str) -> bool:
    return text.replace(".", "").replace(",", "").lstrip("+-").isdecimal()
