"""The blob store against a server that speaks S3's protocol: `make bucket`.

moto's server is it; MOTO_SERVER names its program. Not among `make test`'s, for moto brings much
that nothing else here needs.
"""

import asyncio
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import grpc
import httpx
import pytest

from services.common import blobs
from services.common.blobs import Blobs, NoBlobError
from services.common.config import Settings
from services.common.errors import PenstockError
from services.common.redis import connect
from tests.support.waiting import until

MIB = 2**20
BUCKET = "files"


class Server(NamedTuple):
    pid: int
    url: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("moto") / "log").open("wb")
    command = [os.environ["MOTO_SERVER"], "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    yield Server(process.pid, f"http://127.0.0.1:{port}")
    process.kill()
    process.wait()


@pytest.fixture
async def endpoint(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    url = server.url
    for name, value in {
        "AWS_ACCESS_KEY_ID": "its-id",
        "AWS_SECRET_ACCESS_KEY": "its-secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }.items():
        monkeypatch.setenv(name, value)

    async def made() -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                return (await http.put(f"{url}/{BUCKET}")).is_success
        except httpx.TransportError:
            return False

    await until(made, 60, "the bucket is there")
    return url


@pytest.fixture
def store(endpoint: str, namespace: str) -> Blobs:
    return bucket(namespace)


def bucket(namespace: str, name: str = BUCKET) -> Blobs:
    return Blobs.of(Settings(blobs_url=f"s3://{name}/pre/fix", namespace=namespace))


async def pieces(*content: bytes) -> AsyncIterator[bytes]:
    for piece in content:
        yield piece


async def read(store: Blobs, key: str) -> bytes:
    return b"".join([piece async for piece in store.read(key)])


def unfinished(endpoint: str) -> list[str]:
    """Keys of uploads that are neither whole nor given up."""
    with urllib.request.urlopen(f"{endpoint}/{BUCKET}?uploads") as answer:
        found = ElementTree.parse(answer)
    return [one.text or "" for one in found.iter() if one.tag.endswith("}Key")]


async def test_a_blob_is_read_as_it_was_written(store: Blobs) -> None:
    key, large = store.key("acme", "file-1"), [bytes([n]) * MIB for n in range(23)]
    for content in (large, [b"anew"], []):  # the first in several parts
        await store.put(key, pieces(*content))
        assert await read(store, key) == b"".join(content)
        assert await store.size(key) == sum(map(len, content))
    await store.put(key, pieces(*large))
    assert await store.piece(key, MIB - 2, 4) == b"\0\0\1\1"
    for _ in range(2):
        await store.delete(key)
    for gone in (store.size(key), store.piece(key, 0, 1), read(store, key)):
        with pytest.raises(NoBlobError):
            await gone


async def test_of_an_upload_that_breaks_off_nothing_is_there(store: Blobs, endpoint: str) -> None:
    async def lost() -> AsyncIterator[bytes]:
        for _ in range(23):
            yield b"x" * MIB
        raise LookupError("the client is gone")

    with pytest.raises(LookupError):
        await store.put(store.key("acme", "file-1"), lost())
    assert [blob async for blob in store.all()] == []
    assert unfinished(endpoint) == []


async def test_more_than_one_answer_lists_and_names_of_any_kind(store: Blobs) -> None:
    await store._own_id()
    names = ["acme", "..", "a/b", "", "ä", "=", "x" * 300, "a%2Fb", "store"]
    keys = [store.key(name, "file") for name in names]
    keys += [store.key("many", f"file-{number}") for number in range(1001)]
    for some in range(0, len(keys), 50):
        await asyncio.gather(*(store.put(key, pieces(b"x")) for key in keys[some : some + 50]))
    found = [blob async for blob in store.all()]
    assert sorted(blob.key for blob in found) == sorted(keys)
    assert {blob.bytes for blob in found} == {1}


async def test_an_installation_has_one_bucket(
    store: Blobs, namespace: str, redis_url: str, tmp_path: Path
) -> None:
    redis = connect(redis_url)
    for _ in range(2):
        await store.claim(redis)
        await bucket(namespace).claim(redis)
    folder = Blobs.of(Settings(blobs_url=tmp_path.as_uri(), namespace=namespace))
    with pytest.raises(ValueError, match="PENSTOCK_BLOBS_URL"):
        await folder.claim(redis)
    await redis.aclose()


async def test_a_reader_may_be_slow(store: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower than a request that stands still may be."""
    monkeypatch.setitem(blobs._CLIENT, "read_timeout", "200ms")
    slow = bucket(store._namespace)
    key, large = slow.key("acme", "file-1"), [bytes([n]) * MIB for n in range(23)]
    await store.put(key, pieces(*large))
    found = []
    async for piece in slow.read(key):
        found.append(piece)
        await asyncio.sleep(0.1)
    assert b"".join(found) == b"".join(large)


async def test_a_bucket_that_is_not_there_is_the_stores_fault(
    store: Blobs, namespace: str, redis_url: str
) -> None:
    """And not a file that is gone."""
    none, redis = bucket(namespace, "no-such-bucket"), connect(redis_url)
    for call in (none.put("ns/acme/file-1", pieces(b"x")), none.claim(redis), anext(none.all())):
        await away(call)
    await redis.aclose()


async def test_an_endpoint_that_is_away_or_stands_still_is_told_in_time(
    store: Blobs,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(blobs._CLIENT, "read_timeout", "100ms")
    still = bucket(store._namespace)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await away(still.size("ns/acme/file-1"))
        await away(still.put("ns/acme/file-1", pieces(b"x")))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    with closing(socket.socket()) as taken:  # nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        await away(bucket(store._namespace).size("ns/acme/file-1"))


async def test_wrong_credentials_are_the_stores_fault(
    store: Blobs, endpoint: str, namespace: str
) -> None:
    """From here on the server looks at them: this is the last test."""
    async with httpx.AsyncClient(trust_env=False) as http:
        await http.post(f"{endpoint}/moto-api/reset-auth", content=b"0")
    await away(store.size(store.key("acme", "file-1")))
    await away(store.put(store.key("acme", "file-1"), pieces(b"x")))
    await away(anext(store.all()))


async def away(call: Awaitable[Any]) -> None:
    with pytest.raises(PenstockError) as failed:
        await call
    told = (failed.value.code, failed.value.reason)
    assert told == (grpc.StatusCode.UNAVAILABLE, "blobs_unavailable")
