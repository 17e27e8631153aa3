"""Redis: the client, the key names and the Lua functions' loader.

Redis may go away at any time. Every call here fails fast with `RedisAway`; what that means (fail
open, fail closed, last view stands) is the caller's documented decision.
"""

from collections.abc import Sequence
from typing import Any

import redis.asyncio
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

RedisAway = (ConnectionError, TimeoutError, OSError)
"""What a call raises when Redis cannot be reached or does not answer in time."""

Redis = redis.asyncio.Redis


def connect(url: str) -> Redis:
    """A lazily connecting client; commands time out after 2 s, connecting after 1 s."""
    client: Redis = redis.asyncio.from_url(
        url,
        decode_responses=True,
        socket_connect_timeout=1.0,
        socket_timeout=2.0,
        health_check_interval=15,
    )
    return client


class Script:
    """A Lua function: loaded once by hash, reloaded when Redis lost it (restart, flush)."""

    def __init__(self, client: Redis, source: str) -> None:
        self._run = client.register_script(source)

    async def __call__(self, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        """Runs atomically. Raises one of `RedisAway`, or ResponseError for a script's own error."""
        return await self._run(keys=list(keys), args=list(args))


__all__ = ["Redis", "RedisAway", "RedisError", "ResponseError", "Script", "connect"]
