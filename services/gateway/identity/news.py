"""What changes who may what is told to every gateway at once, over Redis' publish and subscribe:

    revoked <hash>     the key with this SHA-256 is worthless
    key <hash>         it stands for something else
    tenant <name>      its record has changed

Messages are lost while the connection is down, so after each subscription what is known is looked
at anew (`Authenticator.recheck`). A message that is missed in any other way costs `key_cache_s`:
nobody is trusted for longer than that without asking.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.common.redis import Redis, RedisAway, RedisError

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_LOOK_UP_S = 5.0  # how long one read waits; also how often the connection is looked after


def channel(namespace: str) -> str:
    return f"{namespace}:{{identity}}:news"


class News:
    """Calls `told` with each message as it comes, and `recheck` once they come again after some may
    have been missed; both must not raise but for Redis being away.
    """

    def __init__(
        self,
        redis: Redis,
        channel: str,
        told: Callable[[str], None],
        recheck: Callable[[], Awaitable[None]],
    ) -> None:
        self._redis = redis
        self._channel = channel
        self._told = told
        self._recheck = recheck
        self._task: asyncio.Task[None] | None = None
        self._said = False  # that there are no news, once an outage

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="identity news")

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
                    log.warning("no news of keys and tenants: %s", type(away).__name__)
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
                    self._told(message["data"])
