"""Hermes' way, which Qwen 2.5 and 3 and others have:

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

from services.tokenizer.tool_parsers.reader import CallReader, Reading
from services.tokenizer.tool_parsers.ways import Way, object_rule

OPENS, CLOSES = "<tool_call>", "</tool_call>"


class HermesReader(CallReader):
    def _read(self) -> Reading:
        while True:
            if (yield from self._call((yield from self._opened(OPENS)))):
                yield from self._skip_until(CLOSES)


class Hermes(Way):
    name = "hermes"
    markers = (OPENS, CLOSES)
    reader = HermesReader
    several = True

    def call(self, tool: str, arguments: str) -> str:
        body = object_rule(tool, arguments)
        return f'{self.marker(OPENS)} "\\n" {body} "\\n" {self.marker(CLOSES)}'

    between = '"\\n"'
