"""A door that closes beside its neighbour: who has connected by then is served."""

import asyncio
import http.client
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.locks.certificates import CertificateFiles
from services.gateway.api.rest.routes import application
from services.gateway.connections.http_server import HttpServer
from tests.support.authority import Authority
from tests.support.gateway_parts import gateway_parts


@pytest.fixture
def parts() -> Iterator[Any]:
    with gateway_parts(max_requests=100) as parts:
        yield parts


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def certificates(authority: Authority, tmp_path: Path) -> CertificateFiles:
    folder = authority.issue(tmp_path, address="127.0.0.1")
    return CertificateFiles("door", folder / "tls.crt", folder / "tls.key", None)


def ask(connected: socket.socket, trust: ssl.SSLContext | None) -> http.client.HTTPConnection:
    """The connection, once its first request is answered. Blocks."""
    asking = http.client.HTTPConnection("127.0.0.1")
    asking.sock = connected
    if trust is not None:
        asking.sock = trust.wrap_socket(connected, server_hostname="127.0.0.1")
    asking.request("GET", "/version")
    answer = asking.getresponse()
    assert answer.status == 200
    answer.read()
    return asking


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("turns", range(5))
async def test_who_is_accepted_as_the_door_closes_is_served(
    parts: Any, authority: Authority, certificates: CertificateFiles, tls: bool, turns: int
) -> None:
    """In whichever turn of the loop after its connection that is."""
    server = HttpServer(
        application(parts), parts.settings.gateway, "127.0.0.1", 0, certificates if tls else None
    )
    await server.start()
    server.check()
    trust = ssl.create_default_context(cadata=authority.pem.decode()) if tls else None
    address = ("127.0.0.1", server.port)
    two = [socket.create_connection(address, 10) for _ in range(2)]  # the loop stands meanwhile
    for _ in range(turns):
        await asyncio.sleep(0)
    server.close_door()
    leaving = asyncio.create_task(server.emptied(30))
    server.check()
    asked = [await asyncio.to_thread(ask, one, trust) for one in two]
    assert not leaving.done(), "they are still there"
    for asking in asked:
        asking.close()
    await leaving
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 10)
    await server.stop()
