"""The demonstration model's way: Hermes', on one line.

<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
"""

from services.tokenizer.tool_parsers.hermes import CLOSES, OPENS, Hermes
from services.tokenizer.tool_parsers.ways import object_rule


class Demo(Hermes):
    name = "demo"
    between = ""

    @classmethod
    def suits(cls, template: str) -> bool:
        return "<tool_call>{" in template

    def call(self, tool: str, arguments: str) -> str:
        return f"{self.marker(OPENS)} {object_rule(tool, arguments)} {self.marker(CLOSES)}"
