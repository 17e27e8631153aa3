"""The port on which a service tells its metrics: `GET /metrics`, and pages of JSON beside it.

It has threads of its own, so that a scrape waits for no request and none for a scrape: one for each
connection, and each ends soon. There are a few at once, shared between the peers' addresses:
whether a service lives is asked here, and who holds connections must not have it killed.
"""

import asyncio
import contextlib
import io
import json
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import make_wsgi_app

from services.common.fairness.shares import Shares

log = logging.getLogger(__name__)

Page = Callable[[], Awaitable[Any]]
"""Makes what a page shows, as JSON; runs on the event loop. Whatever it raises is a 503."""

_CONNECTIONS = 16  # at once; what an address has beyond its share is closed
_BACKLOG = 64
_SILENCE_S = 10.0  # a connection that says nothing for so long is closed
_CONNECTION_S = 20.0  # and one that has lasted for so long, whatever it says
_PAGE_S = 5.0


class MetricsServer:
    """Serves from `start` to `close`."""

    def __init__(self, pages: Mapping[str, Page], loop: asyncio.AbstractEventLoop) -> None:
        """`pages` by path, made on `loop`."""
        self._pages = pages
        self._loop = loop
        self._metrics = make_wsgi_app()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> int:
        """Returns the port, which 0 leaves to the system. Raises OSError."""
        self._server = _Server(host, port)
        self._server.set_app(self._answer)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Blocks until the thread has noticed: half a second."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environment: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environment["PATH_INFO"]
        if environment["REQUEST_METHOD"] != "GET":
            return _plain(start, "405 Method Not Allowed", "GET only")
        page = self._pages.get(path)
        if page is None and path != "/metrics":
            known = ", ".join(["/metrics", *self._pages])
            return _plain(start, "404 Not Found", f"there is {known}")
        try:
            if page is None:
                return self._metrics(environment, start)  # type: ignore[no-any-return]
            body = json.dumps(self._make(page)).encode()
        except Exception as error:
            log.warning("%s cannot be told: %s", path, error)
            return _plain(start, "503 Service Unavailable", "not now")
        start("200 OK", [("Content-Type", "application/json")])
        return [body]

    def _make(self, page: Page) -> Any:
        made = asyncio.run_coroutine_threadsafe(_made(page), self._loop)
        try:
            return made.result(_PAGE_S)
        finally:
            made.cancel()  # one that is late: nobody waits for it any more


async def _made(page: Page) -> Any:
    return await page()


def _plain(start: StartResponse, status: str, text: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [text.encode() + b"\n"]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = _BACKLOG

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = Shares(_CONNECTIONS)
        self._changing = threading.Lock()  # of the places
        self._since: dict[socket.socket, float] = {}  # the connections, and when they came
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:  # WSGIServer's own asks the DNS for this host's name
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changing:
            admitted = self._places.take(client_address[0])
        if not admitted:
            return self.shutdown_request(request)
        self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._ended(request, client_address)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request, client_address)

    def _ended(self, request: socket.socket, client_address: Any) -> None:
        del self._since[request]
        with self._changing:
            self._places.give_back(client_address[0])

    def service_actions(self) -> None:
        """Called often. Ends what lasts too long: its thread finds it closed."""
        before = time.monotonic() - _CONNECTION_S
        for request, since in self._since.copy().items():
            if since < before:
                with contextlib.suppress(OSError):  # it has just ended by itself
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who goes away, or says nothing, is no news."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.error("the metrics port: %r", error)


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """A scrape is no news."""

    def get_stderr(self) -> io.StringIO:
        """Nor is who does not read what it asked for: wsgiref would print a stack trace."""
        return io.StringIO()
