"""What this gateway has under way of files in vector stores, for who takes one out or puts it there
anew: that is ended first."""

import asyncio
from collections.abc import Collection, Coroutine, Iterator
from typing import NamedTuple


class Place(NamedTuple):
    """Of a file."""

    tenant: str
    store: str
    file: str


class OnTheWay:
    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], Place] = {}

    async def carry(self, place: Place, work: Coroutine[None, None, None]) -> bool:
        """Whether it came to its end: False, where `cancel` ended it. Raises what it raises."""
        task = asyncio.create_task(work, name=f"index {place.file}")
        self._running[task] = place
        task.add_done_callback(self._running.pop)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        if task.cancelled():
            return False
        task.result()
        return True

    async def cancel(self, tenant: str, store: str, files: Collection[str] = ()) -> None:
        """Returns when it has ended; without files, all of the store."""
        tasks = list(self._of(tenant, store, files))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _of(
        self, tenant: str, store: str, files: Collection[str]
    ) -> Iterator["asyncio.Task[None]"]:
        for task, place in self._running.items():
            if place[:2] == (tenant, store) and (not files or place.file in files):
                yield task
