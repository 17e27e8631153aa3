"""Revoked keys are told to every gateway at once, over Redis' publish and subscribe.

Messages are lost while the connection is down, so after each subscription the store is asked which
of the keys in use were revoked meanwhile. A message that is missed in any other way costs
`key_cache_s`: a key is trusted no longer than that without asking.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.common.redis import Redis, RedisAway, RedisError

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_LOOK_UP_S = 5.0  # how long one read waits; also how often the connection is looked after


class Revocations:
    """Calls `on_revoked` with each key's hash as it is revoked, and `recheck` once news come again
    after they may have been missed; both must not raise but for Redis being away.
    """

    def __init__(
        self,
        redis: Redis,
        channel: str,
        on_revoked: Callable[[str], None],
        recheck: Callable[[], Awaitable[None]],
    ) -> None:
        self._redis = redis
        self._channel = channel
        self._on_revoked = on_revoked
        self._recheck = recheck
        self._task: asyncio.Task[None] | None = None
        self._said = False  # that there are no news, once an outage

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="revocations")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except (*RedisAway, RedisError) as away:
                if not self._said:
                    log.warning("no news of revoked keys: %s", type(away).__name__)
                self._said = True
            await asyncio.sleep(_RETRY_S)

    async def _listen(self) -> None:
        async with self._redis.pubsub() as news:
            await news.subscribe(self._channel)
            while True:
                message = await news.get_message(timeout=_LOOK_UP_S)
                if message is None:
                    continue
                if message["type"] == "subscribe":  # also after the client connected anew by itself
                    await self._recheck()
                    self._said = False
                elif message["type"] == "message":
                    self._on_revoked(message["data"])
