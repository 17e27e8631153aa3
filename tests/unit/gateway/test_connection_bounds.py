"""Bounds of a connection: of its heads, of what it sends ahead, of its time; and who is let in."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.gateway import metrics
from services.gateway.connections.connection import (
    MAX_AHEAD,
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    Connection,
)
from services.gateway.connections.door import Door
from tests.support.waiting import until


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


def connection(door: Door, asgi: Any = app, loop: Any = None) -> Connection:
    config = uvicorn.Config(asgi, lifespan="off", log_config=None, access_log=False)
    config.load()
    return Connection(door, config=config, server_state=ServerState(), app_state={}, _loop=loop)


@asynccontextmanager
async def client(
    asgi: Any = app, **settings: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    door = Door(GatewaySettings(**settings))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: connection(door, asgi), "127.0.0.1", 0)
    async with server, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield reader, writer
        writer.transport.abort()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:])
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, body


# ---- how an answer leaves ----------------------------------------------------------------------


async def test_a_head_leaves_with_what_follows_at_once() -> None:
    one = Timed()
    await one.says(GET, answered=1)
    assert [piece.partition(b" ")[0] for piece in one.transport.pieces] == [b"HTTP/1.1"]
    assert one.transport.written.endswith(b"ok")


async def test_a_head_waits_for_nothing_else() -> None:
    goes_on = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await goes_on.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async with client(slow) as (reader, writer):
        writer.write(GET)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        goes_on.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"2\r\nok\r\n0\r\n\r\n"


async def test_a_body_that_reads_like_a_head_arrives_as_it_is() -> None:
    pieces = [b"HTTP/1.1 200 OK", b"HTTP/1.1 100", b"HTTP/1.1 200 OK", b"and so on"]

    async def told(scope: Any, receive: Any, send: Any) -> None:
        size = [(b"content-length", b"%d" % len(b"".join(pieces)))]
        await send({"type": "http.response.start", "status": 200, "headers": size})
        for piece in pieces:
            body = memoryview(piece)  # as of a file
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with client(told) as (reader, writer):
        writer.write(GET)
        assert (await answer(reader))[2] == b"".join(pieces)


async def test_a_head_without_a_body_leaves_before_the_connection_closes() -> None:
    async with client() as (reader, writer):
        writer.write(b"HEAD / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        head = await reader.read()
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")


# ---- heads, bodies and what is sent ahead ------------------------------------------------------


async def takes_all(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    told = str(size).encode()
    length = [(b"content-length", str(len(told)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": told})


async def test_bytes_are_counted_for_each_request() -> None:
    pad = b"x-pad: " + b"p" * (MAX_HEAD_BYTES // 3) + b"\r\n"
    async with client(takes_all) as (reader, writer):
        for _ in range(5):
            writer.write(b"GET / HTTP/1.1\r\n" + pad + b"\r\n")
            assert (await answer(reader))[0] == 200
        for size in (10 * MAX_HEAD_BYTES, 1):
            length = f"Content-Length: {size}\r\n\r\n".encode()
            writer.write(b"POST / HTTP/1.1\r\n" + pad + length + b"b" * size)
            status, _, body = await answer(reader)
            assert (status, int(body)) == (200, size)


@pytest.mark.parametrize("more", [0, 1])
async def test_so_many_requests_may_be_sent_ahead(more: int) -> None:
    go_on, asked = asyncio.Event(), 0

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        nonlocal asked
        asked += 1
        await go_on.wait()
        await app(scope, receive, send)

    ask = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
    ahead = metrics.refused.labels("too_many_ahead")
    before = ahead._value.get()
    async with client(waits) as (reader, writer):
        writer.write(ask * (1 + MAX_AHEAD + more))
        if more:
            assert await reader.read() == b"", "in the middle of an answer there is no place"
            assert ahead._value.get() == before + 1
        else:
            await until(lambda: asked == 1)
            go_on.set()
            for _ in range(1 + MAX_AHEAD):
                assert (await answer(reader))[0] == 200


async def test_what_is_no_http_is_told_in_our_shape() -> None:
    async with client() as (reader, writer):
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        status, headers, body = await answer(reader)
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert "retry-after" not in headers
        assert await reader.read() == b""


@pytest.mark.parametrize(("fields", "status"), [(MAX_FIELDS, 200), (MAX_FIELDS + 1, 431)])
async def test_so_many_fields_may_a_head_have(fields: int, status: int) -> None:
    async with client() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * fields + b"\r\n")
        assert (await answer(reader))[0] == status


# ---- who is let in ------------------------------------------------------------------------------


class Caller:
    """At the door."""

    def __init__(self, idle: bool = False) -> None:
        self.idle = idle
        self.ended = 0

    def look(self, now: float) -> None: ...

    def give_way(self) -> None:
        self.ended += 1

    def abort(self) -> None: ...


def test_who_asks_nothing_gives_way_to_a_new_one_of_its_address() -> None:
    """Behind a proxy all have one address: who keeps connections open keeps nobody out."""
    door = Door(GatewaySettings(max_connections=8))
    elsewhere, busy, *idle = Caller(idle=True), Caller(), *(Caller(idle=True) for _ in range(6))
    door.admit(elsewhere, "q")
    for one in (busy, *idle):
        door.admit(one, "p")
    assert [one.ended for one in idle] == [1, 1, 1, 0, 0, 0]
    assert (busy.ended, elsewhere.ended, door.connections) == (0, 0, 5)
    for gone in idle[:3]:
        door.leave(gone, "p")  # when its end is told
    assert door.connections == 5
    for one in idle[3:]:
        one.idle = False
    with pytest.raises(PenstockError):
        door.admit(Caller(), "p")
    busy.idle = True
    door.admit(Caller(), "p")
    assert busy.ended == 1


def test_looking_for_who_gives_way_is_bounded_and_comes_round() -> None:
    door = Door(GatewaySettings(max_connections=80))
    callers = [Caller() for _ in range(40)]
    for one in callers:
        door.admit(one, "p")
    callers[-1].idle = True
    for _ in range(2):
        with pytest.raises(PenstockError):
            door.admit(Caller(), "p")
    door.admit(Caller(), "p")
    assert callers[-1].ended == 1, "16 are looked at each time"


def test_only_who_was_let_in_leaves_a_place_free() -> None:
    door = Door(GatewaySettings(max_connections=4))
    one, two, refused, late, other = (Caller() for _ in range(5))
    door.admit(one, "p")
    door.admit(two, "p")
    for _ in range(2):
        with pytest.raises(PenstockError) as full:
            door.admit(refused, "p")
        assert full.value.reason == "too_many_connections"
        door.leave(refused, "p")
    door.admit(other, "q")
    door.leave(one, "p")
    door.leave(one, "p")
    door.admit(late, "p")
    with pytest.raises(PenstockError):
        door.admit(refused, "p")


# ---- time ---------------------------------------------------------------------------------------


class Clock:
    """The running loop, with a time of its own."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)


