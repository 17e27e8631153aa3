"""One answer's text by its kinds: reasoning first, where the model marks it, then text and calls.

What is given out depends on the text alone, not on the portions in which it comes.
"""

from dataclasses import dataclass

from services.tokenizer.tool_parsers import CallReader, Said


@dataclass(frozen=True)
class ReasoningMarks:
    """Between which a model reasons before it answers."""

    opens: str
    closes: str


KNOWN_MARKS = {
    "think": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
}


class Reasoning:
    """Splits off what comes between the marks, at the answer's beginning. White space around it
    belongs to neither."""

    def __init__(self, marks: ReasoningMarks, opened: bool) -> None:
        """`opened`: the prompt ends within the marks."""
        self._marks = marks
        self._inside = opened
        self._over = False
        self._said = False  # some reasoning was given out
        self._gap = False  # what comes is behind the reasoning, before the answer's first word
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning, and what is none."""
        if self._over and not self._gap:
            return "", text
        self._held += text
        reasoning = ""
        if not (self._inside or self._over):
            self._begin()
        if self._inside:
            reasoning = self._reason()
        return reasoning, self._rest() if self._over else ""

    def flush(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._inside:
            return held.rstrip(), ""
        return "", held

    def _begin(self) -> None:
        solid = self._held.lstrip()
        if solid.startswith(self._marks.opens):
            self._inside = True
            self._held = solid[len(self._marks.opens) :]
        elif not self._marks.opens.startswith(solid):
            self._over = True

    def _reason(self) -> str:
        closes = self._marks.closes
        if not self._said:
            self._held = self._held.lstrip()
        end = self._held.find(closes)
        if end >= 0:
            found, self._held = self._held[:end].rstrip(), self._held[end + len(closes) :]
            self._inside, self._over, self._gap = False, True, True
        else:
            safe = next(
                len(self._held) - n
                for n in range(min(len(closes) - 1, len(self._held)), -1, -1)
                if self._held.endswith(closes[:n])
            )
            found = self._held[:safe].rstrip()
            self._held = self._held[len(found) :]
        self._said = self._said or bool(found)
        return found

    def _rest(self) -> str:
        rest, self._held = self._held, ""
        if self._gap:
            rest = rest.lstrip()
            self._gap = not rest
        return rest


class Shape:
    """What an Output makes of its text."""

    def __init__(
        self, reasoning: Reasoning | None, calls: CallReader | None, one_call: bool = False
    ) -> None:
        """`one_call`: what the model calls beside the first is left out."""
        self._reasoning = reasoning
        self._calls = calls
        self._one_call = one_call
        self.called = False
        """There was a call."""

    def push(self, text: str) -> Said:
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        return self._shaped(reasoning, text)

    def flush(self) -> Said:
        """What was held back, at the end."""
        reasoning, text = self._reasoning.flush() if self._reasoning is not None else ("", "")
        said = self._shaped(reasoning, text)
        if self._calls is not None:
            said.add(self._counted(self._calls.flush()))
        return said

    def _shaped(self, reasoning: str, text: str) -> Said:
        said = Said(text) if self._calls is None else self._counted(self._calls.push(text))
        said.reasoning = reasoning
        return said

    def _counted(self, said: Said) -> Said:
        if self._one_call:
            said.calls = [call for call in said.calls if not call.index]
        self.called = self.called or bool(said.calls)
        return said
