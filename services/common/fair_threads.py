"""A few threads for long computations, which tenants share in turn."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from services.common.turns import Turns

T = TypeVar("T")


class FairThreads:
    """One tenant's work, however much of it waits, delays another's by one piece per thread."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._turns = Turns(threads)

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises, from a thread in which it began in the tenant's turn.
        Given up before that, it never runs.
        """
        await self._turns.take(tenant)
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have ended before the thread
                loop.call_soon_threadsafe(self._turns.give_back)

        try:
            running = self._pool.submit(work)
        except RuntimeError:  # it was stopped
            self._turns.give_back()
            raise
        # Given up, work that runs goes on and keeps its thread until it ends.
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def stop(self) -> None:
        """Waits for nothing; what has not begun never does."""
        self._pool.shutdown(wait=False, cancel_futures=True)
