"""Running a placed request: on one worker, or prompt here and decoding there.

A split is two requests on two links, joined by a transfer id. The decode worker D is asked to
reserve room and wait; the prefill worker P computes the prompt, pushes its KV blocks to D by itself
and streams the first token; D streams the rest. Whatever arrives first on this side, the first
token leaves before D's.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from protos import common_pb2, worker_pb2
from services.common.errors import PenstockError, unavailable
from services.router.answer import Answer
from services.router.placement import Plan
from services.router.workers import Worker

OnDelta = Callable[[worker_pb2.TokenDelta, bytes], None]

SETTLE_S = 0.5  # for the record of a leg that was stopped
_REFUSALS = ("too_many_requests", "link_congested")
_LOSSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # not cancelled by this side


class WorkerLostError(Exception):
    """The worker could not go on with the request, through no fault of the request."""

    def __init__(self, worker: Worker, error: PenstockError) -> None:
        super().__init__(error.message)
        self.worker = worker
        self.error = error

    @property
    def cause(self) -> str:
        return self.error.reason or self.error.code.name.lower()


class Leg:
    """One request on one worker's link. `deltas` counts what came from it."""

    def __init__(
        self, worker: Worker, work: worker_pb2.WorkRequest, prefill_tokens: int, way: "Way"
    ) -> None:
        self.worker = worker
        self.deltas = 0
        self.on_delta: OnDelta = lambda delta, payload: None
        # The worker's engine hears of a PREFILL only once the decode worker has room for it.
        self._sent = worker.sent(prefill_tokens, work.mode == worker_pb2.WorkRequest.PREFILL)
        self._request = worker.link.open(
            work.SerializeToString(),
            deadline=way.deadline,
            traceparent=way.traceparent,
            on_item=self._on_item,
        )
        self.ended = asyncio.ensure_future(self._request.ended())

    def failure(self) -> WorkerLostError | PenstockError | None:
        """Of a leg that ended: what to raise, or None if it ended well."""
        status = self.ended.result().status
        if status.code == 0:
            return None
        error = PenstockError.from_status(status)
        error.stage = error.stage or "worker"
        if error.code in _LOSSES or error.reason in _REFUSALS:
            return WorkerLostError(self.worker, error)
        return error

    def stop(self) -> None:
        """Asks it to end, now. Does nothing when it has ended."""
        self.worker.answered(self._sent)
        self._request.stop()

    async def close(self, record: common_pb2.Record) -> None:
        """Stops it if it still runs, and adds its spans to `record` if they come soon."""
        self.stop()
        try:
            await asyncio.wait([self.ended], timeout=SETTLE_S)
        finally:
            self._request.cancel()
            if self.ended.done() and not self.ended.cancelled():
                record.MergeFrom(self.ended.result().record)
            self.ended.cancel()

    def _on_item(self, payload: bytes) -> None:
        self.worker.answered(self._sent)
        self.deltas += 1
        self.on_delta(worker_pb2.TokenDelta.FromString(payload), payload)


class Way:
    """What all legs of a request share: deadline, trace, and the record of what they did."""

    def __init__(self, deadline: float, traceparent: str, record: common_pb2.Record) -> None:
        self.deadline = deadline  # monotonic seconds
        self.traceparent = traceparent
        self.record = record


async def run(plan: Plan, answer: Answer, way: Way) -> None:
    """Returns when the answer is finished.

    Raises WorkerLostError when it can go on elsewhere from the answer's tokens, and PenstockError
    when the request itself is at fault or its time is over.
    """
    if not answer.tokens:
        answer.cached_tokens = plan.cached_tokens  # until the worker says so itself
    if plan.prefill is None:
        await _unsplit(plan, answer, way)
    else:
        await _split(plan, plan.prefill, answer, way)


