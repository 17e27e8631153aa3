"""Text as a reader sees it, for rules to look at: what only looks different becomes the same.

Characters that show nothing (zero-width, soft hyphens, combining marks) disappear; full-width,
mathematical and other forms become the plain ones; letters of other scripts that look like Latin
ones become those; digits of all scripts become 0 to 9. Each character by itself, whatever stands
beside it: so a stream folds to the same text in whatever portions it comes, and what is found in
the folded text is found again in the original.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# Written in one case; the other follows.
_LOOKALIKES = {
    "а": "a", "в": "b", "с": "c", "ԁ": "d", "е": "e", "ғ": "f", "ɡ": "g", "һ": "h", "і": "i",
    "ј": "j", "к": "k", "ӏ": "l", "м": "m", "п": "n", "о": "o", "р": "p", "ԛ": "q", "г": "r",
    "ѕ": "s", "т": "t", "ц": "u", "ѵ": "v", "ԝ": "w", "х": "x", "у": "y", "α": "a", "β": "b",
    "ϲ": "c", "δ": "d", "ε": "e", "η": "n", "ι": "i", "κ": "k", "ν": "v", "ο": "o", "ρ": "p",
    "σ": "o", "τ": "t", "υ": "u", "χ": "x", "γ": "y", "ω": "w", "ı": "i", "ł": "l", "ø": "o",
    "đ": "d", "ħ": "h", "ŧ": "t", "‐": "-", "‑": "-", "‒": "-", "–": "-", "—": "-", "−": "-",
    "‘": "'", "’": "'", "“": '"', "”": '"', "⁄": "/", "∕": "/", "։": ":", "∶": ":", "·": ".",
}  # fmt: skip
_CAPITALS = {"Η": "H", "Ν": "N", "Ρ": "P", "Υ": "Y", "Ζ": "Z", "Μ": "M", "Н": "H", "В": "B"}
_MARKED_SCRIPTS_END = 0x590  # Latin, Greek, Cyrillic: letters are read the same without their marks
_MARKS = ((0x300, 0x370), (0x1AB0, 0x1B00), (0x1DC0, 0x1E00), (0x20D0, 0x2100), (0xFE20, 0xFE30))
_INVISIBLE = ((0xFE00, 0xFE10), (0xE0000, 0xE01F0), (0x115F, 0x1161), (0x3164, 0x3165))
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|u[0-9a-fA-F]{0,3}\Z|\Z|.)|[^\\]", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


@lru_cache(maxsize=65_536)
def folded(char: str) -> str:
    """One character; "" for one that shows nothing."""
    if char.isascii():
        return char
    code = ord(char)
    if unicodedata.category(char) == "Cf" or _in(code, _MARKS) or _in(code, _INVISIBLE):
        return ""
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(int(digit))
    plain = _CAPITALS.get(char) or _LOOKALIKES.get(char) or _upper(char)
    if plain:
        return plain
    parts = unicodedata.normalize("NFKD", char)
    if ord(parts[0]) < _MARKED_SCRIPTS_END:
        found = "".join(p for p in parts if not _in(ord(p), _MARKS))
    else:
        found = unicodedata.normalize("NFKC", char)
    if found != char:
        return "".join(folded(part) for part in found)
    return " " if char.isspace() else found


def _upper(char: str) -> str:
    low = char.lower()
    return _LOOKALIKES.get(low, "").upper() if low != char else ""


def _in(code: int, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(start <= code < end for start, end in ranges)


@dataclass(frozen=True)
class View:
    """A text as UTF-8 for a search, and where each byte is from. `before` stands for what came
    before the text."""

    data: bytes
    before: int  # bytes of it
    size: int  # characters of the text
    whole: int  # characters that are seen here; behind them an escape is not complete
    starts: Sequence[int] | None  # of each unit, the byte it begins at, and the end; None: 1 to 1
    units: Sequence[int] | None  # where each unit begins in the text, and the end; None: each char

    def char(self, byte: int) -> int:
        """Where the unit that has this byte begins; of the end, where what is seen ends."""
        if self.starts is None:
            return byte - self.before
        return self._place(bisect_right(self.starts, byte) - 1)

    def end(self, byte: int) -> int:
        """Where the units end that the bytes up to here are from."""
        if self.starts is None:
            return byte - self.before
        return self._place(bisect_left(self.starts, byte))

    def byte(self, char: int) -> int:
        """Where what begins at a unit's first character begins."""
        if self.starts is None:
            return char + self.before
        return self.starts[char if self.units is None else bisect_left(self.units, char)]

    def last(self, char: int) -> bytes:
        """What stands before that place: one character, none at the beginning."""
        before = self.data[: self.byte(char)]
        start = max(0, len(before) - 1)
        while start > 0 and before[start] & 0xC0 == 0x80:
            start -= 1
        return before[start:]

    def _place(self, unit: int) -> int:
        return unit if self.units is None else self.units[unit]


def view(
    text: str, *, fold: bool, before: bytes = b"", json: bool = False, ended: bool = True
) -> View:
    """`json`: escapes of JSON are read as what they stand for; `ended`: nothing follows, so that an
    escape which is not complete is text."""
    escapes = json and "\\" in text
    if text.isascii() and not escapes:
        size = len(text)
        return View(before + text.encode(), len(before), size, size, None, None)
    if not escapes:
        pieces = [folded(char) for char in text] if fold else list(text)
        return _joined(pieces, None, text, before, len(text))
    pieces, units, whole = [], [], len(text)
    for found in _ESCAPE.finditer(text):
        unit = found.group()
        if unit[0] == "\\" and not _complete(unit):
            if not ended:
                whole = found.start()
                break
        elif unit[0] == "\\":
            unit = chr(int(unit[2:], 16)) if unit[1] == "u" else _ESCAPED.get(unit[1], unit[1])
        units.append(found.start())
        pieces.append("".join(map(folded, unit)) if fold else unit)
    return _joined(pieces, [*units, whole], text, before, whole)


def _complete(unit: str) -> bool:
    return len(unit) == (6 if unit[1:2] == "u" else 2)


def _joined(
    pieces: list[str], units: list[int] | None, text: str, before: bytes, whole: int
) -> View:
    starts, at = [], len(before)
    coded = [piece.encode("utf-8", "replace") for piece in pieces]
    for piece in coded:
        starts.append(at)
        at += len(piece)
    starts.append(at)
    return View(before + b"".join(coded), len(before), len(text), whole, starts, units)
