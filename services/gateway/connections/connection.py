"""One HTTP connection and its bounds: how large a head, how long a silence.

Nobody has shown a key yet when most of this counts. It is always in one of four states,
and none of them lasts for ever (door.py looks):

    waiting for a head    `head_timeout_s` from the accept, later from its first byte
    answering             the request's own deadlines: its body's rate, `request_timeout_s`
    not read by its peer  `write_timeout_s`, then it is reset: closing it would wait for the peer
    idle                  uvicorn's keep-alive
"""

import asyncio
import json
import math
import sys
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import grpc
import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.common.errors import PenstockError, invalid
from services.common.event import Event
from services.gateway import metrics
from services.gateway.api.rest.http import error_body, http_status
from services.gateway.connections import straight
from services.gateway.connections.door import Door

MAX_HEAD_BYTES = 32 * 1024  # of a request's line and headers, and of what frames its body
MAX_FIELDS = 128
MAX_AHEAD = 32  # requests sent before the answer to an earlier one
MAX_PIECES = (
    4096  # of a body in one read of 256 KiB: a chunk of one byte costs as much as a long one
)
_HEAD, _CONTINUE = b"HTTP/1.1 ", b"HTTP/1.1 100"


class _Flow(FlowControl):
    """Reads nothing while requests wait that were sent ahead: each answer would let in another
    read, and so each of those that wait a body."""

    def __init__(self, transport: asyncio.Transport, ahead: deque[Any]) -> None:
        super().__init__(transport)
        self._is_writable_event = cast(asyncio.Event, Event())  # of a tenth of the memory
        self._is_writable_event.set()
        self._ahead = ahead

    def resume_reading(self) -> None:
        if not self._ahead:
            super().resume_reading()


class _Ahead(list[Any]):
    """Requests sent ahead, as uvicorn asks its deque: few or none, and that one takes 760 bytes."""

    def appendleft(self, one: Any) -> None:
        self.insert(0, one)


