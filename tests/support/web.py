"""A small HTTP server in a thread, for what a test stands in for."""

import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = tuple[int, str]


@contextmanager
def serving(
    pages: Mapping[str, Answer],
    *,
    api_key: str = "",
    certificate: Path | None = None,
    ahead_s: float = 0,
) -> Iterator[str]:
    """Its host:port. `pages` by path; with `api_key`, a 401 for who does not send it as such.
    `certificate`: a folder with tls.crt and tls.key, to speak TLS. Its clock is
    so far ahead.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = not api_key or self.headers.get("api-key") == api_key
            status, text = pages.get(self.path, (404, "")) if known else (401, "")
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(time.time() + ahead_s)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "tls.crt", certificate / "tls.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
