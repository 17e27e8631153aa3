"""Connections before their TLS stands: each has a place at the door, and none is left behind."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.config import GatewaySettings
from services.common.locks.certificates import CertificateFiles
from services.gateway.connections.door import Door
from services.gateway.connections.handshake import Handshakes
from services.gateway.connections.listener import Listener
from tests.support.authority import Authority
from tests.support.waiting import leaving_no_task, until


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    folder = Authority().issue(tmp_path, "door.test")
    return CertificateFiles("door", folder / "tls.crt", folder / "tls.key", None)


@pytest.fixture
async def door(files: CertificateFiles) -> AsyncIterator[tuple[Door, Handshakes, int]]:
    """For eight connections, so four of one address; and the port."""
    own = Door(GatewaySettings(max_connections=8, head_timeout_s=30))
    made: Callable[[Callable[[], None]], Any] = lambda _: asyncio.Protocol()  # noqa: E731
    handshakes = Handshakes(own, files, made)
    listener = Listener("127.0.0.1", 0, handshakes.begin)
    async with leaving_no_task():
        listener.start()
        yield own, handshakes, listener.port
        listener.stop()
        handshakes.stop()


async def test_who_says_nothing_has_a_place_until_it_goes_or_the_door_stops(
    door: tuple[Door, Handshakes, int],
) -> None:
    own, handshakes, port = door
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
    await until(lambda: own.connections == 4)
    for reader, _ in silent[:2]:  # the oldest have given way
        assert await asyncio.wait_for(reader.read(), 10) == b""
    await until(lambda: len(handshakes._running) == 4)
    silent[2][1].close()
    await until(lambda: own.connections == 3)
    handshakes.stop()
    for reader, writer in silent[3:]:
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    await until(lambda: own.connections == 0)


async def test_no_tls_is_ended_and_gives_its_place_back(
    door: tuple[Door, Handshakes, int],
) -> None:
    own, _, port = door
    for _ in range(6):  # more than there are places
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(reader.read(), 10)
        await until(lambda: own.connections == 0)
        writer.close()
