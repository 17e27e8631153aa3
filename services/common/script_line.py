"""Calls of one Lua function on a connection of their own: each leaves at once, whatever is under
way, and they are answered in order. So a call waits for no other's round trip, takes no connection
from anybody, and what was called first happens first.

A Redis that hangs is told from a loop that is late: only when what has come is read, and it is
nothing, is Redis said to be away. Then all calls fail at once.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.common.redis import Redis

_LAST_LOOK_S = 0.05  # at what has come while the loop was late
_TRIES = 2


@dataclass(slots=True, eq=False)
class _Call:
    words: list[Any]
    reply: "asyncio.Future[Any]"
    at: float  # loop time
    tries: int = 0


class ScriptLine:
    """A Lua function that is called often; the connection begins with loading it. One for the whole
    life of a client. (redis.Script: for what is called now and then, on the pool's connections.)"""

    def __init__(self, client: Redis, source: str, patience_s: float = 4.0) -> None:
        """Takes its connection from the client's pool, which closes it with the client; connects
        with the first call. `patience_s`: how long Redis may leave the oldest call unanswered."""
        self._script = client.register_script(source)
        self._patience_s = patience_s
        self._calls: deque[_Call] = deque()  # not answered yet
        self._unsent: list[_Call] = []  # of them
        pool = client.connection_pool
        self._connection: AbstractConnection = pool.get_available_connection()
        self._open = False
        self._reader: asyncio.Task[None] | None = None

    def __call__(self, keys: Sequence[str], args: Sequence[Any] = ()) -> "asyncio.Future[Any]":
        """Runs atomically, perhaps twice. Fails with one of `RedisAway`, or with ResponseError for
        the script's own error.

        Cancelling the caller does not undo the call.
        """
        loop = asyncio.get_running_loop()
        words = ["EVALSHA", self._script.sha, len(keys), *keys, *args]
        call = _Call(words, loop.create_future(), loop.time())
        self._calls.append(call)
        if self._open:
            self._unsent.append(call)
            if len(self._unsent) == 1:
                loop.call_soon(self._send)  # with what else this turn calls
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read_all(), name="script calls")
            self._reader.add_done_callback(self._over)
        return call.reply

    async def _read_all(self) -> None:
        """Until all are answered. The connection stays."""
        while self._calls:
            try:
                await self._connect()
                while self._calls:
                    await self._read()
            except Exception as error:
                await self._fail(error)

    def _over(self, reader: "asyncio.Task[None]") -> None:
        """Nobody waits for a reader that was cancelled: the loop is about to end."""
        while reader.cancelled() and self._calls:
            self._calls.popleft().reply.cancel()

    async def _connect(self) -> None:
        if self._open and self._connection.is_connected:
            return
        try:
            async with asyncio.timeout(self._left_s()):
                await self._connection.connect()
                load = self._connection.pack_command("SCRIPT", "LOAD", self._script.script)
                self._connection._writer.writelines(load)  # type: ignore[union-attr]
                await self._connection.read_response(disconnect_on_error=False)
        except TimeoutError:
            raise RedisTimeoutError("Redis took no connection in time") from None
        self._open = True
        self._unsent = list(self._calls)
        self._send()

    def _send(self) -> None:
        """Not awaited, and by nobody's task that may be cancelled: a call is sent whole."""
        connection, unsent = self._connection, self._unsent
        if not (unsent and self._open) or connection._writer is None:
            return
        self._unsent = []
        for call in unsent:
            call.tries += 1
        packed = [b"".join(connection.pack_command(*call.words)) for call in unsent]
        connection._writer.write(b"".join(packed))

    async def _read(self) -> None:
        """The oldest call's answer."""
        try:
            reply = await _read_within(self._connection, self._left_s())
        except NoScriptError:
            raise RedisConnectionError("the script was flushed") from None  # this one, and the next
        except ResponseError as error:  # an answer as well, and no writes for now, too
            reply = error
        call = self._calls.popleft()
        if call.reply.done():  # its caller was cancelled
            return
        if isinstance(reply, Exception):
            call.reply.set_exception(reply)
        else:
            call.reply.set_result(reply)

    def _left_s(self) -> float:
        left_s = self._calls[0].at + self._patience_s - asyncio.get_running_loop().time()
        return max(left_s, _LAST_LOOK_S)

    async def _fail(self, error: Exception) -> None:
        """A connection that is lost may be an idle one that was closed: what was sent once is sent
        again. Whatever else it is, it is so for all."""
        lost, self._open = self._open and isinstance(error, RedisConnectionError), False
        await self._connection.disconnect(nowait=True)
        calls = list(self._calls)
        self._calls.clear()
        for call in calls:
            if lost and call.tries < _TRIES:
                self._calls.append(call)
            elif not call.reply.done():
                call.reply.set_exception(error)


async def _read_within(connection: AbstractConnection, seconds: float) -> Any:
    """Raises redis' TimeoutError. A reply that came while the loop was late is there at the last
    look, however late that is: what a socket has is read before a timer rings, but it takes a task
    another turn to see it."""
    for patience_s in (seconds, _LAST_LOOK_S):
        try:
            async with asyncio.timeout(patience_s):
                return await connection.read_response(timeout=math.inf, disconnect_on_error=False)
        except TimeoutError:
            continue
    raise RedisTimeoutError("Redis did not answer in time")
