"""Connections over real sockets: what counts for one request must not count for the next."""

import asyncio
from types import SimpleNamespace
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from services.common.config import GatewaySettings
from services.gateway.connections import MAX_FIELDS, Connection, Door


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


def connection(door: Door) -> Connection:
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
