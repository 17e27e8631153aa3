"""Redis over TLS, with real certificates, by settings alone."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from services.common.config import Settings
from services.common.redis import RedisAway, connect
from tests.support.authority import Authority

PASSWORD = "the password of a test"


@asynccontextmanager
async def tls(redis_url: str, context: ssl.SSLContext) -> AsyncIterator[int]:
    """The port of a server that ends TLS in front of a Redis that has only a socket."""
    parts = urlsplit(redis_url)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(2**16):
            sink.write(data)
        sink.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_unix_connection(parts.path)
        await asyncio.gather(copy(reader, outer), copy(inner, writer), return_exceptions=True)

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def context(folder: Path, ask: bool) -> ssl.SSLContext:
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.crt")
    made.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    made.verify_mode = ssl.CERT_REQUIRED if ask else ssl.CERT_NONE
    return made


async def answered(settings: Settings) -> Any:
    client = connect(settings.redis_dsn)
    try:
        return await client.ping()
    finally:
        await client.aclose()


@pytest.fixture
def url(redis_url: str) -> Callable[[int], str]:
    password = urlsplit(redis_url).password or ""
    return lambda port: f"rediss://:{password}@127.0.0.1:{port}/0"


async def test_it_is_believed_by_its_authority_alone(
    redis_url: str, tmp_path: Path, url: Callable[[int], str]
) -> None:
    own = Authority().issue(tmp_path / "own", address="127.0.0.1")
    other = Authority().issue(tmp_path / "other", address="127.0.0.1")
    async with tls(redis_url, context(own, ask=False)) as port:
        assert await answered(Settings(redis_url=url(port), redis_ca=own / "ca.crt"))
        for settings in (
            Settings(redis_url=url(port), redis_ca=other / "ca.crt"),
            Settings(redis_url=url(port)),  # of no authority that the system knows
        ):
            with pytest.raises(RedisAway):
                await answered(settings)


async def test_a_certificate_of_another_address_is_not_believed(
    redis_url: str, tmp_path: Path, url: Callable[[int], str]
) -> None:
    own = Authority().issue(tmp_path / "own", "elsewhere.example")
    async with tls(redis_url, context(own, ask=False)) as port:
        with pytest.raises(RedisAway):
            await answered(Settings(redis_url=url(port), redis_ca=own / "ca.crt"))


async def test_a_server_that_asks_is_shown_a_certificate(
    redis_url: str, tmp_path: Path, url: Callable[[int], str]
) -> None:
    authority = Authority()
    own = authority.issue(tmp_path / "own", address="127.0.0.1")
    client = authority.issue(tmp_path / "client", "penstock")
    async with tls(redis_url, context(own, ask=True)) as port:
        shown = {"redis_cert": client / "tls.crt", "redis_key": client / "tls.key"}
        given = {"redis_url": url(port), "redis_ca": own / "ca.crt"}
        assert await answered(Settings(**given, **shown))
        with pytest.raises(RedisAway):
            await answered(Settings(**given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"redis_url": "redis://h:1/0", "redis_ca": "ca.crt"}, "redis_url must be rediss://"),
        ({"redis_url": "rediss://h:1/0", "redis_cert": "a"}, "one needs the other"),
        ({"qdrant_url": "http://h:1", "qdrant_ca": "ca.crt"}, "qdrant_url must be https://"),
    ],
)
def test_what_would_be_ignored_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Settings(**given)


def test_a_password_is_not_shown() -> None:
    url = f"rediss://:{PASSWORD.replace(' ', '-')}@h:1/0?db=2"
    settings = Settings(redis_url=url, redis_ca=Path("/etc/ca.crt"))
    assert PASSWORD.replace(" ", "-") not in repr(settings) + settings.model_dump_json()
    assert settings.redis_dsn == f"{url}&ssl_ca_certs=%2Fetc%2Fca.crt"
