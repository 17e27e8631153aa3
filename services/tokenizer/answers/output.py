"""One request's way out: token ids to text, up to the end or the first stop string."""

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from protos.common_pb2 import (
    FINISH_CONTENT_FILTER,
    FINISH_NONE,
    FINISH_STOP,
    FINISH_TOOL_CALLS,
    Usage,
)
from protos.tokenizer_pb2 import Echo, Resume, TextDelta, TextLogprob
from protos.worker_pb2 import TokenDelta
from services.common.event import Event
from services.common.policy import RuleSpec
from services.tokenizer.answers.answer_policy import AnswerPolicy
from services.tokenizer.answers.answer_shape import Shape
from services.tokenizer.answers.detokenizer import Detokenizer
from services.tokenizer.answers.stop import StopStrings
from services.tokenizer.answers.token_texts import TokenTexts
from services.tokenizer.prompts.context import Prompt
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
        choice: int = 0,
        min_tokens: int = 0,
        texts: TokenTexts | None = None,
        echo: str | None = None,
        policy: AnswerPolicy | None = None,
        first: TextDelta | None = None,
        keeps: bool = False,
    ) -> None:
        """`shape`: tells text, reasoning and calls apart; None: all is text. `min_tokens`: before
        which stop strings do not count; `texts`: logprobs are wanted; `echo`: the prompt as it is
        to come back; `policy`: on the answer; None: no rule is for it; `first`: what else the first
        delta tells; `keeps`: `told` is wanted."""
        self._choice = choice
        self._draft_tokens = self._accepted_tokens = 0
        self._min_tokens = min_tokens
        self._texts = texts
        self._logprobs: list[TextLogprob] = []  # of tokens that were not sent yet
        self._echo = None if echo is None else Echo(text=echo)
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._one_by_one = bool(stops) or policy is not None or texts is not None
        self._policy = policy
        self._first = first
        self._known_hits: Counter[tuple[str, str, str]] = Counter()
        self._characters = 0  # of text that tokens gave, before the policy
        self._decoded = 0  # the same, with what may be a stop string's
        self._prompt = prompt
        self._shape = shape
        self._begun = False  # something has gone out, the plan with it
        self._sent = 0  # of `token_ids`: the others gave no text yet
        self._cached_tokens: int | None = None  # as told first: later routers know of their own
        self.token_ids = array("I")
        self._keeps = keeps
        self.told: list[str] = []  # of the answer's text
        self.reasoned = False  # some of it was reasoning
        self.begun = Event()  # tokens have come
        self.finish = FINISH_NONE

    @property
    def stop(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.hit

    @property
    def _told_stop(self) -> str:
        """The same, as far as that may be told."""
        hidden = self._policy is not None and self._policy.hides_stop
        return "" if hidden or not self.finish else self.stop or ""

    @property
    def blocked(self) -> RuleSpec | None:
        """The rule of the policy that ended the output."""
        return None if self._policy is None else self._policy.blocked

    @property
    def hits(self) -> Counter[tuple[str, str, str]]:
        """How often rules matched in what was made of it here: rule, action, place."""
        if self._policy is None:
            return Counter()
        return self._policy.hits - self._known_hits

    @property
    def _over(self) -> bool:
        """Whether it ended itself, whatever else comes."""
        return self.stop is not None or self.blocked is not None

    def resume(self, so_far: Resume) -> None:
        """Takes up what another tokenizer began; to call first. Raises CannotResumeError.

        Blocking: a few ms per 1,000 tokens.
        """
        told, own = so_far.plan, self._prompt.plan
        if (told, so_far.prompt_digest) != (own, self._prompt.digest):
            raise CannotResumeError("the prompt is not the same")
        begun = next((one for one in so_far.choices if one.choice == self._choice), None)
        if begun is None:
            return
        if begun.finished:
            self.token_ids.extend(begun.token_ids)
            self.finish = FINISH_STOP  # of whatever kind: the gateway has it
            return
        said, _, _ = self._take(begun.token_ids)
        if said.characters != begun.characters or self._over:
            raise CannotResumeError("the text is not the same")
        if self._policy is not None:
            self._policy.skip(self._characters)
            self._known_hits = self.hits
        self._cached_tokens = begun.cached_tokens
        self._draft_tokens = begun.draft_tokens
        self._accepted_tokens = begun.accepted_tokens
        self._sent = len(self.token_ids)
        self._begun = True
        self.begun.set()

    def push(self, delta: TokenDelta) -> TextDelta | None:
        """What may go out now, or None while there is nothing to say."""
        self.finish = delta.finish
        self._draft_tokens += delta.draft_tokens
        self._accepted_tokens += delta.accepted_tokens
        if self._cached_tokens is None and delta.HasField("usage"):
            self._cached_tokens = delta.usage.cached_tokens
        self._begin(delta)
        said, starts, ends = self._take(delta.token_ids)
        told = self._tell(delta, starts) if self._texts is not None else []
        if self.finish and not self._over:
            said.add(self._allowed(self._detokenizer.flush()))
        if self.stop is not None:
            self.finish = FINISH_STOP
        if self.finish and self.blocked is None:
            said.add(self._flushed())
        if self.blocked is not None:
            self.finish = FINISH_CONTENT_FILTER
        if self._policy is None:
            self._logprobs += told
        elif self._texts is not None:
            self._policy.tell(ends[: len(told)], told)
            self._logprobs += self._policy.told(ended=bool(self.finish))
        if not (said.text or said.reasoning or said.calls or self.finish):
            return None
        out = TextDelta(
            text=said.text,
            reasoning=said.reasoning,
            tool_calls=said.calls,
            token_ids=self.token_ids[self._sent :],
            finish=self.finish,
            choice=self._choice,
            logprobs=self._logprobs,
            stop=self._told_stop,
        )
        self._sent = len(self.token_ids)
        self._logprobs.clear()
        if self._keeps:
            self.told.append(said.text)
            self.reasoned = self.reasoned or bool(said.reasoning)
        if self.finish or not self._begun or self._draft_tokens:
            out.usage.CopyFrom(self.usage())
        if not self._begun:
            self._begun = True
            if self._first is not None:
                out.MergeFrom(self._first)
                self._first = None
            out.plan.CopyFrom(self._prompt.plan)
            out.prompt_digest = self._prompt.digest
            out.checkpoint = self._prompt.checkpoint
            if self._echo is not None:
                out.echo.CopyFrom(self._echo)
        return out

    def usage(self) -> Usage:
        """Of the whole request, up to now."""
        return Usage(
            prompt_tokens=len(self._prompt.token_ids),
            cached_tokens=self._cached_tokens or 0,
            completion_tokens=len(self.token_ids),
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def _flushed(self) -> Said:
        """What was held back, by kinds, at the end."""
        said = Said()
        if self._shape is not None and self.stop is None:
            said = self._shape.flush()
            said.text = self._stopped(said.text)
        if self.stop is not None:
            self.finish = FINISH_STOP
        if self._shape is not None and self._shape.called and self.finish == FINISH_STOP:
            self.finish = FINISH_TOOL_CALLS
        held = self._stops.flush()
        said.text += held
        if self._policy is not None:
            said = self._policy.push(said, held if self._shape is None else "")
            said.add(self._policy.flush(self.stop or ""))
        return said

    def _allowed(self, text: str) -> Said:
        """New text by its kinds, as far as it may leave."""
        said, raw = self._cut(text)
        self._characters += len(raw)
        return said if self._policy is None else self._policy.push(said, raw)

    def _cut(self, text: str) -> tuple[Said, str]:
        """New text by its kinds, up to the first stop string, and what that is made of. Stop
        strings are of the answer's text: a call's arguments are not cut, nor reasoning."""
        if self._shape is None:
            text = self._stopped(text)
            return Said(text), text
        if not self._stops:
            return self._shape.push(text), text
        said = Said()
        for place, char in enumerate(text, 1):
            new = self._shape.push(char)
            new.text = self._stopped(new.text)
            if new.calls and self.stop is None:
                new.text += self._stops.flush()  # no stop string goes on behind a call
            said.add(new)
            if self.stop is not None:
                return said, text[:place]
        return said, text

    def _stopped(self, text: str) -> str:
        return self._stops.push(text) if len(self.token_ids) > self._min_tokens else text

    def _begin(self, delta: TokenDelta) -> None:
        if delta.token_ids:
            self.begun.set()
        if self._echo is None or self._texts is None or self._echo.logprobs:
            return
        ids = self._prompt.token_ids.tolist()
        if delta.token_ids and len(delta.prompt_logprobs) == len(ids) - 1:
            offsets = self._texts.offsets(ids, self._echo.text)
            of_each = zip(ids, (None, *delta.prompt_logprobs), offsets, strict=True)
            self._echo.logprobs.extend(self._texts.told(*one) for one in of_each)

    def _tell(self, delta: TokenDelta, starts: Sequence[int]) -> list[TextLogprob]:
        """Of the tokens that were taken, but for the end token; what a grammar ends with is text.
        `starts`: of each in the answer's text."""
        assert self._texts is not None
        taken = len(starts)
        ended = self.finish == FINISH_STOP and not self._over and taken > 0
        ended = ended and self._texts.is_special(delta.token_ids[taken - 1])
        count = taken - 1 if ended else taken
        of_each = zip(delta.token_ids, delta.logprobs, starts, strict=False)
        return [self._texts.told(*one) for one in islice(of_each, count)]

    def _take(self, token_ids: Sequence[int]) -> tuple[Said, list[int], list[int]]:
        """What they give, and where each that counts begins and ends in the answer's text: it ends
        where that was found to be no stop string's. One by one, as far as anybody asks for that."""
        if not self._one_by_one:
            self.token_ids.extend(token_ids)
            return self._allowed(self._detokenizer.push(token_ids)), [], []
        said = Said()
        starts: list[int] = []
        ends: list[int] = []
        for id in token_ids:  # so that the tokens behind a stop string are not counted
            self.token_ids.append(id)
            new = self._detokenizer.push((id,))
            starts.append(self._decoded)
            self._decoded += len(new)
            said.add(self._allowed(new))
            ends.append(self._characters)
            if self._over:
                break
        return said, starts, ends
