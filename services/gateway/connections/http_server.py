"""The HTTP server: uvicorn within our bounds, on the service's event loop."""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from services.common.config import GatewaySettings
from services.common.locks.certificates import CertificateFiles
from services.common.open_files import allow_connections
from services.gateway.connections.connection import Connection
from services.gateway.connections.door import Door
from services.gateway.connections.handshake import Handshakes
from services.gateway.connections.listener import Listener

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_CLOSE_S = 2  # for the last bytes of connections when the server ends
_LOOK_EVERY_S = 0.05


class HttpServer:
    """Binds on construction, so that port 0 is known before it serves; a taken port is OSError."""

    def __init__(
        self,
        application: ASGIApp,
        own: GatewaySettings,
        host: str,
        port: int,
        certificates: CertificateFiles | None = None,
    ) -> None:
        """With certificates it speaks TLS, and nothing else."""
        self._door = Door(own)
        self._connections = own.open_at_once
        self._handshakes: Handshakes | None = None
        if certificates is not None:
            self._handshakes = Handshakes(self._door, certificates, self._protocol)
        self._listener = Listener(host, port, self._take)
        self._taken: set[asyncio.Task[None]] = set()  # and no connection yet
        self._config = uvicorn.Config(
            application,
            interface="asgi3",
            http=cast(Any, functools.partial(Connection, self._door)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing here believes in the client's address
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        self._server = _Uvicorn(self._config)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self) -> None:
        allow_connections(self._connections)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not a line per bad request
        serving = asyncio.create_task(self._server.serve(sockets=[]), name="http server")
        self._tasks = [serving, asyncio.create_task(self._door.watch(), name="http connections")]
        while not self._server.started:
            if serving.done():
                await serving  # raises what it failed of
                raise RuntimeError("the HTTP server ended at its start")
            await asyncio.sleep(0.005)
        self._listener.start()

    def check(self) -> None:
        if not self._tasks or any(task.done() for task in self._tasks):
            raise RuntimeError("the HTTP server is down")

    def part(self) -> None:
        """From now on each answer asks its client to come back on another connection."""
        close = (b"connection", b"close")
        self._config.encoded_headers.append(close)
        self._server.server_state.default_headers.append(close)

    def close_door(self) -> None:
        """Listens no more, for others do; takes in first who has connected already."""
        self._listener.close()

    def _take(self, connection: socket.socket, peer: str) -> None:
        if self._handshakes is not None:
            return self._handshakes.begin(connection, peer)
        task = asyncio.create_task(self._connect(connection), name="http connection")
        self._taken.add(task)
        task.add_done_callback(self._taken.discard)

    async def _connect(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # its peer is gone
            connection.close()

    def _protocol(self, made: Callable[[], None] = lambda: None) -> Connection:
        """As uvicorn makes one."""
        return Connection(
            self._door,
            made,
            config=self._config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
        )

    async def emptied(self, within_s: float) -> None:
        """Returns when no connection is left, or after that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._taken or self._door.connections:  # noqa: ASYNC110 - once in its life
                    await asyncio.sleep(_LOOK_EVERY_S)

    async def stop(self) -> None:
        self._listener.stop()
        self._server.should_exit = True
        if self._tasks:
            serving, *others = self._tasks
            await asyncio.gather(serving, return_exceptions=True)
            if self._handshakes is not None:
                self._handshakes.stop()
            self._door.close()
            for task in (*others, *self._taken):
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


class _Uvicorn(uvicorn.Server):
    """Without signal handlers: the host decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
