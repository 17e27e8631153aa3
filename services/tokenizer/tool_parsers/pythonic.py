"""Llama 3.2's and Llama 4's other way: the whole answer is a list of calls in Python.

    [f(x=1, y="a"), g()]
    <|python_start|>[f(x=1)]<|python_end|>

A call is told when it is whole, as its arguments are to be JSON. Where a call is forced the model
is held to Llama 3's JSON, which these models know, too.
"""

import ast
import json
from collections.abc import Generator
from typing import ClassVar

from services.tokenizer.tool_parsers.llama3 import Llama3, Llama3Reader
from services.tokenizer.tool_parsers.reader import Found, Malformed, Reading, is_callable

OPENS, CLOSES = "<|python_start|>", "<|python_end|>"
_LONGEST = 64 * 1024  # characters of a call's arguments


class PythonicReader(Llama3Reader):
    def _read(self) -> Reading:
        char = yield from self._solid()
        if char == "[":
            yield from self._list()
        elif char == OPENS[0]:
            if (yield from self._opened(OPENS)) == "[" and (yield from self._list()):
                yield from self._text_until(CLOSES)
                self._raw = ""
        else:
            yield from self._answer(char)
        yield from self._text_until()  # whatever else there is, is text

    def _list(self) -> Generator[None, str, bool]:
        """Calls behind an opening bracket, up to the closing one; whether it came. From what is no
        call on, all is text."""
        try:
            while True:
                yield from self._python_call()
                if (char := (yield from self._solid())) == "]":
                    self._raw = ""
                    return True
                if char != ",":
                    return False
        except Malformed:
            return False

    def _python_call(self) -> Reading:
        name = ""
        while not name.endswith("("):
            name += yield from self._next()
            if len(name) > 80:
                raise Malformed
        name = name[:-1].strip()
        if not is_callable(name):
            raise Malformed
        arguments = _as_json((yield from self._parenthesis()))
        self._begin(name)
        self._argued = True
        self._argue(arguments)
        self._end()

    def _parenthesis(self) -> Found:
        """What is in it, behind its opening."""
        read: list[str] = []
        depth, quote, escaped = 0, "", False
        while True:
            char = yield from self._next()
            if quote:
                quote = "" if char == quote and not escaped else quote
                escaped = char == "\\" and not escaped
            elif char in "\"'":
                quote = char
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                if not depth:
                    return "".join(read)
                depth -= 1
            read.append(char)
            if depth > 50 or len(read) > _LONGEST:
                raise Malformed


class Pythonic(Llama3):
    name = "pythonic"
    markers: ClassVar[tuple[str, ...]] = (OPENS, CLOSES)
    reader = PythonicReader

    @classmethod
    def suits(cls, template: str) -> bool:
        return OPENS in template or "func_name1(" in template

    def text(self) -> str:
        return r"/(?s:[^{\[< \n].*)/"


def _as_json(source: str) -> str:
    """Keyword arguments of literals. Raises Malformed."""
    try:
        call = ast.parse(f"f({source})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(one.arg is None for one in call.keywords):
            raise Malformed
        values = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        told = json.dumps(values, ensure_ascii=False, allow_nan=False)
        told.encode()  # half a character, which Python's literals may hold, is no text
        return told
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, AssertionError):
        raise Malformed from None