async def _unsplit(plan: Plan, answer: Answer, way: Way) -> None:
    fresh = not answer.tokens

    def forward(delta: worker_pb2.TokenDelta, payload: bytes) -> None:
        if fresh and delta.HasField("usage"):
            answer.cached_tokens = delta.usage.cached_tokens
        answer.take(delta, payload)

    work = _work(answer, worker_pb2.WorkRequest.UNSPLIT)
    async with _leg(plan.decode, work, plan.uncached_tokens, way) as leg:
        leg.on_delta = forward
        await asyncio.wait([leg.ended])
        if not answer.finished:
            raise leg.failure() or _broken_off(leg.worker)


async def _split(plan: Plan, prefill: Worker, answer: Answer, way: Way) -> None:
    fresh, before = not answer.tokens, len(answer.tokens)
    early: list[tuple[worker_pb2.TokenDelta, bytes]] = []  # D's, while the first token is missing

    def from_prefill(delta: worker_pb2.TokenDelta, payload: bytes) -> None:
        if fresh and delta.HasField("usage"):
            answer.cached_tokens = delta.usage.cached_tokens
        if delta.finish == common_pb2.FINISH_PREFILL_DONE:
            if not delta.token_ids:
                return
            delta = worker_pb2.TokenDelta(token_ids=delta.token_ids)
            payload = delta.SerializeToString()
        answer.take(delta, payload)
        for later in early:
            answer.take(*later)
        early.clear()

    def from_decode(delta: worker_pb2.TokenDelta, payload: bytes) -> None:
        if len(answer.tokens) == before:
            early.append((delta, payload))
        else:
            answer.take(delta, payload)

    transfer_id = uuid.uuid4().hex
    reserve = _work(answer, worker_pb2.WorkRequest.DECODE, transfer_id)
    compute = _work(answer, worker_pb2.WorkRequest.PREFILL, transfer_id)
    compute.push_to.address = plan.decode.replica.address
    compute.push_to.host_id = plan.decode.replica.host_id
    async with (
        _leg(plan.decode, reserve, 0, way) as then,
        _leg(prefill, compute, plan.uncached_tokens, way) as first,
    ):
        first.on_delta, then.on_delta = from_prefill, from_decode
        try:
            await _both(first, then, answer, early)
        finally:  # both at once: closing waits for one after the other
            first.stop()
            then.stop()


async def _both(first: Leg, then: Leg, answer: Answer, early: Sequence[object]) -> None:
    """Returns when the answer is finished; raises when one of the legs cannot bring it there."""
    running = {first.ended, then.ended}
    while running and not answer.finished:
        ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if answer.finished:
            return
        if then.ended in ended and (failure := then.failure()):
            raise failure
        # P may be lost once D decodes by itself: D then has all that it needs.
        decoding = then.deltas and not early
        if first.ended in ended and not decoding and (failure := first.failure()):
            raise failure
    if not answer.finished:
        raise _broken_off(then.worker)


@asynccontextmanager
async def _leg(
    worker: Worker, work: worker_pb2.WorkRequest, prefill_tokens: int, way: Way
) -> AsyncIterator[Leg]:
    leg = Leg(worker, work, prefill_tokens, way)
    try:
        yield leg
    finally:
        await leg.close(way.record)


def _work(
    answer: Answer, mode: worker_pb2.WorkRequest.Mode, transfer_id: str = ""
) -> worker_pb2.WorkRequest:
    """The rest of the request: what was given out already is part of the prompt."""
    request = answer.request
    work = worker_pb2.WorkRequest(
        caller=request.caller,
        model=request.model,
        prompt_token_ids=request.prompt_token_ids,
        generated_prefix=len(answer.tokens),
        sampling=request.sampling,
        mode=mode,
        transfer_id=transfer_id,
    )
    work.prompt_token_ids.extend(answer.tokens)
    work.sampling.max_tokens = answer.tokens_left
    return work


def _broken_off(worker: Worker) -> WorkerLostError:
    error = unavailable("the worker ended the request early", stage="worker", reason="broken_off")
    return WorkerLostError(worker, error)
