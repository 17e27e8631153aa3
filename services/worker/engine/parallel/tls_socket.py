"""A TLS connection that never waits, with the methods of a socket that `Channel` uses."""

import select
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.worker.engine.parallel.sealed_socket import SealedSocket


class TlsSocket:
    """Frames are read to their end, and each begins a TLS record: so what poll does not see, in
    OpenSSL's buffers, is never a frame's beginning."""

    def __init__(self, inner: ssl.SSLSocket) -> None:
        inner.setblocking(False)
        self._inner = inner

    def fileno(self) -> int:
        return self._inner.fileno()

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """0 at the end. Raises BlockingIOError, and ConnectionResetError."""
        try:
            return self._inner.recv_into(buffer, nbytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise ConnectionResetError(str(error)) from None

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Raises BlockingIOError, and ConnectionResetError."""
        try:
            return self._inner.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise ConnectionResetError(str(error)) from None

    def sendall(self, data: bytes | memoryview) -> None:
        """Waits for the other end to take it. Raises OSError."""
        send_all(self, data)

    def close(self) -> None:
        self._inner.close()


def send_all(connection: "TlsSocket | SealedSocket", data: bytes | memoryview) -> None:
    rest = memoryview(data).cast("B")
    writable = select.poll()
    writable.register(connection, select.POLLOUT)
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except BlockingIOError:
            writable.poll()
