"""The HTTP server: uvicorn within our bounds, on the service's event loop."""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn

from services.common.certificates import CertificateFiles
from services.common.open_files import allow_connections
from services.gateway.connection import Connection
from services.gateway.door import Door
from services.gateway.handshake import TlsListener
from services.gateway.pipeline import Gateway
from services.gateway.routes import application

log = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_CLOSE_S = 2  # for the last bytes of connections when the server ends
_LOOK_EVERY_S = 0.05


class HttpServer:
    """Binds on construction, so that port 0 is known before it serves; a taken port is OSError."""

    def __init__(
        self, gateway: Gateway, host: str, port: int, certificates: CertificateFiles | None = None
    ) -> None:
        """With certificates it speaks TLS, and nothing else."""
        own = gateway.settings.gateway
        self._listener = _listen(host, port)
        self._door = Door(own)
        self._connections = own.open_at_once
        self._tls: TlsListener | None = None
        if certificates is not None:
            self._tls = TlsListener(self._listener, self._door, certificates, self._protocol)
        self._config = uvicorn.Config(
            application(gateway),
            http=cast(Any, functools.partial(Connection, self._door)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing here believes in the client's address
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        self._server = _Uvicorn(self._config)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    async def start(self) -> None:
        allow_connections(self._connections)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not a line per bad request
        listeners = [] if self._tls else [self._listener]
        serving = asyncio.create_task(self._server.serve(sockets=listeners), name="http server")
        self._tasks = [serving, asyncio.create_task(self._door.watch(), name="http connections")]
        while not self._server.started:
            if serving.done():
                await serving  # raises what it failed of
                raise RuntimeError("the HTTP server ended at its start")
            await asyncio.sleep(0.005)
        if self._tls is not None:
            accepting = asyncio.create_task(self._tls.run(_BACKLOG), name="http listener")
            self._tasks.append(accepting)

    def check(self) -> None:
        if not self._tasks or any(task.done() for task in self._tasks):
            raise RuntimeError("the HTTP server is down")

    def part(self) -> None:
        """From now on each answer asks its client to come back on another connection."""
        close = (b"connection", b"close")
        self._config.encoded_headers.append(close)
        self._server.server_state.default_headers.append(close)

    async def close_door(self) -> None:
        """Listens no more, for others do; takes in first who has connected already."""
        if self._tls is not None:
            self._tasks.pop().cancel()
        came = []
        with contextlib.suppress(OSError):  # BlockingIOError when there is no more
            while True:
                came.append(self._listener.accept())
        for listening in self._server.servers:
            listening.close()
        self._listener.close()
        for connection, address in came:
            if self._tls is not None:
                self._tls.take(connection, str(address[0]))
            else:
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(self._protocol, connection)

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
                while self._door.connections:  # noqa: ASYNC110 - once in a gateway's life
                    await asyncio.sleep(_LOOK_EVERY_S)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._tasks:
            serving, *others = self._tasks
            await asyncio.gather(serving, return_exceptions=True)
            if self._tls is not None:
                self._tls.stop()
            self._door.close()
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        self._listener.close()


class _Uvicorn(uvicorn.Server):
    """Without signal handlers: the host decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named: without it the first events of an
    # answer wait up to 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # with its neighbours
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
