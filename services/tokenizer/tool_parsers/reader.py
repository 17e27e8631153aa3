"""What all ways of writing calls share: an answer is read character by character.

A way says in `_read` what an answer looks like, as if all of it were there; each `yield` waits for
the next character. So what is given out does not depend on the portions in which the text comes.

- Text that is no call goes out at once, but for what may still be the beginning of a marker, and
  for white space, which is dropped beside a call.
- A call begins with its name; its arguments then go out as they are written.
- What looks like a call and breaks off, or goes wrong, before its name was told is text.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field

from protos.tokenizer_pb2 import ToolCallDelta

Reading = Generator[None, str, None]
Found = Generator[None, str, str]

_NAME = ("name",)
_CALLABLE = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("id", "type")


@dataclass(slots=True)
class Said:
    """New parts of an answer, by their kinds."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    @property
    def characters(self) -> int:
        """Of text, reasoning and arguments."""
        arguments = sum(len(call.arguments) for call in self.calls)
        return len(self.text) + len(self.reasoning) + arguments

    def add(self, more: "Said") -> None:
        self.text += more.text
        self.reasoning += more.reasoning
        self.calls += more.calls


class Malformed(Exception):
    """It is no call."""


class _Ended(Exception):
    """There are no more characters."""


class CallReader(ABC):
    """One answer's."""

    def __init__(self) -> None:
        self._said = Said()
        self._raw = ""  # read, and not yet known to be text
        self._calls = 0
        self._in_call = False
        self._arguments = ""  # written before the name, or not given out yet
        self._argued = False
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> Said:
        """What this text adds."""
        for char in text:
            self._reading.send(char)
        self._tell_arguments()
        said, self._said = self._said, Said()
        return said

    def flush(self) -> Said:
        """What was held back, at the end."""
        with suppress(_Ended):
            self._reading.throw(_Ended())
        if not self._in_call and not (self._calls and self._raw.isspace()):
            self._said.text += self._raw
        self._tell_arguments()
        said, self._said = self._said, Said()
        return said

    @abstractmethod
    def _read(self) -> Reading:
        """Reads an answer without end."""

    # ---- characters ---------------------------------------------------------------------------

    def _next(self) -> Found:
        char = yield
        if not self._in_call:
            self._raw += char
        return char

    def _solid(self) -> Found:
        """The next character that is no white space."""
        while (char := (yield from self._next())).isspace():
            pass
        return char

    def _opened(self, marker: str) -> Found:
        """Text up to the marker, and the first character behind that which is no white space."""
        yield from self._text_until(marker)
        return (yield from self._solid())

    def _text_until(self, *markers: str) -> Found:
        """Gives text out, up to the first of the markers; white space before it is dropped. Without
        markers, all that comes. What is in `_raw` already is text, too."""
        while True:
            for marker in markers:
                if self._raw.endswith(marker):
                    self._text(self._raw[: -len(marker)].rstrip())
                    self._raw = marker
                    return marker
            safe = len(self._raw) - max((_begun(self._raw, m) for m in markers), default=0)
            solid = len(self._raw[:safe].rstrip())
            self._text(self._raw[:solid])
            self._raw = self._raw[solid:]
            yield from self._next()

    def _skip_until(self, marker: str) -> Reading:
        """Drops all up to the marker, and it."""
        read = ""
        while not read.endswith(marker):
            read = (read + (yield from self._next()))[-len(marker) :]
        self._raw = ""

    def _text(self, text: str) -> None:
        self._said.text += text

    # ---- a call as a JSON object --------------------------------------------------------------

    def _object(self) -> Reading:
        """A call, behind its opening brace: {"name": …, "arguments": …}, in any order. Raises
        Malformed."""
        self._arguments, self._argued, named = "", False, False
        char = yield from self._solid()
        while char != "}":
            key = yield from self._string(char)
            if (char := (yield from self._solid())) != ":":
                raise Malformed
            char = yield from self._solid()
            if key in _NAME and not named:
                name = yield from self._string(char)
                if not is_callable(name):
                    raise Malformed
                self._begin(name)
                named = True
                char = yield from self._solid()
            elif key in _ARGUMENTS and not self._argued:
                self._argued = True
                char = yield from self._value(char)
            elif key in _BESIDE or named:
                char = yield from self._other_value(char)
            else:
                raise Malformed
            if char == ",":
                char = yield from self._solid()
            elif char != "}":
                raise Malformed
        if not named:
            raise Malformed
        self._end()

    def _begin(self, name: str) -> None:
        """The call is one, and is told."""
        self._said.calls.append(ToolCallDelta(index=self._calls, name=name))
        self._calls += 1
        self._in_call, self._raw = True, ""

    def _argue(self, text: str) -> None:
        self._arguments += text

    def _end(self) -> None:
        if not self._argued:
            self._argue("{}")
        self._tell_arguments()
        self._in_call = False

    def _tell_arguments(self) -> None:
        if self._in_call and self._arguments:
            index = self._calls - 1
            self._said.calls.append(ToolCallDelta(index=index, arguments=self._arguments))
            self._arguments = ""

    def _string(self, char: str) -> Found:
        """A string that begins with `char`, decoded."""
        if char != '"':
            raise Malformed
        written, escaped = char, False
        while True:
            char = yield from self._next()
            written += char
            if char == '"' and not escaped:
                break
            escaped = char == "\\" and not escaped
        try:
            decoded: str = json.loads(written, strict=False)
        except ValueError:
            raise Malformed from None
        return decoded.encode(errors="replace").decode()  # half of a surrogate pair is no text

    def _value(self, char: str) -> Found:
        """Arguments that begin with `char`; gives the next character behind them. Some models write
        the object into a string."""
        if char != '"':
            return (yield from self._raw_value(char, self._argue))
        self._argue((yield from self._string(char)))
        return (yield from self._solid())

    def _other_value(self, char: str) -> Found:
        return (yield from self._raw_value(char, lambda text: None))

    def _raw_value(self, char: str, out: Callable[[str], None]) -> Found:
        """A value that begins with `char`, as it is written; gives the next character behind it
        that is no white space."""
        depth, quoted, escaped, begun = 0, False, False, False
        while True:
            if not quoted and depth == 0 and (char in ",:]}" or char.isspace() or begun):
                break
            out(char)
            if quoted:
                quoted = char != '"' or escaped
                escaped = char == "\\" and not escaped
            elif char == '"':
                quoted = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
            begun = depth == 0 and not quoted and char in '"}]'
            char = yield from self._next()
        if char.isspace():
            char = yield from self._solid()
        return char

    def _call(self, char: str) -> Generator[None, str, bool]:
        """A call as a JSON object, if that is what begins with `char`; whether it was told, however
        it went on. If not, what was read of it is text."""
        try:
            if char != "{":
                raise Malformed
            yield from self._object()
        except Malformed:
            if not self._in_call:
                self._arguments = ""
                return False
            self._tell_arguments()
            self._in_call = False
        return True


def is_callable(name: str) -> bool:
    """A tool may have this name, and a message that calls it may be sent back."""
    return _CALLABLE.fullmatch(name) is not None


def _begun(text: str, marker: str) -> int:
    """How many of the last characters are a beginning of the marker."""
    for count in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-count:]):
            return count
    return 0
