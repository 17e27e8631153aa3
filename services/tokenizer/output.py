"""One request's way out: token ids to text, up to the end or the first stop string."""

from array import array
from collections.abc import Sequence

from protos.common_pb2 import FINISH_NONE, FINISH_STOP, FINISH_TOOL_CALLS, Usage
from protos.tokenizer_pb2 import Resume, TextDelta
from protos.worker_pb2 import TokenDelta
from services.tokenizer.answer_shape import Shape
from services.tokenizer.context import Prompt
from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.stop import StopStrings
from services.tokenizer.tool_parsers import Said


class CannotResumeError(Exception):
    """The answer was begun otherwise than this tokenizer would have."""


class Output:
    """Turns a request's TokenDeltas into TextDeltas. Plain calls, a few µs per token.

    What is given out depends on the tokens alone, not on the portions in which they come. So the
    tokens given out with a text are all that another tokenizer needs to go on behind it.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        prompt: Prompt,
        shape: Shape | None = None,
    ) -> None:
        """`shape`: tells text, reasoning and calls apart; None: all is text."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._one_by_one = bool(stops)
        self._prompt = prompt
        self._shape = shape
        self._begun = False  # something has gone out, the plan with it
        self._sent = 0  # of `token_ids`: the others gave no text yet
        self._cached_tokens: int | None = None  # as told first: later routers know of their own
        self.token_ids = array("I")
        self.finish = FINISH_NONE

    @property
    def stop(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.hit

    def resume(self, so_far: Resume) -> None:
        """Takes up what another tokenizer began; to call first. Raises CannotResumeError.

        Blocking: a few ms per 1,000 tokens.
        """
        told, own = so_far.plan, self._prompt.plan
        if (told, so_far.prompt_digest) != (own, self._prompt.digest):
            raise CannotResumeError("the prompt is not the same")
        (begun,) = so_far.choices
        said = self._shaped(self._text(begun.token_ids))
        if said.characters != begun.characters or self.stop is not None:
            raise CannotResumeError("the text is not the same")
        self._cached_tokens = begun.cached_tokens
        self._sent = len(self.token_ids)
        self._begun = True

    def push(self, delta: TokenDelta) -> TextDelta | None:
        """What may go out now, or None while there is nothing to say."""
        self.finish = delta.finish
        if self._cached_tokens is None and delta.HasField("usage"):
            self._cached_tokens = delta.usage.cached_tokens
        text = self._text(delta.token_ids)
        if self.finish and not self.stop:
            text += self._stops.push(self._detokenizer.flush())
        if self.stop is not None:
            self.finish = FINISH_STOP
        elif self.finish:
            text += self._stops.flush()
        said = self._shaped(text)
        if not (said.text or said.reasoning or said.calls or self.finish):
            return None
        out = TextDelta(
            text=said.text,
            reasoning=said.reasoning,
            tool_calls=said.calls,
            token_ids=self.token_ids[self._sent :],
            finish=self.finish,
        )
        self._sent = len(self.token_ids)
        if not self._begun:
            self._begun = True
            out.plan.CopyFrom(self._prompt.plan)
            out.prompt_digest = self._prompt.digest
            out.checkpoint = self._prompt.checkpoint
            out.usage.CopyFrom(self.usage())
        if self.finish:
            out.usage.CopyFrom(self.usage())
        return out

    def usage(self) -> Usage:
        """Of the whole request, up to now."""
        return Usage(
            prompt_tokens=len(self._prompt.token_ids),
            cached_tokens=self._cached_tokens or 0,
            completion_tokens=len(self.token_ids),
        )

    def _shaped(self, text: str) -> Said:
        """By kinds, and at the end with what was held back."""
        if self._shape is None:
            return Said(text)
        said = self._shape.push(text)
        if self.finish:
            last = self._shape.flush()
            said.add(last)
            if self._shape.called and self.finish == FINISH_STOP:
                self.finish = FINISH_TOOL_CALLS
        return said

    def _text(self, token_ids: Sequence[int]) -> str:
        if not self._one_by_one:
            self.token_ids.extend(token_ids)
            return self._detokenizer.push(token_ids)
        text = ""
        for id in token_ids:  # so that the tokens behind a stop string are not counted
            self.token_ids.append(id)
            text += self._stops.push(self._detokenizer.push((id,)))
            if self.stop is not None:
                break
        return text
