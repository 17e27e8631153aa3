"""Text as a reader sees it, for rules to look at: what only looks different becomes the same.

Characters that show nothing (zero-width, soft hyphens, combining marks) disappear; full-width,
mathematical and other forms become the plain ones; letters of other scripts that look like Latin
ones become those; digits of all scripts become 0 to 9. Each character by itself, whatever stands
beside it: so a stream folds to the same text in whatever portions it comes, and what is found in
the folded text is found again in the original.
"""

import re
import unicodedata
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

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
# Of JSON, in a string: two halves of one character are one escape; at the text's end one may be
# open, which says nothing yet.
_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_WHOLE = rf"(?P<pair>{_HALF}\\u[dD][c-fC-F][0-9a-fA-F]{{2}})|(?P<code>\\u[0-9a-fA-F]{{4}})|\\."
_OPEN = (
    rf"(?P<open>{_HALF}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z"
    r"|\\(?:u[0-9a-fA-F]{0,3})?\Z)"
)
_ESCAPE = re.compile(_WHOLE, re.DOTALL)
_MAYBE_OPEN = re.compile(f"{_OPEN}|{_WHOLE}", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_MOST_KNOWN = 65_536  # characters of which tables are kept


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


class _Table(dict[int, str]):
    """What each character is folded to, by its number, as `str.translate` asks."""

    def __missing__(self, code: int) -> str:
        if len(self) >= _MOST_KNOWN:
            self.clear()
        found = self[code] = folded(chr(code))
        return found


class _Sizes(dict[str, int]):
    """How many bytes each character takes in a view."""

    def __init__(self, fold: bool) -> None:
        self._fold = fold

    def __missing__(self, char: str) -> int:
        if len(self) >= _MOST_KNOWN:
            self.clear()
        shown = folded(char) if self._fold else char
        found = self[char] = len(shown.encode("utf-8", "replace"))
        return found


_FOLDED = _Table()
_SIZES = {fold: _Sizes(fold) for fold in (True, False)}


class View:
    """A text as UTF-8 for a search, and where each byte is from; `before` stands for what came
    before the text. What tells places apart is made when one is asked for: most texts have no
    match.

    A unit is what one character of the view is made from: a character, or an escape.
    """

    def __init__(self, text: str, fold: bool, before: bytes, json: bool, ended: bool) -> None:
        self.before = len(before)  # bytes of it
        self.size = len(text)  # characters of the text
        self.whole = len(text)  # that are seen here; behind them an escape is not complete
        self._text, self._fold = text, fold
        self._escapes: re.Pattern[str] | None = None
        self._plain = text
        if json and "\\" in text:
            self._escapes = _ESCAPE if ended else _MAYBE_OPEN
            self._plain = self._escapes.sub(self._read, text)
        self._same = self._escapes is None and text.isascii()
        shown = self._plain
        if fold and not shown.isascii():
            shown = shown.translate(_FOLDED)
        self.data = before + shown.encode("utf-8", "replace")

    def char(self, byte: int) -> int:
        """Where the unit that has this byte begins; of the end, where what is seen ends."""
        if self._same:
            return byte - self.before
        return self._place(bisect_right(self._starts, byte) - 1)

    def end(self, byte: int) -> int:
        """Where the units end that the bytes up to here are from."""
        if self._same:
            return byte - self.before
        return self._place(bisect_left(self._starts, byte))

    def byte(self, char: int) -> int:
        """Where what begins at a unit's first character begins."""
        if self._same:
            return char + self.before
        units = self._units
        return self._starts[char if units is None else bisect_left(units, char)]

    def last(self, char: int, most: int) -> bytes:
        """What stands before that place: whole characters, so many bytes at most."""
        end = self.byte(char)
        start = max(0, end - most)
        while start < end and self.data[start] & 0xC0 == 0x80:
            start += 1
        return self.data[start:end]

    def _place(self, unit: int) -> int:
        return unit if self._units is None else self._units[unit]

    @cached_property
    def _starts(self) -> "array[int]":
        """Of each unit, the byte it begins at; and the end."""
        sizes = map(_SIZES[self._fold].__getitem__, self._plain)
        return array("I", accumulate(sizes, initial=self.before))

    @cached_property
    def _units(self) -> "array[int] | None":
        """Where each begins in the text, and the end; None: each is a character."""
        if self._escapes is None:
            return None
        units, at = array("I"), 0
        for found in self._escapes.finditer(self._text, 0, self.whole):
            units.extend(range(at, found.start() + 1))
            at = found.end()
        units.extend(range(at, self.whole + 1))
        return units

    def _read(self, escape: re.Match[str]) -> str:
        """What it stands for."""
        kind, unit = escape.lastgroup, escape.group()
        if kind == "open":
            self.whole = escape.start()
            return ""
        if kind == "pair":
            high, low = int(unit[2:6], 16), int(unit[8:], 16)
            return chr(0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF))
        return chr(int(unit[2:], 16)) if kind == "code" else _ESCAPED.get(unit[1], unit[1])


def view(
    text: str, *, fold: bool, before: bytes = b"", json: bool = False, ended: bool = True
) -> View:
    """`json`: escapes of JSON are read as what they stand for; `ended`: nothing follows, so that an
    escape which is not complete is text."""
    return View(text, fold, before, json, ended)
