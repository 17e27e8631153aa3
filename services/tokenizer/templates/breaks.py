"""Breaks up the tokens that are written out by who may not make them, before a template sees them:
so none is made, whatever the template does with the text. In the rendered prompt breaks become cuts
(rendered.py), at which the text is tokenized apart.
"""

import re
import secrets
from collections.abc import Iterable
from typing import Any

BREAK = f"{secrets.randbelow(10**10):010}-{secrets.randbelow(10**10):010}"
"""Stands in tokens that are written out by who may not make them, for as long as the template has
them: digits are the same in JSON, in Python's notation and in capitals, nobody guesses so many, and
no mark has a dash.
"""


class Breaks:
    """Of one template. Read from several threads once it is made."""

    def __init__(self, control: Iterable[str], added: Iterable[str], mark: re.Pattern[str]) -> None:
        """`control`: what the template alone writes; `added`: the tokenizer's other added tokens;
        `mark`: what stands for a content."""
        self._control, self._added = {*control}, {*added}
        self._of_answers: set[str] = set()
        self._clients = re.compile(f"{_any(self._control)}|{mark.pattern}")
        edges = {character for token in self._control for character in (token[0], token[-1])}
        self._edges = re.compile(_any({*edges, mark.pattern[0]}))  # most texts have none
        halves = [(token[:n], token[n:]) for token in self._control for n in range(1, len(token))]
        self._begun = re.compile(f"(?:{_any(one for one, _ in halves if not one.isalnum())})\\Z")
        self._ended = re.compile(_any(one for _, one in halves if not one.isalnum()))
        self.keep(())

    def keep(self, marks: Iterable[str]) -> None:
        """From others: where they are tokens, neither a passage nor a tool's result makes them."""
        self._of_answers |= self._added.intersection(marks)
        self._others = re.compile(_any({*self._control, *self._of_answers}))

    def by_others(self, text: str) -> str:
        """Of a passage or a tool's result: without control tokens and those by which answers are
        read."""
        return _broken(text, self._others)

    def by_clients(self, value: Any) -> Any:
        """Of what a template shows beside contents, an object: without control tokens and marks in
        its texts, and apart from what stands beside them where both could make one."""
        match value:
            case str() if self._edges.search(value):
                value = _broken(value, self._clients)
                ends = BREAK if self._begun.search(value) else ""
                return f"{BREAK if self._ended.match(value) else ''}{value}{ends}"
            case dict():
                return {self.by_clients(k): self.by_clients(v) for k, v in value.items()}
            case list():
                return [self.by_clients(one) for one in value]
        return value


def _any(texts: Iterable[str]) -> str:
    """The longest first."""
    return "|".join(map(re.escape, sorted({*texts}, key=len, reverse=True))) or r"(?!)"


def _broken(text: str, tokens: re.Pattern[str]) -> str:
    """Behind each first character of a token is a break."""
    return tokens.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)
