"""What the pipeline takes in and gives out, whichever way the request came."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from protos.common_pb2 import FINISH_NONE, FinishReason, Passage, Searched, Usage
from protos.retrieval_pb2 import Filter, Ranking
from protos.tokenizer_pb2 import (
    Echo,
    PromptPlan,
    PromptRequest,
    Redacted,
    TextDelta,
    TextLogprob,
)
from services.common.text.content import text_of
from services.gateway.runs.citations import Checked, check


@dataclass
class SoFar:
    """What another gateway told of a prompt's answers."""

    deltas: list[TextDelta]  # of all of them, in order
    created: int
    anew: bool  # their tokens are not known: they are made again, and are to be the same

    def of(self, choice: int) -> list[TextDelta]:
        return [delta for delta in self.deltas if delta.choice == choice]


@dataclass
class Prompt:
    """A validated generation request. `request` lacks only the caller and retrieved passages."""

    _request: PromptRequest | bytes
    stores: tuple[str, ...] = ()  # ids of vector stores to search
    max_chunks: int = 0
    question: str = ""  # what they are searched for
    filter: Filter | None = None  # of passages, by their files' attributes
    score_threshold: float = 0.0  # of passages with a lower score none
    ranking: Ranking | None = None
    tags: dict[str, str] = field(default_factory=dict)  # the client's own, shown in the record
    delivery: str = ""  # stream, hybrid or hold, if the client says
    form: str = ""  # the client's field that says what the answer must look like
    param: str = ""  # of several prompts in one request, which this is: "prompt[1]"
    so_far: SoFar | None = None
    search: Searched | None = None  # how the stores were searched

    @property
    def request(self) -> PromptRequest:
        """To be changed by whoever asks for it."""
        if isinstance(self._request, bytes):
            self._request = PromptRequest.FromString(self._request)
        return self._request

    def put_away(self) -> bytes:
        """It serialized: all that is kept until somebody asks for it again. As a message it takes
        more than a kilobyte beside its texts, as long as its answer lasts."""
        if not isinstance(self._request, bytes):
            self._request = self._request.SerializeToString()
        return self._request

    @property
    def text(self) -> str:
        """What is asked, for an operator who has switched on that prompts are shown."""
        if self.request.HasField("chat"):
            return "\n".join(f"{m.role}: {text_of(m)}" for m in self.request.chat.messages)
        return self.request.text or f"{len(self.request.token_ids.ids)} token ids"


@dataclass
class Call:
    """Of a tool."""

    name: str
    pieces: list[str]  # of its arguments

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


_NO_USAGE = Usage()  # yet: of all answers


@dataclass
class Answer:
    """A generation's outcome, filled as it comes in."""

    request_id: str
    model: str
    passages: list[Passage]  # offered to the prompt, best first
    index: int = 0  # among all of the request
    choice: int = 0  # among those to its prompt
    warnings: list[str] = field(default_factory=list)  # what was asked for and is left out
    search: Searched | None = None  # how its prompt's stores were searched
    created: int = field(default_factory=lambda: int(time.time()))
    pieces: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # pieces of reasoning
    calls: list[Call] = field(default_factory=list)  # of tools
    logprobs: list[TextLogprob] = field(default_factory=list)
    wants_logprobs: bool = False
    echo: Echo | None = None  # the prompt, where it is to come back
    finish: FinishReason = FINISH_NONE
    stop: str = ""  # the stop string that ended it
    usage: Usage = field(default_factory=lambda: _NO_USAGE)  # of the whole answer
    # What is known from the first delta on, serialized: a part of it as a message holds all of it.
    _known: bytes = b""  # a Usage
    _plan: bytes = b""
    arrived: float = 0.0  # the last of it, monotonic seconds; 0: nothing yet
    began: float = 0.0  # the first of it, likewise
    tokens: int = 0  # that came
    tokens_since: int = 0  # that came behind the first arrival

    def add(self, deltas: list[TextDelta]) -> tuple[int, float]:
        """Takes in what arrived; returns how many tokens that were, and the seconds since the
        arrival before, 0 for the first.
        """
        now = time.monotonic()
        gap_s = now - self.arrived if self.arrived else 0.0
        self.arrived = now
        tokens = 0
        for delta in deltas:
            tokens += len(delta.token_ids)
            if delta.text:
                self.pieces.append(delta.text)
            if delta.reasoning:
                self.reasons.append(delta.reasoning)
            for call in delta.tool_calls:
                if call.name:
                    self.calls.append(Call(call.name, []))
                self.calls[call.index].pieces.append(call.arguments)
            self.logprobs.extend(delta.logprobs)
            if delta.HasField("echo"):
                self.echo = delta.echo
            if delta.finish:
                self.finish = delta.finish
                self.usage, self.stop = delta.usage, delta.stop
            elif delta.HasField("usage"):
                self._known = delta.usage.SerializeToString()
            for one in delta.redacted:
                self._redact(one)
            if delta.HasField("plan"):
                self._plan = delta.plan.SerializeToString()
        self.tokens += tokens
        if gap_s:
            self.tokens_since += tokens
        else:
            self.began = now
        return tokens, gap_s

    @property
    def plan(self) -> PromptPlan:
        """How the window was spent on its prompt, once that is known."""
        return PromptPlan.FromString(self._plan)

    @property
    def used(self) -> Usage:
        """So far: of a whole answer as its tokenizer counts, of another what has come."""
        if self.finish:
            return self.usage
        used = Usage.FromString(self._known)
        used.completion_tokens = self.tokens
        return used

    @property
    def tokens_per_s(self) -> float | None:
        """Behind the first arrival; None for an answer that came at once."""
        if not self.tokens_since:
            return None
        return self.tokens_since / (self.arrived - self.began)

    def _redact(self, one: Redacted) -> None:
        """Told is what the prompt holds."""
        passage = Passage()
        passage.CopyFrom(self.passages[one.index])
        passage.title, passage.text = one.title, one.text
        self.passages[one.index] = passage

    def withdraw(self) -> None:
        """Nothing of it is told."""
        for told in (self.pieces, self.reasons, self.calls, self.logprobs):
            told.clear()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasons)

    @cached_property
    def citations(self) -> Checked | None:
        """To be asked for once the answer is whole. None: its prompt held no passages."""
        held = self.passages_used
        return check(self.text, held) if held else None

    def call_id(self, index: int) -> str:
        """Of one of its calls: the same, whichever hop is lost on the way."""
        told = f"{self.request_id} {self.index} {index}".encode()
        return "call_" + hashlib.blake2b(told, digest_size=12).hexdigest()

    @property
    def warning(self) -> str:
        plan = self.plan
        left_out = [*self.warnings]
        if dropped := plan.passages_dropped:
            told = f"{dropped} of {dropped + plan.passages_used} passages"
            left_out.append(f"{told} had no room in the context window")
        return "; ".join(left_out)

    @property
    def passages_used(self) -> list[Passage]:
        """Those that the prompt holds; the answer cites them as [1], [2], …"""
        return self.passages[: self.plan.passages_used]


def total_usage(answers: Sequence[Answer]) -> Usage:
    """Of one request, so far. A prompt counts once, however many answers it has; what the others
    than the first found of it was computed for that one."""
    firsts = [answer.used for answer in answers if not answer.choice]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
        cached_tokens=sum(usage.cached_tokens for usage in firsts),
        completion_tokens=sum(answer.used.completion_tokens for answer in answers),
        draft_tokens=sum(answer.used.draft_tokens for answer in answers),
        accepted_tokens=sum(answer.used.accepted_tokens for answer in answers),
    )
