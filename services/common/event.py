"""An event as asyncio has it, for what there is one of in each request: asyncio's own takes 700
bytes, most of it the queue of those who wait, and this one 50 until somebody does."""

import asyncio
from typing import Literal


class Event:
    """As asyncio.Event."""

    __slots__ = ("__weakref__", "_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[asyncio.Future[None]] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, None
        for future in waiting or ():
            if not future.done():
                future.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> Literal[True]:
        if self._is_set:
            return True
        future = asyncio.get_running_loop().create_future()
        if self._waiting is None:
            self._waiting = []
        self._waiting.append(future)
        try:
            await future
        finally:
            if self._waiting is not None and future in self._waiting:  # it was cancelled
                self._waiting.remove(future)
        return True
