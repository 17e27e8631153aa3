"""Llama 3's way: the whole answer is a call, with or without a marker before it.

    <|python_tag|>{"name": "f", "parameters": {"x": 1}}

Llama 3.1's template takes one call in a message; models write several behind each other, with a
semicolon between.
"""

from typing import ClassVar

from services.tokenizer.tool_parsers.reader import CallReader, Reading
from services.tokenizer.tool_parsers.ways import Way, object_rule

MARK = "<|python_tag|>"


class Llama3Reader(CallReader):
    def _read(self) -> Reading:
        yield from self._answer((yield from self._solid()))
        yield from self._text_until()  # whatever else there is, is text

    def _answer(self, char: str) -> Reading:
        """One that begins with this character, as far as it is calls."""
        if char != "{":
            char = yield from self._opened(MARK)
        while (yield from self._call(char)):
            char = yield from self._solid()
            if char in ";,":
                char = yield from self._solid()


class Llama3(Way):
    name = "llama3"
    markers: ClassVar[tuple[str, ...]] = (MARK,)
    reader = Llama3Reader
    several = False
    either = "TEXT | calls"

    @classmethod
    def suits(cls, template: str) -> bool:
        return MARK in template or '"parameters": ' in template

    @property
    def tells_apart(self) -> bool:
        return True  # by the first character

    def text(self) -> str:
        return r"/(?s:[^{ \n].*)/"

    def call(self, tool: str, arguments: str) -> str:
        return object_rule(tool, arguments, "parameters")
