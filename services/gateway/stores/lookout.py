"""What is looked for now and then, by one gateway at a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.common.errors import PenstockError
from services.common.redis import Redis, RedisAway

log = logging.getLogger(__name__)


class Lookout:
    """Looks from `start` to `stop`. What fails is told, and the next look may fare better."""

    def __init__(
        self,
        redis: Redis,
        turn: str,
        every_s: float,
        look: Callable[[], Awaitable[object]],
        what: str,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """`turn`: the key of whose turn it is; `what` is looked for, in words."""
        self._redis = redis
        self._turn = turn
        self._every_s = every_s
        self._look = look
        self._what = what
        self._failed = failed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"look for {self._what}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                if await self._redis.set(self._turn, 1, nx=True, px=round(self._every_s * 1000)):
                    await self._look()
            except (*RedisAway, PenstockError) as error:
                self._failed()
                log.info("%s were not looked for: %s", self._what, error)
            except Exception:
                self._failed()
                log.exception("looking for %s failed", self._what)
            await asyncio.sleep(self._every_s)
