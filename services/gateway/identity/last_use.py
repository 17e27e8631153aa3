"""When keys were last used: noted in memory, and written now and then, never on a request's way."""

import asyncio
import logging
import time

from services.common.redis import RedisAway, RedisError
from services.gateway.identity.keys import KeyStore
from services.gateway.ids import KEY

log = logging.getLogger(__name__)

_EVERY_S = 60.0
_LAST_S = 1.0  # for the last ones when the gateway ends


class LastUse:
    """`note` costs next to nothing. What is not written when Redis is away, is with the next."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys
        self._uses: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, user: str) -> None:
        if user.startswith(KEY.prefix):
            self._uses[user] = int(time.time())

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="last use of keys")

    async def stop(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(_LAST_S):
                await self.write()
        except TimeoutError:
            log.warning("the last uses of keys are not noted: Redis is too slow")

    async def write(self) -> None:
        uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            await self._keys.note_uses(uses)
        except (*RedisAway, RedisError):
            self._uses = uses | self._uses

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.write()
