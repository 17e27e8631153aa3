"""Turns of the requests that may end the engine, whichever routers they come from.

An engine ended under each of them. Were two of them in one engine when it ends, nobody could say
whose fault it was; so one of them runs until it has given a few tokens, and then the next.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Turns:
    """In the order in which they are asked for."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def take(self, tokens: int) -> AsyncIterator[Callable[[int], None]]:
        """Waits for a turn, which is over after so many tokens; 0 needs none. Yields a function to
        tell of tokens that were given."""
        if not tokens:
            yield lambda count: None
            return
        await self._lock.acquire()
        left = tokens

        def gave(count: int) -> None:
            nonlocal left
            if left > 0:
                left -= count
                if left <= 0:
                    self._lock.release()

        try:
            yield gave
        finally:
            gave(left)
