"""The port on which a service tells its metrics: `GET /metrics`, and pages of JSON beside it.

It has threads of its own, so that a scrape waits for no request and none for a scrape.
"""

import asyncio
import json
import logging
import socketserver
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import make_wsgi_app

log = logging.getLogger(__name__)

Page = Callable[[], Awaitable[Any]]
"""Makes what a page shows, as JSON; runs on the event loop. Whatever it raises is a 503."""

_SILENCE_S = 10.0  # a connection that says nothing for so long is closed
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
        self._server = _Server((host, port), _Handler)
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
        if environment["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _plain(start, "405 Method Not Allowed", "GET only")
        if path == "/metrics":
            return self._metrics(environment, start)  # type: ignore[no-any-return]
        if (page := self._pages.get(path)) is None:
            known = ", ".join(["/metrics", *self._pages])
            return _plain(start, "404 Not Found", f"there is {known}")
        try:
            made = asyncio.run_coroutine_threadsafe(_made(page), self._loop)
            body = json.dumps(made.result(_PAGE_S)).encode()
        except Exception as error:
            log.warning("%s cannot be told: %s", path, error)
            return _plain(start, "503 Service Unavailable", "not now")
        start("200 OK", [("Content-Type", "application/json")])
        return [body]


async def _made(page: Page) -> Any:
    return await page()


def _plain(start: StartResponse, status: str, text: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [text.encode() + b"\n"]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:  # WSGIServer's own asks the DNS for this host's name
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """A scrape is no news."""
