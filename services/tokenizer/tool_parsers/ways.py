"""How a checkpoint's model writes calls: what reads them, and what makes it write them."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from services.common.text.lark import literal
from services.tokenizer.tool_parsers.reader import CallReader


def object_rule(tool: str, arguments: str, key: str = "arguments") -> str:
    """A call as a JSON object, spaced as `json.dumps` does; `arguments`: a rule's name."""
    head = f'{{"name": {json.dumps(tool)}, "{key}": '
    return f'{literal(head)} {arguments} "}}"'


def without(*texts: str) -> str:
    """A terminal in a Lark grammar: any text in which none of these is."""
    those = "|".join(re.escape(text).replace("/", r"\/") for text in texts)
    return f"/(?s:.*)/ & ~/(?s:.*({those}).*)/"


class Way(ABC):
    """Of one checkpoint. Rules are in Lark's notation, as llguidance reads it."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]
    """Texts that may be tokens of their own; those that would not be shown, are."""
    reader: ClassVar[type[CallReader]]
    several: ClassVar[bool]
    """The checkpoint's template takes several calls in an answer."""
    either: ClassVar[str] = "TEXT calls?"
    """The rule of an answer that may be text, calls, or both."""
    between: ClassVar[str] = ""
    """A rule of what stands between two."""

    def __init__(self, tokens: Mapping[str, int], template: str) -> None:
        """`tokens`: ids of added tokens, by their texts."""
        self._tokens = tokens
        self._template = template

    @classmethod
    def suits(cls, template: str) -> bool:
        """Whether the chat template speaks of calls so."""
        return cls.markers[0] in template

    @abstractmethod
    def call(self, tool: str, arguments: str) -> str:
        """The rule of a call; `arguments`: the name of their rule."""

    def calls(self, one: bool) -> str:
        """The rule of all calls of an answer, from the rule `call`."""
        return "call" if one or not self.several else f"call ({self.between} call)*"

    def text(self) -> str:
        """The terminal TEXT in it."""
        return without(*self.markers)

    def marker(self, text: str) -> str:
        """Its rule: the token, where it is one."""
        return f"<[{self._tokens[text]}]>" if self.is_token(text) else literal(text)

    def is_token(self, text: str) -> bool:
        return text in self._tokens

    @property
    def tells_apart(self) -> bool:
        """Where a text ends and calls begin, a grammar can say: at a token."""
        return self.is_token(self.markers[0])
