"""Connections before their TLS stands: each has a place at the door, and none is left behind."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.certificates import CertificateFiles
from services.common.config import GatewaySettings
from services.gateway import handshake as module
from services.gateway.door import Door
from services.gateway.handshake import TlsListener
from tests.support.authority import Authority
from tests.support.waiting import leaving_no_task, until


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    folder = Authority().issue(tmp_path, "door.test")
    return CertificateFiles("door", folder / "tls.crt", folder / "tls.key", None)


@pytest.fixture
async def door(files: CertificateFiles) -> AsyncIterator[tuple[Door, TlsListener, int]]:
    """For eight connections, so four of one address; and the port."""
    own = Door(GatewaySettings(max_connections=8, head_timeout_s=30))
    listening = socket.create_server(("127.0.0.1", 0))
    made: Callable[[Callable[[], None]], Any] = lambda _: asyncio.Protocol()  # noqa: E731
    listener = TlsListener(listening, own, files, made)
    async with leaving_no_task():
        running = asyncio.create_task(listener.run(16))
        yield own, listener, listening.getsockname()[1]
        running.cancel()
        await asyncio.wait([running])
        listener.stop()
        listening.close()


async def test_who_says_nothing_has_a_place_until_it_goes_or_the_door_stops(
    door: tuple[Door, TlsListener, int],
) -> None:
    own, listener, port = door
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
    await until(lambda: own.connections == 4)
    for reader, _ in silent[4:]:  # there is no place left: closed at once
        assert await asyncio.wait_for(reader.read(), 10) == b""
    silent[0][1].close()
    await until(lambda: own.connections == 3)
    listener.stop()
    for reader, writer in silent[1:4]:
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    await until(lambda: own.connections == 0)


async def test_no_tls_is_ended_and_gives_its_place_back(
    door: tuple[Door, TlsListener, int],
) -> None:
    own, _, port = door
    for _ in range(6):  # more than there are places
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(reader.read(), 10)
        await until(lambda: own.connections == 0)
        writer.close()


async def test_an_accept_that_fails_is_not_the_last(
    files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many files may be open just then."""
    waits: list[float] = []
    ours, theirs = socket.socketpair()
    accepts: list[Any] = [OSError(24, "Too many open files"), (ours, ("127.0.0.1", 1))]

    async def accept(_: socket.socket) -> Any:
        if not accepts:
            await asyncio.Event().wait()
        found = accepts.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    loop = SimpleNamespace(sock_accept=accept)
    fakes = {"get_running_loop": lambda: loop, "sleep": sleep}
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**vars(asyncio) | fakes))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listener = TlsListener(listening, Door(GatewaySettings()), files, asyncio.Protocol)  # type: ignore[arg-type]
        taken: list[str] = []
        monkeypatch.setattr(listener, "take", lambda _, peer: taken.append(peer))
        running = asyncio.create_task(listener.run(16))
        await until(lambda: taken == ["127.0.0.1"])
        assert len(waits) == 1, "not at once again"
        assert waits[0] > 0
        running.cancel()
    ours.close()
    theirs.close()
