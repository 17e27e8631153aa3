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
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from services.common.redis import Redis, RedisAway, RedisError

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_LOOK_UP_S = 5.0  # how long one read waits; also how often the connection is looked after
_MOST_HEARD = 10_000  # that are known one by one


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


class Heard:
    """What the latest news were about: so that who looked something up meanwhile knows whether it
    may have changed under his eyes. What others are told of is nothing to him, however much it is.
    """

    def __init__(self) -> None:
        self.number = 0
        """Of the latest."""
        self._of: OrderedDict[str, int] = OrderedDict()  # the latest last
        self._of_all = 0  # those up to here may have been about anything

    def note(self, about: str) -> None:
        self.number += 1
        self._of[about] = self.number
        self._of.move_to_end(about)
        if len(self._of) > _MOST_HEARD:
            _, self._of_all = self._of.popitem(last=False)

    def note_all(self) -> None:
        """Whatever it was, some of it may have been missed."""
        self._of.clear()
        self.number += 1
        self._of_all = self.number

    def since(self, number: int, *about: str) -> bool:
        """Whether any of these may have changed after that one of the news."""
        return max(self._of_all, *(self._of.get(one, 0) for one in about)) > number
