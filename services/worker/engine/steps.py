"""Runs steps on a runner, and finds whose fault it is when one fails."""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.worker.engine.clock import now_ns
from services.worker.engine.messages import RequestError
from services.worker.engine.plan import Result, plan_step
from services.worker.engine.runner import Runner, Ticket
from services.worker.engine.scheduler import Chunk

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""In a row, in which every request failed; then it is the engine that is broken."""


class EngineBroken(Exception):
    """Whatever the engine runs fails, and will go on to: it must be replaced."""


@dataclass(slots=True)
class Running:
    """A step between its launch and its end. A step's time begins when it is planned, or when the
    one before ends if that is later: the times of steps do not overlap."""

    chunks: list[Chunk]
    started_ns: int
    ticket: Ticket = None
    failed: Exception | None = None
    """It could not be launched."""


class Steps:
    """One at a time, as yet."""

    def __init__(self, runner: Runner, block_size: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._failed = 0

    def launch(self, chunks: list[Chunk], started_ns: int) -> Running:
        """Has the chunks computed together."""
        running = Running(chunks, started_ns)
        if chunks:
            try:
                running.ticket = self._runner.launch(plan_step(chunks, self._block_size, {}))
            except Exception as error:
                running.failed = error
        return running

    def collect(self, running: Running) -> list[Result]:
        """Waits for the step's end; one result for each chunk. Raises EngineBroken."""
        results = self._results(running)
        self._raise_if_broken(results)
        return results

    def _results(self, running: Running) -> list[Result]:
        chunks = running.chunks
        if not chunks:
            return []
        try:
            if running.failed:
                raise running.failed
            return self._runner.collect(running.ticket)
        except Exception as error:
            if len(chunks) > 1:
                log.exception("a step of %d sequences failed; running them singly", len(chunks))
                return [self._results(self.launch([chunk], now_ns()))[0] for chunk in chunks]
            log.exception("request %s failed", chunks[0].sequence.id)
            message = f"The model failed: {type(error).__name__}"
            return [Result([], RequestError("internal", message))]

    def _raise_if_broken(self, results: Seq[Result]) -> None:
        """A request that fails ends alone, but some errors of a device stay until its process ends.
        An engine that went on would fail its requests faster than others answer theirs, and so
        look idle and draw more. A failed request runs no more, so steps in a row are of different
        ones; those of the last step end with the engine and can go on elsewhere.
        """
        if results:
            failed = all(result.error for result in results)
            self._failed = self._failed + 1 if failed else 0
        if self._failed == MAX_FAILED_STEPS:
            raise EngineBroken(f"every request of the last {MAX_FAILED_STEPS} steps failed")
