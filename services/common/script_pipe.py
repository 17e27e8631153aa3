"""Calls of one Lua function, gathered: those that come while a round trip is under way make the
next one, in order and on one connection. A burst of requests costs Redis a pipeline, not a
connection each, and what was called first happens first.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError

from services.common.redis import Redis, RedisAway

_BATCH = 128  # calls in one round trip


class ScriptPipe:
    """A Lua function called through pipelines; loaded when Redis does not have it."""

    def __init__(self, client: Redis, source: str) -> None:
        self._client = client
        self._script = client.register_script(source)
        self._waiting: list[tuple[list[Any], asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def __call__(self, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        """Runs atomically, perhaps twice. Raises one of `RedisAway` when two round trips failed, or
        ResponseError for the script's own error.

        Cancelling the caller does not undo the call.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(([len(keys), *keys, *args], reply))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all(), name="script calls")
        return await reply

    async def _send_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            calls = [call for call, _ in batch]
            try:
                replies = await self._send_twice(calls)
            except Exception as error:
                replies = [error] * len(batch)
            except asyncio.CancelledError:
                for _, reply in [*batch, *self._waiting]:
                    reply.cancel()
                raise
            for (_, reply), result in zip(batch, replies, strict=True):
                if reply.done():  # its caller was cancelled
                    continue
                if isinstance(result, Exception):
                    reply.set_exception(result)
                else:
                    reply.set_result(result)

    async def _send_twice(self, calls: list[list[Any]]) -> list[Any]:
        """One slow answer is no outage. The calls may be carried out twice, in the same order."""
        try:
            return await self._send(calls)
        except RedisAway:
            return await self._send(calls)

    async def _send(self, calls: list[list[Any]]) -> list[Any]:
        replies = await self._round_trip(calls)
        lost = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if lost:  # restarted or flushed: none of these has run
            await self._client.script_load(self._script.script)
            for i, reply in zip(
                lost, await self._round_trip([calls[i] for i in lost]), strict=True
            ):
                replies[i] = reply
        return replies

    async def _round_trip(self, calls: list[list[Any]]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(self._script.sha, *call)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
            return replies
