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
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._saying: asyncio.Task[None] | None = None

    def begin(self, opening: Callable[[], Awaitable[None]] | None = None) -> None:
        """`opening` is called at once. Once begun it stays so."""
        if self._begun:
            return
        self._begun = True
        if opening is not None:
            self._speak(opening)
        else:
            self._wait()

    def spoke(self) -> None:
        """Something else was said."""
        self._spoke += 1

    def close(self) -> None:
        """Nothing is said from here on."""
        if self._timer is not None:
            self._timer.cancel()
        if self._saying is not None:
            self._saying.cancel()
        self._begun, self._timer, self._saying = True, None, None
        self._say = _nothing  # it has this: no circle is left

    def _wait(self) -> None:
        """A timer, no task: most answers end before there is anything to say."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._every_s, self._look, self._spoke)

    def _look(self, spoke: int) -> None:
        if spoke == self._spoke:
            self._speak(self._say)
        else:
            self._wait()

    def _speak(self, say: Callable[[], Awaitable[None]]) -> None:
        async def said() -> None:
            await say()
            self._wait()

        self._saying = asyncio.create_task(said(), name="keep-alive")


async def _nothing() -> None:
    """What is said after the end."""
