"""TLS before HTTP: a connection has its place, and its time, from the accept on.

The loop's own TLS server tells nobody of a connection before its handshake is over, so as many as
like could stay in it. So it begins here. (Not by `start_tls` on an accepted connection: uvloop,
which Ray's processes run on, reads the client's first bytes before it can be called.)
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from services.common.errors import PenstockError
from services.common.locks.certificates import CertificateFiles
from services.gateway.connections.door import Door


class Handshake:
    """A place at the door until TLS stands; then the connection takes one for itself."""

    def __init__(self, door: Door, connection: socket.socket, peer: str) -> None:
        """Raises PenstockError where there is no place left."""
        self._door = door
        self._connection = connection
        self._peer = peer
        door.admit(self, peer)

    @property
    def idle(self) -> bool:
        return True

    def over(self) -> None:
        self._door.leave(self, self._peer)

    def look(self, now: float) -> None:
        """The loop ends a handshake when its time is up."""

    def give_way(self) -> None:
        """The handshake fails of it, and whoever runs it closes what is his."""
        with contextlib.suppress(OSError):  # its peer is gone
            self._connection.shutdown(socket.SHUT_RDWR)

    def abort(self) -> None:
        self._connection.close()


class Handshakes:
    """All that are under way. `connection` makes the protocol of one whose handshake is over; it is
    given what to call when it has been made."""

    def __init__(
        self,
        door: Door,
        certificates: CertificateFiles,
        connection: Callable[[Callable[[], None]], asyncio.Protocol],
    ) -> None:
        self._door = door
        self._certificates = certificates
        self._connection = connection
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, connection: socket.socket, peer: str) -> None:
        """Begins the handshake of an accepted connection, or ends it: without TLS there is no way
        to say why."""
        try:
            handshake = Handshake(self._door, connection, peer)
        except PenstockError:
            return connection.close()
        task = asyncio.create_task(self._shake(handshake, connection), name="tls handshake")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _shake(self, handshake: Handshake, connection: socket.socket) -> None:
        within_s = self._door.settings.head_timeout_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connection(handshake.over),
                connection,
                ssl=self._certificates.ssl_context(),
                ssl_handshake_timeout=within_s,
                ssl_shutdown_timeout=within_s,
            )
        except (OSError, ssl.SSLError):  # ConnectionAbortedError when its time is up
            connection.close()
        finally:
            handshake.over()

    def stop(self) -> None:
        for task in self._running:
            task.cancel()
