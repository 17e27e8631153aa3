"""One request on one worker: what its end means, and what it says about the worker."""

import asyncio
from collections.abc import Callable

import grpc

from protos import common_pb2, worker_pb2
from services.common.errors import PenstockError
from services.common.link import End
from services.router.workers import Worker

OnDelta = Callable[[worker_pb2.TokenDelta, bytes], None]

HAND_OVER = "kv_transfer"
DRAINING = "draining"
SETTLE_S = 0.5  # for the record of a leg that was stopped
_REFUSALS = ("too_many_requests", "link_congested")
_LOSSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # not cancelled by this side
_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)


class WorkerLostError(Exception):
    """The worker could not go on with the request, through no fault of the request."""

    def __init__(self, worker: Worker, error: PenstockError) -> None:
        super().__init__(error.message)
        self.worker = worker
        self.error = error

    @property
    def cause(self) -> str:
        return self.error.reason or self.error.code.name.lower()


class Way:
    """What all legs of a request share: deadline, trace, and the record of what they did.

    `progress_s`: a decode worker that steps must give a token within, once the KV is handed over.
    `recalled`: done when the request is to stop and to go on later.
    `alone_tokens`: until it has given so many, an unsplit one runs with no other suspect.
    `proves`: that a leg ends well speaks for its worker; of pieces there are too many for that.
    """

    def __init__(
        self,
        deadline: float,
        traceparent: str,
        record: common_pb2.Record,
        progress_s: float,
        recalled: "asyncio.Future[None]",
    ) -> None:
        self.deadline = deadline  # monotonic seconds
        self.traceparent = traceparent
        self.record = record
        self.progress_s = progress_s
        self.recalled = recalled
        self.alone_tokens = 0
        self.proves = True


class Leg:
    """One request on one worker's link, to be closed in the end (`async with`). `deltas` counts
    what came from it."""

    def __init__(
        self, worker: Worker, work: worker_pb2.WorkRequest, prefill_tokens: int, way: Way
    ) -> None:
        self.worker = worker
        self.deltas = 0
        self.on_delta: OnDelta = lambda delta, payload: None
        self._attempt = worker.breaker.began()
        # The worker's engine hears of a PREFILL only once the decode worker has room for it.
        self._sent = worker.sent(prefill_tokens, work.mode == worker_pb2.WorkRequest.PREFILL)
        self._request = worker.link.open(
            work.SerializeToString(),
            deadline=way.deadline,
            traceparent=way.traceparent,
            on_item=self._on_item,
        )
        self._proves = way.proves
        self._record = way.record
        self.ended = self._request.outcome
        self.ended.add_done_callback(self._judge)

    def failure(self) -> WorkerLostError | PenstockError | None:
        """Of a leg that ended: what to raise, or None if it ended well."""
        status = self.ended.result().status
        if status.code == 0:
            return None
        error = PenstockError.from_status(status)
        error.stage = error.stage or "worker"
        lost = error.code in _LOSSES or error.reason in _REFUSALS
        # What the worker is tried with must not pay for it.
        if lost or (self._attempt.probe and error.code in _FAULTS):
            return WorkerLostError(self.worker, error)
        return error

    def blame(self) -> None:
        """Counts a fault of its worker."""
        self._attempt.failed(self.worker.peers_failed_share())

    async def settle(self) -> None:
        """Gives it a moment to end by itself."""
        await asyncio.wait([self.ended], timeout=SETTLE_S)

    def stop(self) -> None:
        """Asks it to end, now."""
        self.worker.answered(self._sent)
        if not self.ended.done():  # else its end is judged, in this turn or the next
            self._attempt.left()
            self._request.stop()

    async def __aenter__(self) -> "Leg":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops it if it still runs, and adds its spans to the way's record if they come soon."""
        self.stop()
        try:
            await self.settle()
        finally:
            self._request.cancel()
            self._record.MergeFrom(self.ended.result().record)

    def _on_item(self, payload: bytes) -> None:
        self.worker.answered(self._sent)
        self._attempt.answered()
        self.deltas += 1
        self.on_delta(worker_pb2.TokenDelta.FromString(payload), payload)

    def _judge(self, ended: "asyncio.Future[End]") -> None:
        """What its end says about its worker."""
        error = PenstockError.from_status(ended.result().status)
        if error.code is grpc.StatusCode.OK and self._proves:
            self._attempt.succeeded()
        elif error.reason == DRAINING:
            self._attempt.left()
        elif error.reason == HAND_OVER or error.code in _FAULTS:
            self.blame()
        elif error.code in _LOSSES or error.reason in _REFUSALS:
            self._attempt.lost()
        else:
            self._attempt.left()
