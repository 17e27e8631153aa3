"""One HTTP exchange over plain ASGI: JSON, server-sent events, OpenAI's errors.

No framework objects on the way out: a token's event is bytes handed to the server's `send`.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid
from services.gateway import metrics
from services.gateway.api.rest.body import ClientGoneError, RequestBody
from services.gateway.api.schema import max_marks, too_many_values
from services.gateway.connections.straight import STRAIGHT, Straight
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST
from services.gateway.intake import Place
from services.gateway.metering.refusals import LimitError

log = logging.getLogger(__name__)

_PIECE_BYTES = 64 * 1024  # of a large answer, each with the server's deadline for writes
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
    "head_timeout": 408,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "head_too_large": 431,
    "storage_full": 507,
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


class Exchange:
    """One request and its answer."""

    place: Place  # the tenant's, once its key is known
    principal: Principal | None = None
    """Whose durable job it is; None: it came from a client."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        route: str,
        settings: GatewaySettings,
        told_as: Callable[[PenstockError], dict[str, Any]] = error_body,
    ) -> None:
        self.request_id = REQUEST.new()
        self.route = route  # the path's template
        self.method: str = scope["method"]
        self.target: str = scope["path"]
        self.headers = Headers(scope=scope)
        self.peer = str((scope.get("client") or ("",))[0])  # its address
        self.body = RequestBody(self.headers, receive, settings)
        self.query = QueryParams(scope.get("query_string", b""))
        self.path: Mapping[str, str] = scope.get("path_params", {})
        self.headers_out: dict[str, str] = {}  # beside those of each answer
        self._told_as = told_as
        self.status = 0  # as sent
        self.complete = False
        self.client_gone = False
        self._watcher: asyncio.Task[None] | None = None
        self._receive = receive
        self._send = send
        self._straight: Straight | None = scope.get("extensions", {}).get(STRAIGHT)
        self._settings = settings

    @property
    def authorization(self) -> str | None:
        """What the caller shows. Who shows two shows none: readers differ in which counts."""
        return ", ".join(self.headers.getlist("authorization")) or None

    @property
    def endpoint(self) -> str:
        """As permissions.py has it."""
        return f"{self.method} {self.route}"

    # ---- in ---------------------------------------------------------------------------------

    async def json_body(self) -> bytes:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        encoding = self.headers.get("content-encoding", "identity").lower()
        if kind != "application/json" or encoding != "identity":
            raise invalid(
                "Send the body as JSON, uncompressed, with `Content-Type: application/json`.",
                "",
                reason="unsupported_media_type",
            )
        body = await self.body.whole(self.place)
        if too_many_values(body, self._settings):
            most = max_marks(self._settings)
            message = (
                f"The body has more than {most} commas, colons and brackets, in lists or in text."
            )
            raise invalid(message, "", reason="body_too_large")
        return body

    def watch_client(self) -> None:
        """From here on the handler is cancelled as soon as the client goes away.

        To call once the body was read: the two would take each other's messages.
        """
        task = asyncio.current_task()
        assert task is not None

        def gone() -> None:
            if not self.complete:
                self.client_gone = True
                task.cancel()

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone()

        if self._straight is not None:  # a task would wait as long as the answer takes
            self._straight.when_gone(gone)
        else:
            self._watcher = asyncio.create_task(watch(), name=f"client of {self.request_id}")

    def unwatch_client(self) -> None:
        """What watches has this exchange: no circle is left."""
        if self._straight is not None:
            self._straight.when_gone(None)
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    # ---- out --------------------------------------------------------------------------------

    async def reply_json(
        self, content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] = {}
    ) -> None:
        await self.reply(json.dumps(content).encode(), "application/json", status, headers)

    async def reply(
        self, body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] = {}
    ) -> None:
        """The whole answer. A connection whose request is not all here is closed after it."""
        unread = not await self.body.skim()
        length = {"content-type": content_type, "content-length": str(len(body))}
        await self._start(
            status, {**length, **headers, **({"connection": "close"} if unread else {})}
        )
        *pieces, last = _pieces(body)
        for piece in pieces:
            await self.write(piece)
        if unread:
            await self.write(last)
            await self.body.discard()
            last = b""
        self.complete = True
        await self._send({"type": "http.response.body", "body": last})

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

    async def write(self, events: bytes | memoryview) -> None:
        """Sends a piece of the answer; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    @property
    def is_clear(self) -> bool:
        """Whether `write_now` may be called."""
        return self._straight is not None and self._straight.is_clear

    def write_now(self, events: bytes) -> None:
        """As `write`, which would not have to wait."""
        assert self._straight is not None
        self._straight.write(events)

    async def end_events(self, events: bytes) -> None:
        self.complete = True
        await self._send({"type": "http.response.body", "body": events})

    async def fail(self, error: PenstockError, more: Mapping[str, str] = {}) -> None:
        """Tells the client: as the answer, with `more` headers, or as the last event of one that
        has begun."""
        body = self._told_as(error)
        if self.complete:
            return
        if self.status:
            await self.end_events(b"data: " + json.dumps(body).encode() + b"\n\n")
            return
        status = http_status(error)
        headers = dict(more)
        if isinstance(error, LimitError):
            headers.update(error.headers)
        if error.retry_after_s > 0 or status == 503:  # of a 429 it may be that no waiting helps
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        if status == 503:  # another gateway may take the next request
            headers["connection"] = "close"
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        await self.reply_json(body, status, headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        told = {**self.headers_out, **headers, "x-request-id": self.request_id}
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode()) for name, value in told.items()],
            }
        )


def _pieces(body: bytes) -> list[bytes | memoryview]:
    if len(body) <= _PIECE_BYTES:
        return [body]
    view = memoryview(body)
    return [view[at : at + _PIECE_BYTES] for at in range(0, len(body), _PIECE_BYTES)]


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """The ASGI application of one path: chooses by method, answers errors, counts.

    Methods that are not in `handlers` go to `otherwise`; without one they are a 405.
    """

    def __init__(
        self,
        route: str,
        handlers: Mapping[str, Handler],
        settings: GatewaySettings,
        otherwise: Handler | None = None,
        told_as: Callable[[PenstockError], dict[str, Any]] = error_body,
    ) -> None:
        """`told_as`: how failures are told."""
        self.route = route
        self._told_as = told_as
        self._handlers = handlers
        self._settings = settings
        self._otherwise = otherwise or self._not_allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.route, self._settings, self._told_as)
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
        allowed = ", ".join(self._handlers)
        message = f"{exchange.method} is not allowed here; allowed: {allowed}."
        await exchange.fail(invalid(message, "", reason="method_not_allowed"), {"allow": allowed})
