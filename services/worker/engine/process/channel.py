"""The blocking end of a socket between processes of one engine."""

import select
import socket
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from services.worker.engine.process import wire

if TYPE_CHECKING:
    from services.worker.engine.parallel.sealed_socket import SealedSocket
    from services.worker.engine.parallel.tls_socket import TlsSocket


class Closed(Exception):
    """The other end is gone, or asked to end."""


class Channel:
    """Frames on a socket, taken as they come: what there is of one is kept until the rest is."""

    def __init__(self, sock: "socket.socket | TlsSocket | SealedSocket") -> None:
        self._socket = sock
        self._taken = self._frames()
        self._amid = False  # a frame has come in part

    def fileno(self) -> int:
        return self._socket.fileno()

    def take(self) -> Any | None:
        """The next message, or None if not all of it has come. Never waits.

        Raises Closed at the end.
        """
        return next(self._taken)

    def more(self, within_s: float) -> bool:
        """Whether more comes of a frame that has come in part; waits so long for it."""
        return self._amid and self._readable(max(0.0, within_s))

    def receive(self) -> Any:
        """The next message, waited for. Raises Closed at the end."""
        while (message := self.take()) is None:
            self._readable(None)
        return message

    def send(self, message: object) -> None:
        """Waits for the other end to take it. Raises Closed at the end."""
        try:
            for piece in wire.encode(message):
                self._socket.sendall(piece)
        except OSError:
            raise Closed from None

    def _readable(self, within_s: float | None) -> bool:
        poll = select.poll()  # select knows no descriptors past 1,024, and a worker may have more
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if within_s is None else within_s * 1000))

    def _frames(self) -> Iterator[Any | None]:
        """Each message, and None whenever there is nothing more to read."""
        while True:
            (count,) = wire.COUNT.unpack((yield from self._read(wire.COUNT.size)))
            self._amid = True
            sizes = wire.decode_sizes(bytes((yield from self._read(8 * count))))
            parts = []
            for size in sizes:
                parts.append((yield from self._read(size)))
            self._amid = False
            yield wire.decode(parts)

    def _read(self, size: int) -> Generator[None, None, bytearray]:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            try:
                count = self._socket.recv_into(rest, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                yield None
                continue
            except OSError:  # reset, or timed out
                raise Closed from None
            if count == 0:
                raise Closed
            rest = rest[count:]
        return data
