"""TLS before HTTP: a connection has its place, and its time, from the accept on.

asyncio's own TLS server tells nobody of a connection before its handshake is over, so as many as
like could stay in it.
"""

import asyncio
import ssl
from typing import Any, cast

from services.common.certificates import CertificateFiles
from services.common.errors import PenstockError
from services.gateway.connections import Connection, Door


class Handshake(asyncio.Protocol):
    """uvicorn's protocol until TLS stands; then a Connection takes its place."""

    def __init__(self, door: Door, certificates: CertificateFiles, **given: Any) -> None:
        self._door = door
        self._certificates = certificates
        self._given = given
        self._peer = ""
        self._begun: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self._peer = str((transport.get_extra_info("peername") or ("",))[0])
        try:
            self._door.admit(self, self._peer)
        except PenstockError:  # there is no way to say so without TLS
            return self.abort()
        self._begun = asyncio.get_running_loop().create_task(self._begin(), name="tls handshake")

    def look(self, now: float) -> None:
        """asyncio ends a handshake when its time is up."""

    def abort(self) -> None:
        self._raw.abort()

    async def _begin(self) -> None:
        early = _Early()
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self._raw,
                early,
                self._certificates.ssl_context(),
                server_side=True,
                ssl_handshake_timeout=self._door.settings.head_timeout_s,
                ssl_shutdown_timeout=self._door.settings.head_timeout_s,
            )
        except (OSError, ssl.SSLError):  # ConnectionAbortedError when its time is up
            return self.abort()
        finally:
            self._door.leave(self, self._peer)  # the connection takes a place for itself, now
        if transport is None or early.lost:
            return
        connection = Connection(self._door, **self._given)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if early.data:
            connection.data_received(bytes(early.data))
        if early.ended:
            connection.eof_received()


class _Early(asyncio.Protocol):
    """Keeps what arrives together with the end of the handshake."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = self.lost = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> None:
        self.ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
