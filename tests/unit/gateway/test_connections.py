"""Connections over real sockets: what counts for one request must not count for the next."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from services.common.config import GatewaySettings
from services.gateway.connections.connection import MAX_FIELDS, Connection
from services.gateway.connections.door import Door
from services.gateway.connections.straight import STRAIGHT
from tests.support.waiting import until


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


def connection(door: Door, app: Any = app) -> Connection:
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    config.load()
    return Connection(door, config=config, server_state=ServerState(), app_state={})


async def test_fields_are_counted_for_each_request() -> None:
    door = Door(GatewaySettings())
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: connection(door), "127.0.0.1", 0)
    async with server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        fields = b"".join(b"x-%d: y\r\n" % n for n in range(MAX_FIELDS // 2))
        for _ in range(4):
            writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n" + fields + b"\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(2) == b"ok"
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n" + 2 * fields + b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 4")
        writer.close()


async def test_what_is_closing_has_as_long_as_anything_to_be_read() -> None:
    """A peer that does not read the last answer would keep its connection for ever."""
    settings = GatewaySettings()
    one = connection(Door(settings))
    aborted: list[bool] = []
    transport: Any = SimpleNamespace(is_closing=lambda: True, abort=lambda: aborted.append(True))
    one.transport = transport
    one.look(1000.0)
    one.look(1000.0 + settings.write_timeout_s)
    assert not aborted
    one.look(1001.0 + settings.write_timeout_s)
    assert aborted


async def test_what_is_sent_ahead_brings_no_body_with_each_answer() -> None:
    """Each answer let in another read: of 32 requests that wait, each might bring a body."""
    served: list[Connection] = []
    turns = asyncio.Semaphore(0)

    async def in_turn(scope: Any, receive: Any, send: Any) -> None:
        await turns.acquire()
        await app(scope, receive, send)

    def accepted() -> Connection:
        served.append(connection(Door(GatewaySettings()), in_turn))
        return served[-1]

    def held() -> int:
        return sum(len(cycle.body) for cycle, _ in served[0].pipeline)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(accepted, "127.0.0.1", 0)
    async with server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n" * 10)
        await until(lambda: bool(served) and len(served[0].pipeline) == 9, 10)
        body = 60_000
        writer.write(
            (b"GET / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % body + b"x" * body) * 20
        )
        most = 0
        for _ in range(30):
            turns.release()
            await reader.readuntil(b"\r\n\r\nok")
            await asyncio.sleep(0.002)  # the next read, if there is one
            most = max(most, held())
        assert most < 2**18 + body  # of one read; it was all that follows the first answers
        writer.close()


@pytest.mark.parametrize(("size", "told"), [(1, "chunks_too_small"), (64, "")])
async def test_chunks_of_a_few_bytes_are_refused(size: int, told: str) -> None:
    """43,690 of one read held every other connection for 15 ms, and so did the next one's."""
    written = bytearray()

    class Transport(asyncio.Transport):
        def write(self, data: Any) -> None:
            written.extend(data)

        def is_closing(self) -> bool:
            return bool(written)

        def close(self) -> None:
            pass

        def pause_reading(self) -> None:
            pass

    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    one = connection(Door(GatewaySettings()), never)
    one.connection_made(Transport({"peername": ("127.0.0.1", 1)}))
    one.data_received(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n%s\r\n" % (size, b"x" * size)
    for _ in range(3):
        one.data_received(chunk * (2**18 // len(chunk)))
        if told:
            break
    assert told.encode() in written if told else not written
    for task in one.tasks:
        task.cancel()
    await asyncio.gather(*one.tasks, return_exceptions=True)


# ---- straight.py --------------------------------------------------------------------------------

EVENTS = [b"one", b"two" * 10, b"three", b"four"]


@asynccontextmanager
async def asked(app: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A client whose request `app` answers."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: connection(Door(GatewaySettings()), app), "127.0.0.1", 0
    )
    async with server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        yield reader
        writer.close()


@pytest.mark.parametrize("straight", [(), (1,), (1, 2), (2,)])
async def test_pieces_that_go_straight_stand_among_the_others(straight: tuple[int, ...]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        way = scope["extensions"][STRAIGHT]
        assert not way.is_clear, "no body has begun"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number, event in enumerate(EVENTS):
            if number in straight:
                assert way.is_clear
                way.write(event)
            else:
                more = number + 1 < len(EVENTS)
                await send({"type": "http.response.body", "body": event, "more_body": more})
        assert not way.is_clear, "its body has ended"

    async with asked(app) as reader:
        await reader.readuntil(b"\r\n\r\n")
        for event in EVENTS:
            assert await reader.readuntil(b"\r\n") == b"%x\r\n" % len(event)
            assert await reader.readexactly(len(event) + 2) == event + b"\r\n"
        assert await reader.readexactly(5) == b"0\r\n\r\n"


async def test_nothing_goes_straight_to_who_does_not_read_or_is_gone() -> None:
    told: dict[str, bool] = {}
    over = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        way = scope["extensions"][STRAIGHT]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        pieces = 0
        while way.is_clear and pieces < 1000:
            way.write(b"x" * 65536)
            pieces += 1
        told["full"] = pieces < 1000
        while (await receive())["type"] != "http.disconnect":
            pass
        told["gone"] = not way.is_clear
        over.set()

    async with asked(app) as reader:
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: "full" in told)
    await asyncio.wait_for(over.wait(), 10)
    assert told == {"full": True, "gone": True}


async def test_an_answer_of_known_length_does_not_go_straight() -> None:
    clear: list[bool] = []

    async def known(scope: Any, receive: Any, send: Any) -> None:
        length = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        clear.append(scope["extensions"][STRAIGHT].is_clear)
        await send({"type": "http.response.body", "body": b"ok"})

    async with asked(known) as reader:
        await reader.readuntil(b"ok")
    assert clear == [False]


@pytest.mark.parametrize("before", [False, True], ids=["while it is watched", "before"])
async def test_who_goes_is_told_of_once(before: bool) -> None:
    told: list[str] = []
    begun, over = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        way = scope["extensions"][STRAIGHT]
        await receive()
        if before:
            begun.set()
            while (await receive())["type"] != "http.disconnect":
                pass
        way.when_gone(lambda: told.append("gone"))
        assert told == [], "not in the call itself"
        begun.set()
        await until(lambda: bool(told))
        await asyncio.sleep(0.01)
        over.set()

    async with asked(app):
        await begun.wait()
    await asyncio.wait_for(over.wait(), 10)
    assert told == ["gone"]


async def test_who_goes_is_told_of_behind_a_body_that_reading_was_paused_for() -> None:
    """Nobody reads on while a large body waits to be taken: who leaves would not be seen."""
    gone = asyncio.Event()
    watched = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        scope["extensions"][STRAIGHT].when_gone(gone.set)
        watched.set()
        await asyncio.wait_for(gone.wait(), 10)

    loop = asyncio.get_running_loop()
    made: list[Connection] = []

    def accepted() -> Connection:
        made.append(connection(Door(GatewaySettings()), app))
        return made[-1]

    server = await loop.create_server(accepted, "127.0.0.1", 0)
    async with server, asyncio.timeout(10):
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        body = 10**6
        writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % body)
        writer.write(b"x" * body)
        await watched.wait()
        assert not made[0].flow.read_paused
        writer.close()
        await gone.wait()


async def test_nobody_is_told_who_no_longer_wants_to_be() -> None:
    told: list[str] = []
    begun, over = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        way = scope["extensions"][STRAIGHT]
        await receive()
        way.when_gone(lambda: told.append("gone"))
        way.when_gone(None)
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        over.set()

    async with asked(app):
        await begun.wait()
    await asyncio.wait_for(over.wait(), 10)
    assert told == []


async def test_who_goes_is_told_of_in_the_request_that_is_answered() -> None:
    """Whatever was sent ahead: uvicorn tells the last request that came, and no other."""
    gone = asyncio.Event()
    watched = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        scope["extensions"][STRAIGHT].when_gone(gone.set)
        watched.set()
        await asyncio.wait_for(gone.wait(), 10)

    made: list[Connection] = []

    def accepted() -> Connection:
        made.append(connection(Door(GatewaySettings()), app))
        return made[-1]

    loop = asyncio.get_running_loop()
    server = await loop.create_server(accepted, "127.0.0.1", 0)
    async with server, asyncio.timeout(10):
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n" * 2)
        await watched.wait()
        await until(lambda: len(made[0].pipeline) == 1)
        made[0].transport.abort()  # as a write to nobody ends: nothing is read meanwhile
        await asyncio.wait_for(gone.wait(), 2)
        writer.close()
