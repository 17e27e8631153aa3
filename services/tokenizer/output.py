"""One request's way out: token ids to text, up to the end or the first stop string."""

from collections.abc import Sequence

from protos.common_pb2 import FINISH_NONE, FINISH_STOP, Usage
from protos.tokenizer_pb2 import PromptPlan, TextDelta
from protos.worker_pb2 import TokenDelta
from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.stop import StopStrings


class Output:
    """Turns a request's TokenDeltas into TextDeltas. Plain calls, a few µs per token."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], plan: PromptPlan, prompt_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._one_by_one = bool(stops)
        self._plan: PromptPlan | None = plan  # until it has gone out
        self._unsent = 0  # tokens that gave no text yet
        self._usage = Usage(prompt_tokens=prompt_tokens)
        self.tokens = 0
        self.finish = FINISH_NONE

    @property
    def stop(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.hit

    def push(self, delta: TokenDelta) -> TextDelta | None:
        """What may go out now, or None while there is nothing to say."""
        self.finish = delta.finish
        if delta.HasField("usage"):
            self._usage = delta.usage
        text = self._text(delta.token_ids)
        if self.finish and not self.stop:
            text += self._stops.push(self._detokenizer.flush())
        if self.stop is not None:
            self.finish = FINISH_STOP
        elif self.finish:
            text += self._stops.flush()
        if not text and not self.finish:
            return None
        out = TextDelta(text=text, tokens=self._unsent, finish=self.finish)
        self._unsent = 0
        if self._plan is not None:
            out.plan.CopyFrom(self._plan)
            self._plan = None
        if self.finish:
            out.usage.CopyFrom(self._usage)
            if self.stop is not None:
                out.usage.completion_tokens = self.tokens
        return out

    def _text(self, token_ids: Sequence[int]) -> str:
        if not self._one_by_one:
            self._count(len(token_ids))
            return self._detokenizer.push(token_ids)
        text = ""
        for id in token_ids:  # so that the tokens behind a stop string are not counted
            self._count(1)
            text += self._stops.push(self._detokenizer.push((id,)))
            if self.stop is not None:
                break
        return text

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        self._unsent += tokens