class _Joined:
    """The transport as answers write to it: a head leaves with what follows it in the same turn of
    the loop, and else by itself. Each write wakes the client."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes | memoryview) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(b"".join((head, data)))
        elif data[: len(_HEAD)] == _HEAD and data[: len(_CONTINUE)] != _CONTINUE:
            self._head = bytes(data)
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, within bounds. Refusals have OpenAI's shape and close the connection."""

    # With uvicorn's own there are more than Python keeps without a table for each object.
    __slots__ = (
        "_bytes",
        "_data",
        "_door",
        "_fields",
        "_head_due",
        "_in_head",
        "_joined",
        "_made",
        "_peer",
        "_pieces",
        "_refusal",
        "_served",
        "_unread_since",
    )

    def __init__(self, door: Door, made: Callable[[], None] = lambda: None, **given: Any) -> None:
        """`made` is called before it takes a place: what stood for it gives its own back."""
        super().__init__(**given)
        self.pipeline = cast(deque[Any], _Ahead())
        self._door = door
        self._made = made
        self._peer = ""
        self._in_head = True
        self._head_due: float | None = None  # None: no head is on its way
        self._unread_since: float | None = None  # the peer does not take what we send
        self._bytes = 0  # since the last piece of a body, or the last request
        self._fields = 0
        self._data = b""  # while it is parsed
        self._pieces = 0  # of bodies, in this data
        self._refusal: PenstockError | None = None
        self._served: RequestResponseCycle | None = None  # `cycle` is the last that came

    # ---- from the transport -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._peer = str((transport.get_extra_info("peername") or ("",))[0])
        self.transport = transport
        self._made()
        try:
            self._door.admit(self, self._peer)
        except PenstockError as error:
            return self._refuse(error)
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self._joined = _Joined(transport, self.loop)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self, self._peer)
        super().connection_lost(exc)
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_due is None:
            self._await_head()
        self._bytes += len(data)
        self._data, self._pieces = data, 0
        super().data_received(data)
        self._data = b""
        if self._bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_too_large())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None

    # ---- from the parser --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        # uvicorn stops reading, but one read brings thousands, and each answer allows another.
        if len(self.pipeline) >= MAX_AHEAD:
            metrics.refused.labels("too_many_ahead").inc()
            self._fail(invalid(f"Over {MAX_AHEAD} requests were sent ahead.", ""))
        super().on_message_begin()
        self._await_head()
        self._fields = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: nobody here reads it
        self._fields += 1
        if self._fields > MAX_FIELDS:
            self._fail(_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        # The last read may have brought more than the bound at once.
        if len(self.url) + sum(len(n) + len(v) for n, v in self.headers) > MAX_HEAD_BYTES:
            self._fail(_too_large())
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # else this one is read again without its wish
            self.cycle.transport = self._joined  # type: ignore[assignment]
            straight.add(self.cycle)
        self._in_head, self._head_due = False, None

    def on_body(self, body: bytes) -> None:
        self._bytes = 0
        self._pieces += 1
        if self._pieces > MAX_PIECES:
            metrics.refused.labels("chunks_too_small").inc()
            self._fail(invalid("The body's chunks are too small.", "", reason="chunks_too_small"))
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._bytes = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._head_due is not None:  # the next request was held up by this one
            self._await_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def _should_upgrade(self) -> bool:
        """Whether uvicorn should leave this request to `handle_websocket_upgrade`."""
        return self.parser.get_method() != b"CONNECT"  # which the parser takes for an upgrade

    def handle_websocket_upgrade(self) -> None:
        """The parser takes no body from a request that wishes for another protocol, as Java's
        client does with each. None is spoken here: the request is read again without its wish.
        """
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        fields = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        version = self.parser.get_http_version().encode()
        line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
        rest = self._data[upgrade.args[0] :]
        self._data = b"".join([line, *fields, b"\r\n", rest])
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        super().data_received(self._data)

    # ---- the end ----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._answering() and not self.transport.get_write_buffer_size()

    def look(self, now: float) -> None:
        """Ends it if its time is up."""
        if self._unread_since is None and self.transport.is_closing():
            self._unread_since = now  # what is left to send has as long as anything
        settings = self._door.settings
        if self._unread_since is not None:
            if now - self._unread_since > settings.write_timeout_s:
                metrics.refused.labels("client_does_not_read").inc()
                self.transport.abort()
        elif self._head_due is not None and now > self._head_due and not self._answering():
            metrics.refused.labels("head_timeout").inc()
            self._refuse(
                invalid("The request's headers did not arrive in time.", "", reason="head_timeout")
            )

    def give_way(self) -> None:
        self.transport.abort()

    def abort(self) -> None:
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser fails, with what `_fail` said or for itself."""
        error = self._refusal or invalid("This is not valid HTTP/1.1.", "", reason="invalid_http")
        self._refuse(error)

    def _await_head(self) -> None:
        self._head_due = self.loop.time() + self._door.settings.head_timeout_s

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _fail(self, error: PenstockError) -> None:
        """From within the parser, which ends by an exception and calls `send_400_response`."""
        self._refusal = error
        raise error

    def _refuse(self, error: PenstockError) -> None:
        if self._answering():
            unanswered = not self.cycle.response_started and not self.pipeline
            if self._in_head or not unanswered:
                # Another request's answer is due first: there is no place for this one.
                return self.transport.abort()
            self.cycle.disconnected = True  # whoever reads its body hears that it ended
            self.cycle.message_event.set()
        self.transport.write(_response(error))
        self.transport.close()


def _too_large() -> PenstockError:
    metrics.refused.labels("head_too_large").inc()
    return PenstockError(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"The request's headers are over {MAX_HEAD_BYTES} bytes or {MAX_FIELDS} fields.",
        stage="gateway",
        reason="head_too_large",
    )


def _response(error: PenstockError) -> bytes:
    status = HTTPStatus(http_status(error))
    body = json.dumps(error_body(error)).encode()
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    if error.retry_after_s:
        lines.append(f"retry-after: {max(1, math.ceil(error.retry_after_s))}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
