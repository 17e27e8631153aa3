"""Looking anew for what is not known, however many ask."""

import asyncio
import time
from collections.abc import Awaitable, Callable


class FreshLook:
    """Calls share looks: each returns after one that began after the call, so that it sees whatever
    was true by then; and no look begins sooner than `every_s` after the one before."""

    def __init__(self, look: Callable[[], Awaitable[None]], every_s: float) -> None:
        self._look = look
        self._every_s = every_s
        self._began = float("-inf")
        self._under_way: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None  # has not begun yet

    async def __call__(self) -> None:
        """Raises what the look raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._take_turn(self._under_way))
        await asyncio.shield(self._next)

    async def stop(self) -> None:
        """Ends what is under way; whoever waits for it is cancelled."""
        tasks = [task for task in (self._under_way, self._next) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_turn(self, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait([before])
        left = self._until_next()
        while left > 0:  # again, where the loop's clock counts in whole milliseconds and is early
            await asyncio.sleep(left)
            left = self._until_next()
        self._under_way, self._next = self._next, None
        self._began = time.monotonic()
        await self._look()

    def _until_next(self) -> float:
        return self._began + self._every_s - time.monotonic()
