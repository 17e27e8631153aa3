"""Where the issuer's keys come from: what answers there is not believed further than it must be."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from services.common.config import IdentitySettings
from services.gateway.identity import issuer_keys
from services.gateway.identity.issuer_keys import IssuerKeys

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def looking(answer: Answer) -> AsyncIterator[IssuerKeys]:
    """Of a server that answers so to whatever is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    own = IdentitySettings(oidc_issuer=url, oidc_audience="a", oidc_jwks_url=f"{url}/jwks")
    keys = IssuerKeys(own)
    try:
        async with asyncio.timeout(20):
            yield keys
    finally:
        await keys.stop()
        server.close()


def says(head: str, body: bytes = b"") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        length = f"content-length: {len(body)}\r\n" if body else ""
        writer.write(f"HTTP/1.1 {head}\r\n{length}\r\n".encode() + body)
        await writer.drain()

    return answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (says("302 Found\r\nlocation: http://127.0.0.1:1/jwks\r\ncontent-length: 0"), "302"),
        (says("200 OK", b'{"keys": [' + b" " * 300_000), "more than 262144 bytes"),
        (
            says("200 OK\r\ncontent-encoding: gzip", gzip.compress(b" " * 50_000_000)),
            "compressed",
        ),
        (says("200 OK", b'{"keys": ' + b"[" * 100_000), "RecursionError"),
        (says("200 OK", b"[]"), "no object"),
        (says("200 OK", b"\xff\xfe"), "JSONDecodeError|Unicode"),
    ],
    ids=["elsewhere", "huge", "a bomb", "deep", "a list", "no text"],
)
async def test_what_is_no_short_plain_object_is_not_read(answer, told):
    async with looking(answer) as keys:
        await keys.look()
        assert any(one in keys.failure for one in told.split("|")), keys.failure
        assert not keys._keys


async def test_who_sends_without_an_end_is_left(monkeypatch):
    monkeypatch.setattr(issuer_keys, "_TIMEOUT_S", 0.1)
    sent = 0

    async def drips(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            sent += 1
            await asyncio.sleep(0.02)

    async with looking(drips) as keys:
        await keys.look()
        assert "TimeoutError" in keys.failure
        assert sent > 0
