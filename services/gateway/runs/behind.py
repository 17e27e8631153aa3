"""An answer that is made again: what it says beyond what was told of it before."""

from collections.abc import Sequence

from protos.tokenizer_pb2 import TextDelta, ToolCallDelta
from services.common.errors import PenstockError, unavailable


class Behind:
    """Where the tokens of an answer's beginning are not known, for the policy may have redacted
    what they say: the seed gives the same text, which is held to what was told."""

    def __init__(self, told: Sequence[TextDelta]) -> None:
        self._text = "".join(delta.text for delta in told)
        self._reasoning = "".join(delta.reasoning for delta in told)
        self._logprobs = sum(len(delta.logprobs) for delta in told)
        self._names: dict[int, str] = {}
        self._arguments: dict[int, str] = {}
        for call in (call for delta in told for call in delta.tool_calls):
            self._names.setdefault(call.index, call.name)
            before = self._arguments.get(call.index, "")
            self._arguments[call.index] = before + call.arguments

    def of(self, deltas: Sequence[TextDelta]) -> list[TextDelta]:
        """What of them was not told. Raises UNAVAILABLE where they say something else."""
        return [delta for delta in deltas if self._cut(delta)]

    def _cut(self, delta: TextDelta) -> bool:
        """Whether something of it is left."""
        delta.text, self._text = _behind(delta.text, self._text)
        delta.reasoning, self._reasoning = _behind(delta.reasoning, self._reasoning)
        calls = [call for call in delta.tool_calls if self._cut_call(call)]
        del delta.tool_calls[:]
        delta.tool_calls.extend(calls)
        known = min(self._logprobs, len(delta.logprobs))
        del delta.logprobs[:known]
        self._logprobs -= known
        if delta.finish and (self._text or self._reasoning or any(self._arguments.values())):
            raise _cannot_resume()
        return bool(delta.text or delta.reasoning or calls or delta.logprobs or delta.finish)

    def _cut_call(self, call: ToolCallDelta) -> bool:
        if call.name and call.index in self._names:
            if call.name != self._names[call.index]:
                raise _cannot_resume()
            call.name = ""
        told = self._arguments.get(call.index, "")
        call.arguments, self._arguments[call.index] = _behind(call.arguments, told)
        return bool(call.name or call.arguments)


def _behind(text: str, told: str) -> tuple[str, str]:
    """What of `text` was not told yet, and what was told and has not come again."""
    both = min(len(text), len(told))
    if text[:both] != told[:both]:
        raise _cannot_resume()
    return text[both:], told[both:]


def _cannot_resume() -> PenstockError:
    return unavailable(
        "the answer cannot be gone on with: it would be another one",
        stage="gateway",
        reason="cannot_resume",
    )
