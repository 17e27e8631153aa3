"""Redis: the client, the key names and the Lua functions' loader.

Redis may go away at any time. Every call here fails fast with `RedisAway`; what that means (fail
open, fail closed, last view stands) is the caller's documented decision.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio
from redis.exceptions import (
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

RedisAway = (ConnectionError, TimeoutError, OutOfMemoryError, ReadOnlyError, OSError)
"""What a call raises when Redis cannot be reached, does not answer in time, or takes no writes for
now (it or its disk is full, or it is read-only during a failover)."""

Redis = redis.asyncio.Redis


_TAKES_NO_WRITES = re.compile(r"(?:^|-)(MISCONF|OOM|READONLY)\b")
"""In what Redis answers: first, or behind a script's name and line where a script was to write."""


class _Answers:
    """That no writes are taken for now is one kind of error, whoever was to write: redis-py knows
    none for a full disk, and reads a script's error as one of the script."""

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = await super().read_response(*args, **kwargs)  # type: ignore[misc]
        except ResponseError as error:
            raise _told(error) from None
        if isinstance(answer, list):  # of a transaction
            return [_told(one) if isinstance(one, ResponseError) else one for one in answer]
        return answer


def _told(error: ResponseError) -> ResponseError:
    known = isinstance(error, RedisAway) or not _TAKES_NO_WRITES.search(str(error))
    return error if known else ReadOnlyError(str(error))


class _KeepsCancel:
    """A cancel that comes while a command is being sent ends the command.

    redis-py sends inside `asyncio.wait_for`, which before Python 3.12 may drop a cancel that
    arrives together with the result (bpo-37658): the task would go on, and who stops it, hang.
    """

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        task = asyncio.current_task()
        # One that waits to be delivered, as of a signal's handler, comes only now.
        before = task.cancelling() - task._must_cancel if task else 0  # type: ignore[attr-defined]
        await super().send_packed_command(*args, **kwargs)  # type: ignore[misc]
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise asyncio.CancelledError


class _Connection(_Answers, _KeepsCancel, redis.asyncio.Connection):
    pass


class _SSLConnection(_Answers, _KeepsCancel, redis.asyncio.SSLConnection):
    pass


class _UnixConnection(_Answers, _KeepsCancel, redis.asyncio.UnixDomainSocketConnection):
    pass


_CONNECTIONS = {"redis": _Connection, "rediss": _SSLConnection, "unix": _UnixConnection}


def connect(url: str) -> Redis:
    """A lazily connecting client; commands time out after 2 s, connecting after 1 s.

    A burst waits for one of 64 connections (2 s at most) instead of opening one a command.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=64,
        timeout=2.0,
        decode_responses=True,
        socket_connect_timeout=1.0,
        socket_timeout=2.0,
        health_check_interval=15,
    )
    pool.connection_class = _CONNECTIONS[urlsplit(url).scheme]  # the URL would outdo an argument
    return redis.asyncio.Redis.from_pool(pool)


class Script:
    """A Lua function: loaded once by hash, reloaded when Redis lost it (restart, flush)."""

    def __init__(self, client: Redis, source: str) -> None:
        self._run = client.register_script(source)

    async def __call__(self, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        """Runs atomically. Raises one of `RedisAway`, or ResponseError for a script's own error."""
        return await self._run(keys=list(keys), args=list(args))


__all__ = [
    "OutOfMemoryError",
    "ReadOnlyError",
    "Redis",
    "RedisAway",
    "RedisError",
    "ResponseError",
    "Script",
    "connect",
]
