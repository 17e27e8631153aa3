"""What a stream says while there is nothing to say."""

import asyncio
from collections.abc import Awaitable, Callable


class KeepAlive:
    """Calls `say` whenever nothing else was said for `every_s`, so that nobody on the way takes the
    stream for dead."""

    def __init__(self, every_s: float, say: Callable[[], Awaitable[None]]) -> None:
        self._every_s = every_s
        self._say = say
        self._spoke = 0  # times
        self._task: asyncio.Task[None] | None = None

    def begin(self, opening: Callable[[], Awaitable[None]] | None = None) -> None:
        """`opening` is called at once. Once begun it stays so."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(opening), name="keep-alive")

    def spoke(self) -> None:
        """Something else was said."""
        self._spoke += 1

    def close(self) -> None:
        """Nothing is said from here on."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, opening: Callable[[], Awaitable[None]] | None) -> None:
        if opening is not None:
            await opening()
        while True:
            spoke = self._spoke
            await asyncio.sleep(self._every_s)
            if spoke == self._spoke:
                await self._say()
