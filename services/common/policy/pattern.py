"""What a pattern can match, read from its own text: how long, and how a match begins.

RE2 finds matches in linear time, but cannot say of a text whether one may still be under way at its
end. So a pattern P is taken apart here, and a second one is made of the pieces, `beginnings`: it
matches whatever some match of P begins with, from nothing up to a match that only waits to be told
what comes behind it (`\\b`, `$`). Searched with `\\z` behind it, leftmost, it gives the longest end
of a text in which P may still come true; all before that is decided.

For a sequence a b c, beginnings are: those of a; a, then those of b; a b, then those of c. For a
choice those of either; for x{m,n}: up to n-1 times x, then those of x. What is asserted where the
text ends is taken to hold.
"""

from dataclasses import dataclass, replace

import re2

_ASSERTIONS = ("\\b", "\\B", "\\A", "\\z")
_FLAGS = frozenset("imsU-")
_META = frozenset("\\.+*?()|[]{}^$")


@dataclass(frozen=True)
class Shape:
    """Of a piece of a pattern: RE2's source of it and of its beginnings; how many characters a
    match has, `most` None where there is no bound; its size with all repetitions written out."""

    source: str
    beginnings: str
    least: int
    most: int | None
    size: int


def shape(pattern: str) -> Shape:
    """Of a pattern that RE2 takes. Raises ValueError for what is not understood here, in words."""
    reader = _Reader(pattern)
    found = reader.alternatives()
    if reader.rest:
        raise ValueError(f"cannot be taken apart at {reader.rest[:20]!r}")
    return found


def escaped(text: str) -> str:
    """The pattern of a text as it is."""
    return "".join("\\" + char if char in _META else char for char in text)


_NOTHING = Shape("", "", 0, 0, 0)


def _one(source: str) -> Shape:
    """One character."""
    return Shape(source, "", 1, 1, 1)


def _sequence(parts: list[Shape]) -> Shape:
    whole = _NOTHING
    for part in reversed(parts):
        if not part.source:
            continue
        if not whole.source:
            whole = part
            continue
        begins = f"(?:{part.beginnings}|{part.source}{whole.beginnings})"
        most = None if part.most is None or whole.most is None else part.most + whole.most
        size = part.size + whole.size
        whole = Shape(part.source + whole.source, begins, part.least + whole.least, most, size)
    return whole


def _choice(options: list[Shape]) -> Shape:
    if len(options) == 1:
        return options[0]
    mosts = [option.most for option in options]
    return Shape(
        f"(?:{'|'.join(option.source for option in options)})",
        f"(?:{'|'.join(option.beginnings for option in options)})",
        min(option.least for option in options),
        None if None in mosts else max(most for most in mosts if most is not None),
        sum(option.size for option in options),
    )


def _repeated(part: Shape, least: int, most: int | None, mark: str) -> Shape:
    if most == 0 or not part.source:
        return _NOTHING
    once = f"(?:{part.source})"
    before = "" if most == 1 else once + ("*" if most is None else f"{{0,{most - 1}}}")
    return Shape(
        once + mark,
        before + part.beginnings,
        part.least * least,
        0 if part.most == 0 else None if most is None or part.most is None else part.most * most,
        part.size * max(1, least, most or 0),
    )


