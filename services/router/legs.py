"""Running a placed request: on one worker, or prompt here and decoding there.

A split is two requests on two links, joined by a transfer id. The decode worker D is asked to
reserve room and wait; the prefill worker P computes the prompt, pushes its KV blocks to D by itself
and streams the first token; D streams the rest. Whatever arrives first on this side, the first
token leaves before D's.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from protos import common_pb2, worker_pb2
from services.common.errors import PenstockError, unavailable
from services.common.packed_ids import pack
from services.common.waiting import first_done
from services.router.answer import Answer
from services.router.leg import HAND_OVER, Leg, Way, WorkerLostError
from services.router.placement import Plan
from services.router.workers import Worker

_STEPS_TO_TOKEN = 2  # the first may have begun before the hand-over


async def run(plan: Plan, answer: Answer, way: Way) -> None:
    """Returns when the answer is finished, or the request is recalled.

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
    work.alone_tokens = way.alone_tokens
    leg = Leg(plan.decode, work, plan.uncached_tokens, way)
    del work  # as long as the prompt, and of no use while its tokens come
    async with leg:
        leg.on_delta = forward
        await first_done(leg.ended, answer.done, way.recalled)
        if answer.finished:
            await leg.settle()
        elif not way.recalled.done():
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
            delta.ClearField("finish")
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
        Leg(plan.decode, reserve, 0, way) as then,
        Leg(prefill, compute, plan.uncached_tokens, way) as first,
    ):
        first.on_delta, then.on_delta = from_prefill, from_decode
        try:
            await _both(first, then, answer, early, way)
        finally:  # both at once: closing waits for one after the other
            first.stop()
            then.stop()


async def _both(first: Leg, then: Leg, answer: Answer, early: Sequence[object], way: Way) -> None:
    """Returns when the answer is finished or recalled; raises when one of the legs cannot bring it
    to its end."""
    running = {first.ended, then.ended}
    silence = _Silence(then.worker, way.progress_s)  # of D
    while running and not answer.finished:
        handed_over = first.ended.done() and not then.deltas
        waiting: list[asyncio.Future[Any]] = [*running, answer.done, way.recalled]
        await asyncio.wait(
            waiting,
            timeout=silence.left_s() if handed_over else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if answer.finished:
            await (then if then.deltas else first).settle()
            return
        if way.recalled.done():
            return
        ended = {leg for leg in running if leg.done()}
        running -= ended
        if then.ended in ended and (failure := then.failure()):
            raise await _cause(failure, then, first)
        # P may be lost once D decodes by itself: D then has all that it needs.
        decoding = then.deltas and not early
        if first.ended in ended and not decoding and (failure := first.failure()):
            raise await _cause(failure, first, then)
        if handed_over and not then.deltas and silence.too_long():
            then.blame()
            raise _silent(then.worker)
    if not answer.finished:
        raise _broken_off(then.worker)


class _Silence:
    """How long a worker gives no token although it could. It begins with the first `left_s`.

    It takes steps, too, to be too long: a worker that makes none is watched by its link.
    """

    def __init__(self, worker: Worker, limit_s: float) -> None:
        self._worker = worker
        self._limit_s = limit_s
        self._until: float | None = None
        self._steps = 0

    def left_s(self) -> float:
        if self._until is None:
            self._until = time.monotonic() + self._limit_s
            self._steps = self._worker.link.vitals.steps
        return max(0.0, self._until - time.monotonic())

    def too_long(self) -> bool:
        if self.left_s() > 0:
            return False
        self._until = time.monotonic() + self._limit_s  # looked at again, if there is need
        return self._worker.link.vitals.steps >= self._steps + _STEPS_TO_TOKEN


async def _cause(
    failure: WorkerLostError | PenstockError, leg: Leg, other: Leg
) -> WorkerLostError | PenstockError:
    """Why the pair failed. Where one end died, the other knows only that the hand-over broke."""
    if not (isinstance(failure, WorkerLostError) and failure.cause == HAND_OVER):
        return failure
    await other.settle()
    if other.ended.done():
        others = other.failure()
        if isinstance(others, WorkerLostError) and others.cause != HAND_OVER:
            return others
    leg.blame()
    other.blame()
    return failure


def _work(
    answer: Answer, mode: worker_pb2.WorkRequest.Mode, transfer_id: str = ""
) -> worker_pb2.WorkRequest:
    """The rest of the request: what was given out already is part of the prompt."""
    request = answer.request
    work = worker_pb2.WorkRequest(
        caller=request.caller,
        model=request.model,
        checkpoint=request.checkpoint,
        prompt_token_ids=request.prompt_token_ids + pack(answer.tokens),
        generated_prefix=answer.before + len(answer.tokens),
        sampling=request.sampling,
        mode=mode,
        transfer_id=transfer_id,
    )
    work.sampling.max_tokens = answer.tokens_left
    if request.HasField("pooling"):
        work.pooling.CopyFrom(request.pooling)
    return work


def _broken_off(worker: Worker) -> WorkerLostError:
    error = unavailable("the worker ended the request early", stage="worker", reason="broken_off")
    return WorkerLostError(worker, error)


def _silent(worker: Worker) -> WorkerLostError:
    error = unavailable(
        "the decode worker gave no token after the hand-over", stage="worker", reason=HAND_OVER
    )
    return WorkerLostError(worker, error)
