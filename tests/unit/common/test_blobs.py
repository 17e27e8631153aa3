"""Blobs in a folder: whole or not at all, tenants apart, and one store for an installation."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from services.common.blobs import Blobs, NoBlobError
from services.common.config import Settings
from services.common.errors import PenstockError
from services.common.redis import connect


def blobs(folder: Path, namespace: str = "ns") -> Blobs:
    return Blobs.of(Settings(blobs_url=folder.as_uri(), namespace=namespace))


async def pieces(*content: bytes) -> AsyncIterator[bytes]:
    for piece in content:
        yield piece


async def read(store: Blobs, key: str) -> bytes:
    return b"".join([piece async for piece in store.read(key)])


async def test_a_blob_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = blobs(tmp_path / "new" / "folder")
    key, large = store.key("acme", "file-1"), [bytes([n]) * 2**20 for n in range(12)]
    await store.put(key, pieces(*large))
    assert await read(store, key) == b"".join(large)
    assert await store.size(key) == 12 * 2**20
    assert await store.piece(key, 2**20 - 2, 4) == b"\0\0\1\1"
    await store.put(key, pieces(b"anew"))
    assert await read(store, key) == b"anew"
    for _ in range(2):
        await store.delete(key)
    for gone in (store.size(key), store.piece(key, 0, 1), read(store, key)):
        with pytest.raises(NoBlobError):
            await gone


async def test_of_an_upload_that_breaks_off_nothing_is_there(tmp_path: Path) -> None:
    store = blobs(tmp_path)

    async def lost() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield b"x" * 2**20
        raise LookupError("the client is gone")

    with pytest.raises(LookupError):
        await store.put(store.key("acme", "file-1"), lost())
    assert [blob async for blob in store.all()] == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


async def test_what_a_killed_upload_left_in_the_folder_goes_when_it_is_old(tmp_path: Path) -> None:
    store, begun, killed = blobs(tmp_path), asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield b"x" * 2**20
        begun.set()
        await killed.wait()
        yield b"y"

    key = store.key("acme", "file-1")
    upload = asyncio.create_task(store.put(key, slow()))
    await begun.wait()
    (part,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    left = part.with_name("file-2#1")  # as a kill leaves it
    shutil.copy(part, left)
    now = datetime.now(UTC)
    await store.sweep(now - timedelta(hours=1))
    assert left.exists()
    os.utime(left, (0, 0))
    await store.sweep(now - timedelta(hours=1))
    assert not left.exists()
    killed.set()
    await upload
    assert await store.size(key) == 12 * 2**20 + 1


async def test_tenants_and_namespaces_are_apart_whatever_they_are_called(tmp_path: Path) -> None:
    folder = tmp_path / "our blobs"  # its URL has a %20
    store, other = blobs(folder), blobs(folder, "other")
    names = ["acme", "Acme", "..", ".", "a/b", "a", "", "ä", "=", "x" * 300, "a\0b", "a%2Fb"]
    names += ["store", "stores"]
    await store._own_id()
    keys = [store.key(name, "file") for name in names]
    assert len({*keys}) == len(names)
    assert all(key.count("/") == 2 for key in keys)
    for name, key in zip(names, keys, strict=True):
        await store.put(key, pieces(name.encode()))
    assert [await read(store, key) for key in keys] == [name.encode() for name in names]
    assert {blob.key async for blob in store.all()} == {*keys}
    assert [blob async for blob in other.all()] == []
    assert not [path for path in tmp_path.iterdir() if path != folder]


async def test_an_installation_has_one_store(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    redis = connect(redis_url)
    one, other = blobs(tmp_path / "a", namespace), blobs(tmp_path / "b", namespace)
    for _ in range(2):
        await one.claim(redis)
        await blobs(tmp_path / "a", namespace).claim(redis)
    with pytest.raises(ValueError, match="PENSTOCK_BLOBS_URL") as refused:
        await other.claim(redis)
    assert str(tmp_path / "b") in str(refused.value)
    await redis.delete(f"{namespace}:blobs")
    await other.claim(redis)
    await redis.aclose()


async def test_a_backend_that_fails_is_away_and_says_nothing_of_itself(tmp_path: Path) -> None:
    store = blobs(tmp_path / "a")
    key = store.key("acme", "file-1")
    (tmp_path / "a" / "ns").write_text("no folder")
    with pytest.raises(PenstockError) as failed:
        await store.put(key, pieces(b"x"))
    assert (failed.value.reason, failed.value.code.name) == ("blobs_unavailable", "UNAVAILABLE")
    assert str(tmp_path) not in failed.value.message


@pytest.mark.parametrize("url", ["ftp://x/y", "s3:///x", "x", "file://host/x", "s3://a:b@c/d"])
def test_what_is_no_place_for_blobs_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="blobs_url"):
        Settings(blobs_url=url)
