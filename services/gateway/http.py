"""One HTTP exchange over plain ASGI: body limits, JSON, server-sent events, OpenAI's errors.

No framework objects on the way out: a token's event is bytes handed to the server's `send`.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import grpc
from starlette.datastructures import Headers, QueryParams
from starlette.types import Message, Receive, Scope, Send

from services.common.errors import PenstockError, invalid
from services.gateway import metrics
from services.gateway.ids import REQUEST

log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30.0  # for a body to arrive
LINGER_S = 2.0  # for the rest of a refused body
CLIENT_GONE = 499  # the customary status for the metrics; nobody reads the answer

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: CLIENT_GONE,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_STATUS_OF_REASON = {
    "method_not_allowed": 405,
    "body_timeout": 408,
    "body_too_large": 413,
    "unsupported_media_type": 415,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_WORDS = {"unavailable": "unavailable", "deadline_exceeded": "timeout"}


def http_status(error: PenstockError) -> int:
    return _STATUS_OF_REASON.get(error.reason) or _STATUS.get(error.code, 500)


def error_body(error: PenstockError) -> dict[str, Any]:
    """OpenAI's error shape, and the stage that failed."""
    status = http_status(error)
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    stage = error.stage or "gateway"
    code = error.reason or error.code.name.lower()
    if code in _WORDS:  # no reason was given; "worker_unavailable" says more than "unavailable"
        code = f"{stage}_{_WORDS[code]}"
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param or None,
            "code": code,
            "stage": stage,
        }
    }


def internal(message: str = "The gateway failed on this request.") -> PenstockError:
    return PenstockError(grpc.StatusCode.INTERNAL, message, stage="gateway", reason="internal")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class Exchange:
    """One request and its answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, route: str, body_limit: int
    ) -> None:
        self.request_id = REQUEST.new()
        self.route = route  # the path's template
        self.method: str = scope["method"]
        self.target: str = scope["path"]
        self.headers = Headers(scope=scope)
        self.query = QueryParams(scope.get("query_string", b""))
        self.path: Mapping[str, str] = scope.get("path_params", {})
        self.status = 0  # as sent
        self.complete = False
        self.client_gone = False
        self._watcher: asyncio.Task[None] | None = None
        self._body_read = False
        self._receive = receive
        self._send = send
        self._body_left = body_limit
        self._body_limit = body_limit
        self._body_deadline = time.monotonic() + BODY_TIMEOUT_S

    # ---- in ---------------------------------------------------------------------------------

    async def _receive_body(self) -> Message:
        """ASGI's `receive` for a body: bounded in bytes and time, and without a silent end."""
        self._check_body_left()
        try:
            async with asyncio.timeout(self._body_deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise invalid(
                f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s.", "", reason="body_timeout"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._body_left -= len(message.get("body", b""))
        self._check_body_left()
        return message

    def _check_body_left(self) -> None:
        if self._body_left < 0:
            raise invalid(
                f"The body is larger than {self._body_limit} bytes.", "", reason="body_too_large"
            )

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives."""
        announced = self.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._body_limit:
            self._body_left = -1  # refused before a byte of it is read
        more = True
        while more:
            message = await self._receive_body()
            yield message.get("body", b"")
            more = message.get("more_body", False)
        self._body_read = True

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def json_body(self) -> bytes:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        encoding = self.headers.get("content-encoding", "identity").lower()
        if kind != "application/json" or encoding != "identity":
            raise invalid(
                "Send the body as JSON, uncompressed, with `Content-Type: application/json`.",
                "",
                reason="unsupported_media_type",
            )
        return await self.body()

    def watch_client(self) -> None:
        """From here on the handler is cancelled as soon as the client goes away.

        To call once the body was read: the two would take each other's messages.
        """
        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self.complete:
                self.client_gone = True
                task.cancel()

        self._watcher = asyncio.create_task(watch(), name=f"client of {self.request_id}")

    def unwatch_client(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    # ---- out --------------------------------------------------------------------------------

    async def reply_json(
        self, content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] = {}
    ) -> None:
        await self.reply(json.dumps(content).encode(), "application/json", status, headers)

    async def reply(
        self, body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] = {}
    ) -> None:
        """The whole answer."""
        await self._start(
            status, {"content-type": content_type, "content-length": str(len(body)), **headers}
        )
        if headers.get("connection") == "close" and not self._body_read:
            await self.write(body)
            await self._discard_rest()
            body = b""
        self.complete = True
        await self._send({"type": "http.response.body", "body": body})

    async def _discard_rest(self) -> None:
        """Reads on for a while before the connection is closed.

        Closing it on a client that still sends would reset it, and the client might never see the
        answer.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                more = True
                while more:
                    more = (await self._receive()).get("more_body", False)

    async def start_events(self) -> None:
        """Begins an answer of server-sent events."""
        await self._start(
            200,
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",  # a proxy before us must not hold tokens back
            },
        )

    async def write(self, events: bytes) -> None:
        """Sends events; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        self.complete = True
        await self._send({"type": "http.response.body", "body": events})

    async def fail(self, error: PenstockError) -> None:
        """Tells the client: as the answer, or as the last event of one that has begun."""
        body = error_body(error)
        if self.complete:
            return
        if self.status:
            await self.end_events(b"data: " + json.dumps(body).encode() + b"\n\n")
            return
        status = http_status(error)
        headers = {}
        if error.retry_after_s > 0 or status in (429, 503):
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        if status in (408, 413, 503):
            headers["connection"] = "close"
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        await self.reply_json(body, status, headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        told = {**headers, "x-request-id": self.request_id}
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode()) for name, value in told.items()],
            }
        )


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """The ASGI application of one path: chooses by method, answers errors, counts.

    Methods that are not in `handlers` go to `otherwise`; without one they are a 405.
    """

    def __init__(
        self,
        route: str,
        handlers: Mapping[str, Handler],
        body_limit: int,
        otherwise: Handler | None = None,
    ) -> None:
        self.route = route
        self._handlers = handlers
        self._body_limit = body_limit
        self._otherwise = otherwise or self._not_allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.route, self._body_limit)
        began = time.monotonic()
        try:
            await self._answer(exchange)
        except ClientGoneError:
            exchange.status = CLIENT_GONE
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not exchange.client_gone or task is None or task.uncancel() > 0:
                raise
            exchange.status = CLIENT_GONE
        finally:
            exchange.unwatch_client()
            metrics.requests.labels(self.route, exchange.status).inc()
            metrics.duration.labels(self.route).observe(time.monotonic() - began)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._handlers.get(exchange.method, self._otherwise)(exchange)
        except PenstockError as error:
            await exchange.fail(error)
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("%s %s failed", exchange.method, self.route)
            await exchange.fail(internal())

    async def _not_allowed(self, exchange: Exchange) -> None:
        raise invalid(
            f"{exchange.method} is not allowed here; allowed: {', '.join(self._handlers)}.",
            "",
            reason="method_not_allowed",
        )
