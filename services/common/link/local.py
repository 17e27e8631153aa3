"""The way of a link's frames within one host: a Unix socket beside the gRPC stream.

A gRPC message wakes ten threads at its two ends and costs 0.35 to 0.5 ms of processor time, however
small it is; the same bytes on a socket of the event loop cost a tenth. So a serving end that finds
its caller on its own host (and knows it: the stream is behind all locks) offers a socket in a
folder that no other user can enter, and a word to say there. A caller that cannot reach it, as from
another container, stays on the stream. Either way the stream stands as long as the link does.

On the socket a frame is its length, four bytes little-endian, and itself.
"""

import asyncio
import functools
import hmac
import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, cast

from protos.common_pb2 import Beside
from services.common.link.frames import MAX_FRAME_BYTES, Frame, LinkLostError, Outbox
from services.common.locks.socket_folder import SocketFolder, may_be_one

_LENGTH_BYTES = 4
_WORD_BYTES = 32
_MOST_UNREAD = 4 * 2**20  # bytes of frames that came and were not read yet
_MOST_UNWRITTEN = 2**20  # bytes; a writer waits until there are fewer again
_CONNECT_S = 2.0
_numbers = itertools.count()


class Wire(Protocol):
    """What carries frames: a gRPC call or context, or a `LocalWire`."""

    async def read(self) -> object:
        """The next frame, bytes; anything else once the peer has ended the link."""

    async def write(self, frame: bytes) -> None:
        """Returns when the next may be written. May raise where the peer is lost."""


async def read_all(wire: Wire, take: Callable[[object], None]) -> None:
    """Gives `take` each frame, as `Wire.read` has them; ends with what it raises."""
    if isinstance(wire, LocalWire):
        await wire.read_all(take)
    while True:
        take(await wire.read())


async def write_all(wire: Wire, outbox: Outbox[Frame], seal: Callable[[Frame], bytes]) -> None:
    """Sends what gathers, as `seal` makes bytes of it; ends with what that or the wire raises."""
    if isinstance(wire, LocalWire):
        await wire.write_all(outbox, seal)
    while True:
        await wire.write(seal(await outbox.take()))


class LocalWire(asyncio.Protocol):
    """One end of the socket.

    Who reads or writes all of it does so by plain calls, where data come and as soon as there is
    something to send: waking a task for each frame takes as long as most frames do.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._part = bytearray()  # of a frame
        self._frames: deque[bytes] = deque()
        self._unread = 0  # bytes of these
        self._lost = False
        self._coming: asyncio.Future[None] | None = None  # somebody reads
        self._take: Callable[[object], None] | None = None  # somebody reads all
        self._room: asyncio.Future[None] | None = None  # nothing may be written
        self._send: Callable[[], None] | None = None  # what is to be done when it may

    async def read(self) -> bytes | None:
        while not self._frames:
            if self._lost:
                return None
            self._coming = asyncio.get_running_loop().create_future()
            await self._coming
        frame = self._frames.popleft()
        before, self._unread = self._unread, self._unread - len(frame)
        if before > _MOST_UNREAD >= self._unread and not self._lost:
            self._transport.resume_reading()
        return frame

    async def write(self, frame: bytes) -> None:
        """Raises LinkLostError."""
        if self._lost:
            raise LinkLostError("the peer is gone")
        self._write(frame)
        if self._room is not None:
            await asyncio.shield(self._room)

    async def read_all(self, take: Callable[[object], None]) -> None:
        """As the function."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take_one(frame: object) -> None:
            try:
                take(frame)
            except Exception as error:
                self._take = None
                if not over.done():  # who reads may just have been cancelled
                    over.set_exception(error)

        while self._frames or self._lost:
            take(await self.read())
        self._take = take_one
        try:
            await over
        finally:
            self._take = None

    async def write_all(self, outbox: Outbox[Frame], seal: Callable[[Frame], bytes]) -> None:
        """As the function."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def send() -> None:
            if over.done() or self._room is not None:
                return
            try:
                if outbox.pending_bytes:
                    self._write(seal(outbox.pop()))
            except Exception as error:
                over.set_exception(error)
            if self._room is None:
                outbox.sent()

        self._send = send
        outbox.wake(send)
        try:
            await over
        finally:
            outbox.wake(None)
            self._send = None
            over.cancel()

    def _write(self, frame: bytes) -> None:
        self._transport.writelines((len(frame).to_bytes(_LENGTH_BYTES, "little"), frame))

    def close(self) -> None:
        """What was written leaves first."""
        self._transport.close()

    # ---- from the transport -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_MOST_UNWRITTEN)

    def data_received(self, data: bytes) -> None:
        part = self._part
        part += data
        at = 0
        while len(part) - at >= _LENGTH_BYTES:
            size = int.from_bytes(part[at : at + _LENGTH_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                self._transport.abort()
                return
            end = at + _LENGTH_BYTES + size
            if end > len(part):
                break
            self._hand_on(bytes(memoryview(part)[at + _LENGTH_BYTES : end]))
            at = end
        if at:
            del part[:at]

    def _hand_on(self, frame: bytes) -> None:
        if self._take is not None:
            return self._take(frame)
        self._frames.append(frame)
        before, self._unread = self._unread, self._unread + len(frame)
        if before <= _MOST_UNREAD < self._unread:
            self._transport.pause_reading()
        _done(self._coming)

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        _done(self._room)
        self._room = None
        if self._send is not None:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._take is not None:
            self._take(None)
        _done(self._coming)
        _done(self._room)


class _Guarded(LocalWire):
    """A serving end: its caller says the word first."""

    def __init__(self, word: bytes, let_in: "asyncio.Future[LocalWire]") -> None:
        super().__init__()
        self._word = word
        self._let_in = let_in
        self._said = b""
        self._known = False

    def data_received(self, data: bytes) -> None:
        if self._known:
            return super().data_received(data)
        self._said += data
        if len(self._said) < _WORD_BYTES:
            return
        said, rest = self._said[:_WORD_BYTES], self._said[_WORD_BYTES:]
        if self._let_in.done() or not hmac.compare_digest(said, self._word):
            self._transport.abort()
            return
        self._known, self._said = True, b""
        self._let_in.set_result(self)
        if rest:
            super().data_received(rest)


@asynccontextmanager
async def offered() -> AsyncIterator[tuple[Beside, "asyncio.Future[LocalWire]"]]:
    """What to tell the caller, and who comes: one. Nobody can come any more after the block."""
    loop = asyncio.get_running_loop()
    word = secrets.token_bytes(_WORD_BYTES)
    let_in: asyncio.Future[LocalWire] = loop.create_future()
    path = _folder().path / f"link-{next(_numbers)}"
    server = await loop.create_unix_server(lambda: _Guarded(word, let_in), path, backlog=1)
    try:
        yield Beside(path=str(path), word=word), let_in
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def taken(beside: Beside) -> LocalWire | None:
    """The calling end of what was offered; None where it cannot be reached from here, or lies where
    not only this user could have put it: a peer names no other service's socket to speak to."""
    loop = asyncio.get_running_loop()
    if len(beside.word) != _WORD_BYTES or not may_be_one(Path(beside.path).parent):
        return None
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, wire = await loop.create_unix_connection(LocalWire, beside.path)
    except (OSError, ValueError):  # TimeoutError is one; a path that is none, too
        return None
    wire._transport.write(beside.word)
    return wire


@functools.cache
def _folder() -> SocketFolder:
    """Of this process."""
    return SocketFolder()


def _done(waited_for: "asyncio.Future[None] | None") -> None:
    if waited_for is not None and not waited_for.done():
        waited_for.set_result(None)