class Transport:
    """What a connection does with it."""

    def __init__(self) -> None:
        self.written, self.pieces = b"", list[bytes]()
        self.closed = self.aborted = False
        self.unsent = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.9", 1) if name == "peername" else default

    def write(self, data: bytes) -> None:
        self.written += data
        self.pieces.append(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


HEAD_S, WRITE_S = 10.0, 30.0


class Timed:
    """A connection whose time a test tells."""

    def __init__(self, asgi: Any = app) -> None:
        self.clock, self.transport = Clock(), Transport()
        settings = GatewaySettings(head_timeout_s=HEAD_S, write_timeout_s=WRITE_S)
        self.door = Door(settings)
        self.connection = connection(self.door, asgi, self.clock)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def after(self, seconds: float) -> str:
        """What a look at it does so much later."""
        self.clock.now += seconds
        self.connection.look(self.clock.now)
        if self.transport.aborted:
            return "aborted"
        return self.status if self.transport.closed else ""

    @property
    def status(self) -> str:
        """Of the last answer."""
        return self.transport.written.rpartition(b"HTTP/1.1 ")[2][:3].decode()

    async def says(self, data: bytes, answered: int = 0) -> None:
        self.connection.data_received(data)
        await until(lambda: self.transport.written.count(b"HTTP/1.1 200") >= answered)


GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


async def test_a_first_head_is_due_from_the_accept() -> None:
    one = Timed()
    assert one.after(HEAD_S - 1) == ""
    await one.says(GET[:9])
    assert one.after(0.5) == ""
    await one.says(GET[9:16])  # more of it gives no more time
    begun = HEAD_S - 1
    assert one.after(HEAD_S - begun) == ""  # its first line began it anew
    assert one.after(begun - 0.4) == "408"


async def test_a_silent_connection_is_refused_when_its_head_is_overdue() -> None:
    one = Timed()
    assert one.after(HEAD_S) == ""
    assert one.after(0.1) == "408"
    assert b'"code": "head_timeout"' in one.transport.written


async def test_a_later_head_is_due_from_its_first_byte() -> None:
    one = Timed()
    await one.says(GET, answered=1)
    assert one.after(60) == ""  # idle is uvicorn's matter
    await one.says(b"\r\n")
    assert one.after(HEAD_S) == ""
    await one.says(b"\r\n")
    assert one.after(0.1) == "408", "and no byte after it gives more"


async def test_a_head_behind_an_answer_is_due_from_that_answers_end() -> None:
    go_on = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await app(scope, receive, send)

    one = Timed(waits)
    await one.says(GET + GET[:9])
    assert one.after(10 * HEAD_S) == "", "its answer is not there yet"
    go_on.set()
    await one.says(b"", answered=1)
    assert one.after(HEAD_S) == ""
    assert one.after(0.1) == "408"


async def test_a_slow_answer_and_a_slow_body_are_not_the_heads_matter() -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    for sent in (GET, b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nx"):
        one = Timed(never)
        await one.says(sent)
        assert one.after(100 * HEAD_S) == ""


async def test_who_reads_again_has_all_the_time_again() -> None:
    one = Timed()
    await one.says(GET, answered=1)
    one.connection.pause_writing()
    assert one.after(WRITE_S) == ""
    one.connection.resume_writing()
    assert one.after(10 * WRITE_S) == ""
    one.connection.pause_writing()
    assert one.after(WRITE_S) == ""
    assert one.after(0.1) == "aborted"


CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
OVERLONG = b"1;" + b"x" * MAX_HEAD_BYTES


async def test_a_refusal_within_an_answer_cuts_it_and_says_nothing() -> None:
    async def begins(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await asyncio.Event().wait()

    one = Timed(begins)
    await one.says(CHUNKED, answered=1)
    await until(lambda: b"one" in one.transport.written)
    before = one.transport.written
    await one.says(OVERLONG)
    assert (one.transport.aborted, one.transport.written) == (True, before)


@pytest.mark.parametrize("begins", [b"GET / HTTP/1.1\r\nx-pad: ", CHUNKED + b"1;"])
async def test_what_comes_in_pieces_and_never_ends_is_counted_together(begins: bytes) -> None:
    """A head, and what a chunk says of itself."""
    one = Timed(takes_all)
    one.connection.data_received(begins)
    for _ in range(8):
        assert not one.transport.closed
        one.connection.data_received(b"p" * (MAX_HEAD_BYTES // 8))
    assert (one.transport.closed, one.status) == (True, "431")


async def test_a_refusal_before_the_answer_is_the_answer() -> None:
    heard = asyncio.Event()

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        heard.set()

    one = Timed(reads)
    await one.says(CHUNKED)
    await one.says(OVERLONG)
    assert (one.transport.closed, one.status) == (True, "431")
    async with asyncio.timeout(30):
        await heard.wait()


async def test_a_refused_connection_takes_nothing_and_gives_nothing_back() -> None:
    door = Door(GatewaySettings(max_connections=1))
    held, refused = connection(door), connection(door)
    transports = Transport(), Transport()
    held.connection_made(transports[0])  # type: ignore[arg-type]
    transports[0].unsent = 1  # of an answer that leaves whole
    refused.connection_made(transports[1])  # type: ignore[arg-type]
    assert transports[1].closed
    assert transports[1].written.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1\r\n" in transports[1].written
    door.leave(refused, "127.0.0.9")
    with pytest.raises(PenstockError):
        door.admit(cast(Any, object()), "127.0.0.9")
    held.connection_lost(None)
    door.admit(cast(Any, object()), "127.0.0.9")


@pytest.mark.parametrize("step", [7_000, 50_000])
@pytest.mark.parametrize(
    ("url", "field", "status"),
    [(100, 31_000, "200"), (31_000, 100, "200"), (20_000, 20_000, "431"), (100, 33_000, "431")],
)
async def test_a_head_is_its_url_and_its_fields(url, field, status, step):
    """However it arrives; a body behind it is none of it."""
    head = b"POST /" + b"u" * url + b" HTTP/1.1\r\nContent-Length: 9000\r\nx: " + b"v" * field
    sent = head + b"\r\n\r\n" + b"b" * 9000
    one = Timed(takes_all)
    for at in range(0, len(sent), step):
        if not one.transport.closed:
            await one.says(sent[at : at + step])
    await one.says(b"", answered=int(status == "200"))
    assert one.status == status
    assert one.transport.closed is (status == "431")
