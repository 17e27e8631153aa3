"""A few threads for long computations, which tenants share in turn."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from services.common.fairness.turns import Turns

T = TypeVar("T")


class FairThreads:
    """One tenant's work, however much of it waits, delays another's by one piece per thread."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._turns = Turns(threads)

    async def run(
        self, tenant: str, work: Callable[[], T], ended: Callable[[], None] = lambda: None
    ) -> T:
        """What `work` returns or raises, from a thread in which it began in the tenant's turn.

        Given up before that, it never runs; given up later, it goes on and keeps its thread.
        `ended` is called on the loop once it runs no more.
        """
        try:
            await self._turns.take(tenant)
        except BaseException:
            ended()
            raise
        loop = asyncio.get_running_loop()

        def over() -> None:
            self._turns.give_back()
            ended()

        def tell(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have ended before the thread
                loop.call_soon_threadsafe(over)

        try:
            running = self._pool.submit(work)
        except RuntimeError:  # it was stopped
            over()
            raise
        running.add_done_callback(tell)
        return await asyncio.wrap_future(running)

    def stop(self) -> None:
        """Waits for nothing; what has not begun never does."""
        self._pool.shutdown(wait=False, cancel_futures=True)
