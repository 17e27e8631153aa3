"""Mistral's ways: a list behind a marker, and since its eleventh tokenizer a marker for each call.

[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]
[TOOL_CALLS]f[ARGS]{"x": 1}
"""

from services.common.text.lark import literal
from services.tokenizer.tool_parsers.reader import CallReader, Reading, is_callable
from services.tokenizer.tool_parsers.ways import Way, object_rule

MARK, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralReader(CallReader):
    def _read(self) -> Reading:
        while True:
            char = yield from self._opened(MARK)
            yield from self._list() if char == "[" else self._named(char)

    def _list(self) -> Reading:
        char = yield from self._solid()
        while (yield from self._call(char)):
            char = yield from self._solid()
            if char == ",":
                char = yield from self._solid()
            elif char == "]":
                self._raw = ""
                return

    def _named(self, char: str) -> Reading:
        name = char
        while not name.endswith(("{", ARGUMENTS)):
            name += yield from self._next()
        opens = name.endswith("{")
        name = name.removesuffix("{").removesuffix(ARGUMENTS).split(ID)[0].strip()
        if not is_callable(name):
            return  # it is text
        self._begin(name)
        self._argued = True
        behind = yield from self._value("{" if opens else (yield from self._solid()))
        self._end()
        self._raw = behind


class Mistral(Way):
    name = "mistral"
    markers = (MARK, ARGUMENTS, ID)
    reader = MistralReader
    several = True

    def call(self, tool: str, arguments: str) -> str:
        if self._by_name:
            named = f"{self.marker(MARK)} {literal(tool)} {self.marker(ARGUMENTS)}"
            return f"{named} {arguments}"
        return object_rule(tool, arguments)

    def calls(self, one: bool) -> str:
        if self._by_name:
            return super().calls(one)
        more = "" if one else '(", " call)*'
        return f'{self.marker(MARK)} "[" call {more} "]"'

    @property
    def _by_name(self) -> bool:
        return ARGUMENTS in self._template
