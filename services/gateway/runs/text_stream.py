"""One generation on a tokenizer link, seen from the gateway: deltas in batches, then the end."""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress

import grpc

from protos.common_pb2 import Record
from protos.tokenizer_pb2 import PromptRequest, Resume, TextDelta
from services.common.errors import PenstockError
from services.common.event import Event
from services.common.link import End, LinkRequest
from services.common.peers import Peers
from services.gateway import metrics

log = logging.getLogger(__name__)

Straight = Callable[[], Callable[[list[TextDelta]], None] | None]
"""Whether what has come may be given to somebody now, who takes it by a plain call. None: it waits
for who reads `batches`, in whose task it costs twice as much."""

MAX_UNREAD_BYTES = 4 * 2**20  # of a stream whose client does not read, but for one delta
MAX_LOSSES = 3  # of tokenizers under one request; it may be the request that they die of
_NO_END, _NO_RECORD = End(), Record()  # yet
_LOST = frozenset({"peer_lost", "peer_stalled", "draining"})


class _Begun:
    """Of one choice, as Resume.Begun has it, which would be a kilobyte of its own."""

    __slots__ = (
        "accepted_tokens",
        "cached_tokens",
        "characters",
        "draft_tokens",
        "finished",
        "token_ids",
    )

    def __init__(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens
        self.draft_tokens = self.accepted_tokens = self.characters = 0
        self.finished = False
        self.token_ids = array("I")


class TextStream:
    """Opens the request on the least loaded tokenizer, and gathers what comes.

    When a tokenizer is lost, another one, or the next after a restart, goes on: the seed is in the
    request, and the deltas tell the tokens that their text stands for. So nothing differs.
    """

    def __init__(
        self,
        tokenizers: Peers,
        request: bytes,
        *,
        choices: int = 1,
        patience_s: float,
        deadline: float,
        traceparent: str,
        told: Iterable[TextDelta] = (),
    ) -> None:
        """`request`: a PromptRequest of so many choices, serialized, as which it is kept as long as
        the answer lasts. `patience_s`: for a tokenizer to appear. `deadline` in time.monotonic()
        seconds. `told`: the answers' beginning, which another gateway had."""
        self._tokenizers = tokenizers
        self._request = request
        self._patience_s = patience_s
        self._deadline = deadline
        self._traceparent = traceparent
        self._first = b""  # delta: as a message it would be a kilobyte
        self._begun: dict[int, _Begun] = {}  # of its choices
        self._pooled: list[int] = []  # the inputs whose numbers came
        self._unfinished = max(1, choices)
        self._link_request: LinkRequest | None = None
        self._inbox: list[bytes] = []
        self._unread_bytes = 0
        self._overrun = False
        self._wake = Event()
        self._waited = False  # who reads `batches` waits for the next
        self._soon = False  # what has come is looked at in the next turn
        self._failed: Exception | None = None  # what `straight` gave
        self.straight: Straight | None = None
        self._losses = 0
        self.finished = (
            False  # the last delta of all has come: whatever ends the link then, ends no answer
        )
        self.end = _NO_END
        self.record = _NO_RECORD  # what all tokenizers asked told of it
        self.attempts: list[str] = []  # their ids
        for delta in told:
            self._note(delta, delta.SerializeToString())

    async def batches(self) -> AsyncGenerator[list[TextDelta], None]:
        """What has arrived since the last look, never empty. `end` is set after the last.

        Raises UNAVAILABLE when there is no tokenizer, RESOURCE_EXHAUSTED for a client that lets
        its answer pile up.
        """
        while not self.finished:
            asked = await self._open()
            while not asked.outcome.done() or self._inbox:
                await self._next()
                if self._inbox:
                    yield self._take()
            if self._overrun:
                raise client_too_slow()
            self.end = asked.outcome.result()
            self.record = Record(spans=self.record.spans, decisions=self.record.decisions)
            self.record.MergeFrom(self.end.record)
            if self.finished or not self._may_go_on():
                return

    async def gather(self, seconds: float) -> None:
        """Lets more come in; no longer than until all is there."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if self._link_request is not None:
                    await self._link_request.ended()

    def cancel(self) -> None:
        """Frees everything downstream; free when it has ended."""
        if self._link_request is not None:
            self._link_request.cancel()

    async def _open(self) -> LinkRequest:
        peer = await self._tokenizers.pick_least_loaded(self._patience_s)
        self.attempts.append(peer.id)
        request = self._request
        if self._begun:  # of a pool's numbers, too: they are choice 0
            rest = PromptRequest.FromString(request)
            rest.resume.CopyFrom(self._so_far())
            request = rest.SerializeToString()
        self._link_request = asked = peer.link.open(
            request,
            deadline=self._deadline,
            traceparent=self._traceparent,
            on_item=self._on_item,
        )
        asked.outcome.add_done_callback(lambda _: self._wake.set())
        return asked

    async def _next(self) -> None:
        """Something has come that nobody took, or nothing more will."""
        self._waited = True
        try:
            await self._wake.wait()
        finally:  # nothing goes straight behind the end of who reads
            self._waited = False
        self._wake.clear()
        if self._failed is not None:
            raise self._failed

    def _on_item(self, payload: bytes) -> None:
        self._inbox.append(payload)
        self._unread_bytes += len(payload)
        if self.straight is None:
            self._wake.set()
        elif not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._hand_on)
        if self._unread_bytes > MAX_UNREAD_BYTES and len(self._inbox) > 1:
            self._overrun = True
            self.cancel()

    def _hand_on(self) -> None:
        """What came in one turn, together."""
        self._soon = False
        take = None
        if self._waited and self._inbox and self.straight is not None:
            take = self.straight()
        if take is None:
            self._wake.set()
            return
        try:
            take(self._take())
        except Exception as error:
            self._failed = error
            self._wake.set()

    def _take(self) -> list[TextDelta]:
        inbox, self._inbox, self._unread_bytes = self._inbox, [], 0
        deltas = [TextDelta.FromString(payload) for payload in inbox]
        for delta, payload in zip(deltas, inbox, strict=True):
            self._note(delta, payload)
        return deltas

    def _note(self, delta: TextDelta, payload: bytes) -> None:
        """Keeps what another tokenizer would have to know. `payload`: the same, serialized."""
        if not self._first:
            self._first = payload if not delta.pooled else _without_numbers(delta)
        if (begun := self._begun.get(delta.choice)) is None:
            begun = self._begun[delta.choice] = _Begun(delta.usage.cached_tokens)
        if delta.HasField("usage"):
            begun.draft_tokens = delta.usage.draft_tokens
            begun.accepted_tokens = delta.usage.accepted_tokens
        begun.token_ids.extend(delta.token_ids)
        begun.characters += len(delta.text) + len(delta.reasoning)
        if delta.tool_calls:
            begun.characters += sum(len(call.arguments) for call in delta.tool_calls)
        if delta.pooled:
            self._pooled.extend(one.index for one in delta.pooled)
        if delta.finish:
            begun.finished = True
            self._unfinished -= 1
            self.finished = not self._unfinished
            if self.finished and self._link_request is not None:
                self._link_request.settle()

    def _so_far(self) -> Resume:
        """What another tokenizer goes on behind."""
        first = TextDelta.FromString(self._first)
        choices = [
            Resume.Begun(
                choice=choice,
                token_ids=begun.token_ids,
                characters=begun.characters,
                cached_tokens=begun.cached_tokens,
                draft_tokens=begun.draft_tokens,
                accepted_tokens=begun.accepted_tokens,
                finished=begun.finished,
            )
            for choice, begun in self._begun.items()
        ]
        return Resume(
            plan=first.plan,
            prompt_digest=first.prompt_digest,
            checkpoint=first.checkpoint,
            policy=first.policy,
            choices=choices,
            pooled=self._pooled,
        )

    def _may_go_on(self) -> bool:
        """Whether it was a tokenizer that was lost, and not one too many.

        A tokenizer that says so of its routers, or they of their workers, has tried others itself.
        """
        status = self.end.status
        if status.stage != "tokenizer" or status.reason not in _LOST:
            return False
        self._losses += status.reason != "draining"
        metrics.tokenizer_losses.labels(status.reason).inc()
        log.warning("tokenizer %s was lost (%s)", self.attempts[-1], status.reason)
        return self._losses <= MAX_LOSSES


def _without_numbers(delta: TextDelta) -> bytes:
    """What is kept of a pool's first delta."""
    kept = TextDelta(
        plan=delta.plan,
        prompt_digest=delta.prompt_digest,
        checkpoint=delta.checkpoint,
        policy=delta.policy,
    )
    return kept.SerializeToString()


def client_too_slow() -> PenstockError:
    return PenstockError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "the client did not read its answer",
        stage="gateway",
        reason="client_too_slow",
    )
