"""Concurrent requests share the embedding model: whatever waits goes into the next forward pass.

One thread computes, one batch at a time. The tenants that wait give one text each in turn, and so
do the requests of each: a question waits neither behind a document of a thousand chunks nor behind
another tenant's thousand questions, it is in the next batch. What nobody waits for is in batches of
its own, while nobody waits, or behind so many of those who do.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import numpy as np
from threadpoolctl import threadpool_limits

from services.common.errors import PenstockError
from services.common.fairness.shares import Shares
from services.retrieval import metrics
from services.retrieval.embedding_model import Read

log = logging.getLogger(__name__)

MAX_BATCH_TEXTS = 32
MAX_BATCH_TOKENS = 1024  # padding included: a quarter second on one slow core
MAX_WAITING_TEXTS = 16_384
STALLED_S = 60.0
_BEHIND = 16  # batches of those who wait, in a row

Lane = OrderedDict[str, deque["_Job"]]
"""The jobs with texts waiting, by tenant; whose turn is next, first."""

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    """One request's texts; `waiting` are the indices not yet handed out, the longest text last."""

    tenant: str
    texts: list[list[int]]
    waiting: list[int]
    missing: int
    take: Callable[[Read], Any]
    taken: list[Any]  # by text; None: not read yet
    done: asyncio.Future[list[Any]]


class Embedder:
    """`read` (token ids, of each text) runs in this object's own thread; `steps` is a number that
    changes while it computes."""

    def __init__(
        self, read: Callable[[list[list[int]]], list[Read]], steps: Callable[[], int] = lambda: 0
    ) -> None:
        self._read = read
        self._steps = steps
        self._seen_steps = 0
        self._thread = ThreadPoolExecutor(1, "embedding", _one_thread)
        self._open: set[_Job] = set()
        self._turns: Lane = OrderedDict()
        self._low: Lane = OrderedDict()
        self._ahead = 0  # batches, since one of the low lane was computed, or it was empty
        self._waiting = Shares(MAX_WAITING_TEXTS)  # texts, shared between the tenants
        self._wake = asyncio.Event()
        self._moved_at = 0.0  # monotonic, of a batch or a step in it; 0 while none is computed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._loop(), name="embedder")

    async def stop(self) -> None:
        """Waits for the thread; requests that are not done fail as UNAVAILABLE."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for job in self._open:
            self._fail(job, _failure(grpc.StatusCode.UNAVAILABLE, "is stopping"))
        await asyncio.to_thread(self._thread.shutdown)

    def check(self) -> None:
        """Raises RuntimeError when a batch has not moved for too long, or the loop died.

        To be called often. A large model takes minutes for 8,192 tokens: that is no stall.
        """
        if self._moved_at and (steps := self._steps()) != self._seen_steps:
            self._seen_steps, self._moved_at = steps, time.monotonic()
        if self._moved_at and time.monotonic() - self._moved_at > STALLED_S:
            raise RuntimeError(f"no embedding batch went on for {STALLED_S:.0f} s")
        if self._task is not None and self._task.done():
            raise RuntimeError("the embedding loop ended")

    async def embed(self, tenant: str, texts: list[list[int]]) -> np.ndarray:
        """Token ids, one list per text and at least one, to float32 [texts, dimension]."""
        return np.stack(await self.read(tenant, texts, lambda read: read.vector))

    async def read(
        self, tenant: str, texts: list[list[int]], take: Callable[[Read], T], *, low: bool = False
    ) -> list[T]:
        """What `take` makes of each, in the model's thread: no more of it is kept. `low`: nobody
        waits for them.

        Cancelling gives up the texts that are not yet computed. Raises PenstockError:
        RESOURCE_EXHAUSTED when too many of the tenant's texts wait already, INTERNAL when the model
        fails.
        """
        if not self._waiting.take(tenant, len(texts)):
            raise _failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "has too much waiting", "queue_full")
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # alike pad little
        done: asyncio.Future[list[T]] = asyncio.get_running_loop().create_future()
        turns = self._low if low else self._turns
        job = _Job(tenant, texts, by_length, len(texts), take, [None] * len(texts), done)
        self._open.add(job)
        turns.setdefault(tenant, deque()).append(job)
        metrics.EMBED_WAITING_TEXTS.inc(len(texts))
        self._wake.set()
        try:
            return await done
        finally:
            self._open.discard(job)
            if job.waiting:
                turns[tenant].remove(job)
                if not turns[tenant]:
                    del turns[tenant]
                self._handed_out(job, len(job.waiting))

    async def _loop(self) -> None:
        while True:
            await self._wake.wait()
            batch = self._next_batch()
            if not batch:
                self._wake.clear()
                continue
            await self._compute(batch)

    def _next_batch(self) -> list[tuple[_Job, int]]:
        batch: list[tuple[_Job, int]] = []
        longest = 0
        is_low = bool(self._low) and (not self._turns or self._ahead >= _BEHIND)
        self._ahead = 0 if is_low or not self._low else self._ahead + 1
        turns = self._low if is_low else self._turns
        while turns and len(batch) < MAX_BATCH_TEXTS:
            tenant, jobs = next(iter(turns.items()))
            job = jobs[0]
            longest = max(longest, len(job.texts[job.waiting[-1]]))
            if batch and longest * (len(batch) + 1) > MAX_BATCH_TOKENS:
                break
            batch.append((job, job.waiting.pop()))
            self._handed_out(job)
            jobs.popleft()
            if job.waiting:
                jobs.append(job)
            turns.move_to_end(tenant)
            if not jobs:
                del turns[tenant]
        return batch

    async def _compute(self, batch: list[tuple[_Job, int]]) -> None:
        self._moved_at = began = time.monotonic()

        def work() -> list[Any]:
            read = self._read([job.texts[index] for job, index in batch])
            return [job.take(one) for (job, _), one in zip(batch, read, strict=True)]

        try:
            taken = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except Exception:
            log.exception("a batch of %d texts failed", len(batch))
            if len(batch) == 1:
                failed = _failure(grpc.StatusCode.INTERNAL, "failed on this text")
                self._fail(batch[0][0], failed)
            else:  # one bad text must not fail the others' requests
                for one in batch:
                    await self._compute([one])
            return
        finally:
            self._moved_at = 0.0
        metrics.EMBED_BATCH_TEXTS.observe(len(batch))
        metrics.EMBED_BATCH_SECONDS.observe(time.monotonic() - began)
        for (job, index), one in zip(batch, taken, strict=True):
            job.taken[index] = one
            job.missing -= 1
            if job.missing == 0 and not job.done.done():
                job.done.set_result(job.taken)

    def _fail(self, job: _Job, error: PenstockError) -> None:
        if not job.done.done():
            job.done.set_exception(error)

    def _handed_out(self, job: _Job, texts: int = 1) -> None:
        self._waiting.give_back(job.tenant, texts)
        metrics.EMBED_WAITING_TEXTS.dec(texts)


def _one_thread() -> None:
    threadpool_limits(1, "blas")  # more only fight with the other services for the same cores


def _failure(code: grpc.StatusCode, what: str, reason: str = "") -> PenstockError:
    busy = code != grpc.StatusCode.INTERNAL
    return PenstockError(
        code,
        f"the embedding model {what}",
        stage="retrieval",
        reason=reason,
        retry_after_s=1.0 if busy else 0.0,
    )
