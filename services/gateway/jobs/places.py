"""A fixed number of jobs at a time."""

import asyncio


class Places:
    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def take(self) -> None:
        """Returns with a place, for `give_back`."""
        await self._free.acquire()

    def give_back(self) -> None:
        self._free.release()
