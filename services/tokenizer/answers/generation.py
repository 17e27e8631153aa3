"""One request's tokens, from whichever router is there to give them.

The prompt and the tokens so far are all that a router needs to go on. So the loss of one is a
pause: another router, or the next one after a restart, gets both and gives the rest. Sampling
depends on the seed and the position alone, so the rest is what it would have been.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from protos.common_pb2 import FINISH_LENGTH, FinishReason, Record
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import TextDelta
from protos.worker_pb2 import TokenDelta
from services.common.link import End, LinkCall
from services.common.packed_ids import pack
from services.common.peers import Peer, Peers
from services.common.telemetry.telemetry import decision
from services.tokenizer import metrics

log = logging.getLogger(__name__)

MAX_LOSSES = 3  # of routers under one request; it may be the request that they die of
_LOST = ("peer_lost", "peer_stalled", "draining")


@dataclass(frozen=True)
class Way:
    """What a request takes along to each router."""

    call: LinkCall
    routers: Peers
    patience_s: float  # for a router to appear
    traceparent: str
    record: Record  # what each router told of it is added here


class Taker(Protocol):
    """Who takes a request's deltas: an Output, or Numbers (pooled.py)."""

    finish: FinishReason

    @property
    def token_ids(self) -> Collection[int]: ...

    @property
    def stop(self) -> str | None: ...

    def push(self, delta: TokenDelta) -> TextDelta | None: ...


async def generate(request: bytes, output: Taker, way: Way) -> End:
    """Gives the tokens to `output` and its text to the call, until it is finished or cannot be.

    `request`: a GenerateRequest, serialized, which takes half of its memory, as long as the answer
    lasts. It is the prompt alone, whatever `output` holds already. Raises UNAVAILABLE when no
    router appears.
    """
    losses = 0
    while True:
        rest = _rest(request, output)
        if not rest:  # a router was lost just before it said so
            _forward(TokenDelta(finish=FINISH_LENGTH), output, way.call)
            return End()
        router = await way.routers.pick_least_loaded(way.patience_s)
        end = await _ask(router, rest, output, way)
        way.record.MergeFrom(end.record)
        if output.finish or not _was_lost(end):
            return end
        losses += end.status.reason != "draining"
        if losses > MAX_LOSSES:
            return end
        _note(way.record, router.id, end.status.reason, len(output.token_ids))


async def _ask(router: Peer, request: bytes, output: Taker, way: Way) -> End:
    """One router's part. Nothing of it comes any more after its end."""

    def take(payload: bytes) -> None:
        delta = TokenDelta.FromString(payload)
        _forward(delta, output, way.call)
        if delta.finish:
            generation.settle()
        elif output.finish:  # it ended itself: by a stop string, or a rule
            generation.stop()

    generation = router.link.open(
        request,
        deadline=way.call.deadline,
        traceparent=way.traceparent,
        on_item=take,
    )
    try:
        return await generation.ended()
    finally:
        generation.cancel()


def _note(record: Record, lost: str, why: str, tokens_so_far: int) -> None:
    reasons = {"lost": lost, "why": why, "tokens_so_far": tokens_so_far}
    record.decisions.append(decision("tokenizer", "router", "went on", reasons))
    metrics.ROUTER_LOSSES.labels(why).inc()
    log.warning("router %s was lost (%s), going on", lost, why)


def _forward(delta: TokenDelta, output: Taker, call: LinkCall) -> None:
    text = output.push(delta)
    if text is not None:
        call.send(text.SerializeToString())


def _rest(request: bytes, output: Taker) -> bytes:
    """The request behind the tokens that have come; empty where none is left to ask for."""
    if not output.token_ids:
        return request
    rest = GenerateRequest.FromString(request)
    rest.prompt_token_ids += pack(list(output.token_ids))
    rest.generated_prefix = len(output.token_ids)
    rest.sampling.max_tokens -= len(output.token_ids)
    return rest.SerializeToString() if rest.sampling.max_tokens else b""


def _was_lost(end: End) -> bool:
    """A router passes on the loss of its workers in the same words, with their stage, once it has
    tried as many as it may: no other router shall try more.
    """
    return end.status.stage == "router" and end.status.reason in _LOST
