"""The replica's side of the requests that its engine runs."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

import grpc

from services.common.errors import PenstockError, unavailable
from services.worker.engine import (
    EngineClient,
    EngineDied,
    FinishReason,
    KvBlocks,
    Request,
    RequestError,
    RequestOutput,
    StepOutput,
    Timeline,
)

log = logging.getLogger(__name__)

_CODES = {
    "invalid_request": grpc.StatusCode.INVALID_ARGUMENT,
    "context_length_exceeded": grpc.StatusCode.INVALID_ARGUMENT,
    "kv_transfer": grpc.StatusCode.UNAVAILABLE,
    "no_adapter": grpc.StatusCode.UNAVAILABLE,
}
# No mistakes of the client: what exactly failed is for the log.
_TOLD = {
    "kv_transfer": "handing KV blocks over failed",
    "internal": "the engine failed on this request",
}


class Running:
    """One request in the engine. `finished` yields its last output, or raises PenstockError."""

    def __init__(
        self,
        on_output: Callable[[RequestOutput], None],
        on_blocks: Callable[[KvBlocks], None] | None,
    ) -> None:
        self.on_output = on_output
        self.on_blocks = on_blocks
        self.finished: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        self.ended = False  # in the engine: it holds no block of it any more
        self.timeline: Timeline | None = None
        self.tokens = 0
        self.first_token_ns = 0
        self.last_token_ns = 0


class Sequences:
    """Hands requests to the engine and each step's outputs to their requests."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._running: dict[str, Running] = {}
        self._ids = itertools.count(1)
        self.unseen = 0  # requests added since the engine's last step: it owes them a step
        self.last_added = time.monotonic()

    def next_id(self) -> str:
        """An id that no other request of this replica has had."""
        return str(next(self._ids))

    def add(
        self,
        request: Request,
        on_output: Callable[[RequestOutput], None],
        on_blocks: Callable[[KvBlocks], None] | None = None,
    ) -> Running:
        """Queues `request`. Both callbacks run on the loop, blocks before the step's output.

        Raises PenstockError (UNAVAILABLE, reason "engine_gone") when the engine is gone: other than
        with "engine_died" and "engine_killed", the request was not in it.
        """
        running = Running(on_output, on_blocks)
        try:
            self._engine.add(request)
        except EngineDied as death:
            raise _engine_died(death, "engine_gone") from death
        self._running[request.request_id] = running
        self.unseen += 1
        self.last_added = time.monotonic()
        return running

    def release(self, request_id: str) -> None:
        """Forgets the request; if it has not ended, its blocks are freed before the next step."""
        running = self._running.pop(request_id, None)
        # Not `finished.done()`: a cancelled task cancels the future that it awaits.
        if running is not None and not running.ended and self._engine.running:
            self._engine.cancel(request_id)

    def deliver(self, step: StepOutput) -> list[KvBlocks]:
        """Hands out what the step made; returns the blocks that nobody waits for any more."""
        self.unseen = 0
        orphans = []
        for blocks in step.kv_exports:
            exporting = self._running.get(blocks.request_id)
            if exporting is None or exporting.on_blocks is None:
                orphans.append(blocks)
            else:
                exporting.on_blocks(blocks)
        for output in step.outputs:
            running = self._running.get(output.request_id)
            if running is not None:
                self._deliver_one(running, output, step.started_ns + step.duration_ns)
        return orphans

    def fail_all(self, death: EngineDied) -> None:
        """The engine is gone: every request ends with that news."""
        for running in self._running.values():
            if not running.finished.done():
                reason = "engine_killed" if death.killed else "engine_died"
                running.finished.set_exception(_engine_died(death, reason))

    def _deliver_one(self, running: Running, output: RequestOutput, now_ns: int) -> None:
        running.timeline = output.timeline or running.timeline
        running.tokens += len(output.new_token_ids)
        if output.new_token_ids:
            running.first_token_ns = running.first_token_ns or now_ns
            running.last_token_ns = now_ns
        running.ended = output.finish_reason is not None
        if running.finished.done():
            return
        if output.error is not None:
            running.finished.set_exception(_request_failed(output.error))
            return
        try:
            running.on_output(output)
        except Exception as error:  # one request's fault must not end the engine for all
            log.exception("request %s failed in its worker", output.request_id)
            running.finished.set_exception(error)
            return
        if output.finish_reason is FinishReason.CANCELLED:
            running.finished.cancel()
        elif output.finish_reason is not None:
            running.finished.set_result(output)


def _request_failed(error: RequestError) -> PenstockError:
    if error.code in _TOLD:
        log.warning("a request failed in the engine, %s: %s", error.code, error.message)
    return PenstockError(
        _CODES.get(error.code, grpc.StatusCode.INTERNAL),
        _TOLD.get(error.code, error.message),
        stage="worker",
        param=error.param,
        reason=error.code,
    )


def _engine_died(death: EngineDied, reason: str) -> PenstockError:
    log.warning("a request's engine died: %s", death)
    return unavailable("the worker's engine ended", stage="worker", reason=reason)
