"""Calls of the vector store: in threads, within deadlines, tenants in turn.

A store's calls block, so they are made in threads: one for the embedded store, eight for a server.
Writes may hold half of them (of one: one write at a time), so a search waits behind no more than
one batch of a document. Each call has a deadline; a store that is away or slow is UNAVAILABLE, and
found again by a later call.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from services.common.errors import PenstockError, unavailable
from services.common.fairness.fair_threads import FairThreads
from services.common.fairness.shares import Shares
from services.retrieval import metrics
from services.retrieval.index.points import (
    Points,
    StoreAwayError,
    StoreFailedError,
    StoreUnusableError,
)

log = logging.getLogger(__name__)

MAX_WAITING_CALLS = 256  # one tenant alone has half of them

T = TypeVar("T")


class Calls:
    """Runs functions of `points`."""

    def __init__(self, points: Points, timeout_s: float) -> None:
        self._points = points
        self._timeout_s = timeout_s
        self._threads = FairThreads(points.threads, "store")
        self._write_places = asyncio.Semaphore(max(1, points.threads // 2))
        self._waiting = Shares(MAX_WAITING_CALLS)  # and running, shared between the tenants

    @property
    def kind(self) -> str:
        return self._points.kind

    async def open(self) -> None:
        """As long as it takes: the embedded store reads its log, or an earlier version's store.

        A server that is away is not an error yet: each call tries again. Raises StoreUnusableError
        (another model's vectors, an embedded store in use by another process).
        """
        try:
            await self._threads.run("", self._points.open)
        except (StoreAwayError, StoreFailedError) as error:
            log.warning("the vector store is away, the service starts without it: %s", error)

    async def close(self) -> None:
        await self._threads.run("", self._points.close)
        self._threads.stop()

    async def read(
        self,
        operation: str,
        tenant: str,
        work: Callable[[Points], T],
        ended: Callable[[], None] = lambda: None,
    ) -> T:
        """Runs `work` in a store thread, within the deadline. Raises PenstockError.

        `ended` is called once `work` has really ended: a thread goes on past its deadline.
        """
        began = time.monotonic()
        try:
            return await self._within_deadline(tenant, work, ended)
        except PenstockError as error:
            metrics.STORE_FAILURES.labels(operation, error.reason).inc()
            raise
        finally:
            metrics.STORE_SECONDS.labels(operation).observe(time.monotonic() - began)

    async def write(self, operation: str, tenant: str, work: Callable[[Points], T]) -> T:
        """As `read`, in its turn among the writes; `work` should be one batch."""
        await self._write_places.acquire()
        return await self.read(operation, tenant, work, self._write_places.release)

    async def _within_deadline(
        self, tenant: str, work: Callable[[Points], T], ended: Callable[[], None]
    ) -> T:
        if not self._waiting.take(tenant):
            ended()
            raise PenstockError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the vector store has too much waiting",
                stage="retrieval",
                reason="queue_full",
                retry_after_s=1.0,
            )

        def over() -> None:
            self._waiting.give_back(tenant)
            ended()

        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._threads.run(tenant, lambda: work(self._points), over)
        except TimeoutError:
            words = f"the vector store did not answer within {self._timeout_s:g} s"
            raise _unavailable(words, "store_slow") from None
        except StoreUnusableError as error:
            log.error("%s", error)
            raise _unavailable("the vector store cannot be used now", error.reason) from None
        except StoreAwayError as error:
            log.warning("the vector store is away: %s", error)
            raise _unavailable("the vector store cannot be reached", "store_away") from error
        except StoreFailedError as error:
            log.warning("the vector store failed: %s", error)
            raise _unavailable("the vector store failed", "store_failed") from error


def _unavailable(message: str, reason: str) -> PenstockError:
    return unavailable(message, stage="retrieval", reason=reason)
