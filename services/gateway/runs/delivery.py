"""How an answer leaves for its client: as it comes, in portions that grow with the load, or whole.

stream   each delta at once; those that waited for the client leave as one
hybrid   the same after a pause, none while little runs and the longest when all slots are taken:
         more text in fewer events, so that many streams cost less each
hold     nothing before all of it is known; what the policy blocked leaves not at all
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from protos.common_pb2 import FINISH_CONTENT_FILTER
from protos.tokenizer_pb2 import TextDelta, ToolCallDelta
from services.gateway.runs.prompt import Answer
from services.gateway.runs.text_stream import TextStream

Mode = Literal["stream", "hybrid", "hold"]


class Delivery:
    """Of the answers to one prompt."""

    def __init__(self, mode: Mode, longest_s: float, load: Callable[[], float]) -> None:
        """`longest_s`: of hybrid's pauses; `load`: 0 with nothing to do, 1 with all slots taken."""
        self._mode = mode
        self._longest_s = longest_s
        self._load = load

    @property
    def pauses(self) -> bool:
        """Whether it may gather what comes."""
        return self._mode == "hybrid"

    def ready(self, deltas: Sequence[TextDelta]) -> Sequence[TextDelta]:
        """What of these may leave now. The policy may have the answers held, whatever was asked."""
        if any(delta.hold for delta in deltas):
            self._mode = "hold"
        return () if self._mode == "hold" else deltas

    def rest(self, answer: Answer) -> Sequence[TextDelta]:
        """What was held of an answer that is complete. Of one that was blocked nothing is left."""
        if self._mode != "hold":
            return ()
        if answer.finish == FINISH_CONTENT_FILTER:
            answer.withdraw()
            return ()
        return [whole_of(answer)]

    async def pause(self, stream: TextStream) -> None:
        """Before the next look at what has come; not once it has ended."""
        if self.pauses:
            await stream.gather(self._longest_s * min(1.0, self._load()))


def whole_of(answer: Answer) -> TextDelta:
    """All that has come of it, in one."""
    calls = [
        ToolCallDelta(index=index, name=call.name, arguments=call.arguments)
        for index, call in enumerate(answer.calls)
    ]
    return TextDelta(
        text=answer.text,
        reasoning=answer.reasoning,
        tool_calls=calls,
        logprobs=answer.logprobs,
        choice=answer.choice,
    )


def joined(deltas: Iterable[TextDelta]) -> list[TextDelta]:
    """The same in as few as say it: text to text, reasoning to reasoning. Changes the first."""
    found: list[TextDelta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if last is not None and _kind(last) == _kind(delta) != "":
            text, reasoning = last.text + delta.text, last.reasoning + delta.reasoning
            last.MergeFrom(delta)
            last.text, last.reasoning = text, reasoning
        else:
            found.append(delta)
    return found


def _kind(delta: TextDelta) -> str:
    """Empty for what stands for itself."""
    if delta.tool_calls:
        return ""
    if not delta.reasoning:
        return "text"
    return "" if delta.text else "reasoning"