class _Reader:
    """Of RE2's syntax, as far as its structure goes; what a piece means is RE2's own affair."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    @property
    def rest(self) -> str:
        return self._text[self._at :]

    def alternatives(self) -> Shape:
        """Up to the group's end. Flags stand before all of it."""
        flags = self._flags()
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        found = _choice(options)
        return _within(f"(?{flags}:", found) if flags else found

    def _sequence(self) -> Shape:
        parts: list[Shape] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            *parts_before, part = self._quoted() if self._take("\\Q") else [self._piece()]
            parts += parts_before
            while (times := self._times()) is not None:
                part = _repeated(part, *times)
            parts.append(part)
        return _sequence(parts)

    def _piece(self) -> Shape:
        if self._take("("):
            return self._group()
        if self._take("["):
            return _one(self._class())
        if self._take("\\"):
            return self._escape()
        char = self._text[self._at]
        self._at += 1
        if char in "^$":
            return Shape(char, "", 0, 0, 1)
        return _one("\\{" if char == "{" else char)

    def _quoted(self) -> list[Shape]:
        """Characters as they are, up to the closing mark, of which the last may be repeated."""
        end = self._text.find("\\E", self._at)
        literal = self._text[self._at : end if end >= 0 else len(self._text)]
        self._at += len(literal) + (2 if end >= 0 else 0)
        return [_one(escaped(char)) for char in literal] or [_NOTHING]

    def _group(self) -> Shape:
        opening = "(?:"
        if self._take("?P<") or self._take("?<"):
            self._at = self._text.index(">", self._at) + 1
        elif self._take("?:"):
            pass
        elif self._text.startswith("?", self._at) and not self._at_flags():
            end = self._text.index(":", self._at)
            opening = f"({self._text[self._at : end]}:"
            self._at = end + 1
        found = self.alternatives()
        if not self._take(")"):
            raise ValueError("a group is not closed")
        return _within(opening, found)

    def _at_flags(self) -> bool:
        """Whether "(?flags)" was begun, which holds for the rest of the group around it."""
        end = self._at + 1
        while end < len(self._text) and self._text[end] in _FLAGS:
            end += 1
        if self._text[end : end + 1] != ")":
            return False
        raise ValueError("flags must stand at the beginning, or be of a group: (?i:...)")

    def _flags(self) -> str:
        """Those that the text here begins with."""
        if not self._text.startswith("(?", self._at):
            return ""
        end = self._at + 2
        while end < len(self._text) and self._text[end] in _FLAGS:
            end += 1
        if end == self._at + 2 or self._text[end : end + 1] != ")":
            return ""
        flags, self._at = self._text[self._at + 2 : end], end + 1
        return flags

    def _class(self) -> str:
        start = self._at - 1
        self._take("^")
        self._take("]")
        while not self._take("]"):
            if self._take("[:"):
                self._at = self._text.index(":]", self._at) + 2
            elif self._take("\\"):
                self._escape()
            else:
                self._at += 1
        return self._text[start : self._at]

    def _escape(self) -> Shape:
        start = self._at - 1
        char = self._text[self._at]
        self._at += 1
        if char in "pPx" and self._take("{"):
            self._at = self._text.index("}", self._at) + 1
        elif char in "pP":
            self._at += 1
        elif char == "x":
            self._at += 2
        elif char in "01234567":
            while self._at < start + 4 and self._text[self._at : self._at + 1] in [*"01234567"]:
                self._at += 1
        source = self._text[start : self._at]
        if source == "\\C":
            raise ValueError("\\C, a single byte, is not taken")
        return Shape(source, "", 0, 0, 1) if source in _ASSERTIONS else _one(source)

    def _times(self) -> tuple[int, int | None, str] | None:
        """At least, at most, and as written, of a repetition that stands here."""
        start, bounds = self._at, None
        for mark, few, many in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(mark):
                bounds = (few, many)
                break
        else:
            bounds = self._counted()
        if bounds is None:
            return None
        self._take("?")  # prefers fewer, which does not change what can be matched
        return *bounds, self._text[start : self._at]

    def _counted(self) -> tuple[int, int | None] | None:
        end = self._text.find("}", self._at)
        if not self._text.startswith("{", self._at) or end < 0:
            return None
        low, comma, high = self._text[self._at + 1 : end].partition(",")
        if not low.isdecimal() or not (high.isdecimal() or not high):
            return None
        self._at = end + 1
        return int(low), int(high) if high else None if comma else int(low)

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True


def _within(opening: str, found: Shape) -> Shape:
    source, beginnings = f"{opening}{found.source})", f"{opening}{found.beginnings})"
    return replace(found, source=source, beginnings=beginnings)


def compiled(source: str, memory: int = 8 * 2**20) -> "re2._Regexp":
    """In any case of letters; of the matches at a place the longest counts. Raises ValueError."""
    options = re2.Options()
    options.case_sensitive = False
    options.log_errors = False
    options.longest_match = True
    options.never_capture = True
    options.max_mem = memory
    try:
        return re2.compile(source.encode(), options)
    except re2.error as error:
        said = error.args[0] if error.args else ""
        raise ValueError(said.decode() if isinstance(said, bytes) else str(said)) from None
