"""What is taken as a file, and a tenant's share of files, however many uploads come at once."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from prometheus_client import REGISTRY

from services.common.blobs import Blobs
from services.common.config import GatewaySettings, Settings
from services.common.errors import PenstockError
from services.common.redis import connect
from services.gateway import metrics
from services.gateway.api.rest.http import error_body, http_status
from services.gateway.ids import FILE
from services.gateway.stores.files import orphans as orphans_module
from services.gateway.stores.files.files import Files
from services.gateway.stores.files.orphans import Orphans
from tests.support.blob_folder import memory_blobs, pieces
from tests.support.inside import leaks
from tests.support.waiting import until

CODE = grpc.StatusCode


@pytest.fixture
async def files(redis_url: str, namespace: str) -> AsyncIterator[Files]:
    redis = connect(redis_url)
    limits = GatewaySettings(max_files=3, max_blob_bytes_per_tenant=100, max_upload_bytes=120)
    yield Files(redis, namespace, limits, memory_blobs(namespace))
    await redis.aclose()


async def uploads(files: Files, number: int, size: int, tenant: str = "acme") -> list[str]:
    """At the same time; returns why each was refused, or its id."""

    async def upload() -> str:
        try:
            return (await files.create(tenant, "a.txt", pieces(b"x" * size))).id
        except PenstockError as error:
            return error.reason

    return await asyncio.gather(*(upload() for _ in range(number)))


async def test_uploads_at_once_do_not_pass_the_count_together(files):
    outcomes = await uploads(files, 8, size=1)
    assert outcomes.count("too_many_files") == 5
    assert len(await files.all("acme")) == 3


async def test_uploads_at_once_do_not_pass_the_bytes_together(files):
    outcomes = await uploads(files, 8, size=40)
    assert outcomes.count("too_many_bytes_of_files") == 6
    assert "too_many_bytes_of_files" not in await uploads(files, 1, size=100, tenant="other")


async def test_deleting_gives_the_bytes_back_once(files):
    first, second = await uploads(files, 2, size=50)
    await asyncio.gather(*(files.delete("acme", first) for _ in range(3)))
    assert await uploads(files, 1, size=51) == ["too_many_bytes_of_files"]
    (third,) = await uploads(files, 1, size=50)
    assert await files.content("acme", third) == b"x" * 50
    assert {file.id for file in await files.all("acme")} == {second, third}


async def test_a_file_is_told_whole_and_by_its_id(files):
    before = int(time.time())
    record = await files.create("acme", "Guide.MD", pieces("grüße".encode()))
    assert await files.get("acme", record.id) == record
    assert await files.all("acme") == [record]
    told = record.as_json()
    assert before <= told.pop("created_at") <= time.time()
    assert told == {
        "id": record.id,
        "object": "file",
        "bytes": 7,
        "filename": "Guide.MD",
        "purpose": "assistants",
        "status": "processed",
        "expires_at": None,
    }
    assert await files.content("acme", record.id) == "grüße".encode()
    await files.delete("acme", record.id)
    for gone in (files.get("acme", record.id, "file_id"), files.content("acme", record.id)):
        with pytest.raises(PenstockError) as refused:
            await gone
        assert (refused.value.code, refused.value.reason) == (
            grpc.StatusCode.NOT_FOUND,
            "not_found",
        )


@pytest.mark.parametrize(
    ("name", "purpose", "content", "reason", "said"),
    [
        ("a" * 252 + ".txt", "assistants", b"x", "", "longer than 255 characters"),
        ("", "assistants", b"x", "", "needs a name"),
        ("a.txt", "batch", b"x", "unsupported_file", ".jsonl"),
        ("a.jsonl", "batch", b"ab\xff", "invalid_file", "not UTF-8"),
        ("a.jsonl", "batch", b"ab\xc3", "invalid_file", "not UTF-8"),
        ("a.txt", "assistants", b"", "invalid_file", "empty"),
        ("a.md", "user_data", b" \n\t", "invalid_file", "empty"),
        ("a.txt", "assistants", b"x" * 121, "file_too_large", "larger than 120 bytes"),
    ],
)
async def test_what_is_no_good_file_is_refused(files, name, purpose, content, reason, said):
    with pytest.raises(PenstockError, match=said) as refused:
        await files.create("acme", name, pieces(*(bytes([b]) for b in content)), purpose)
    error = refused.value
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert (error.stage, error.param, error.reason) == ("gateway", "file", reason)
    assert await files.all("acme") == []
    assert [blob async for blob in files._blobs.all()] == []


async def test_the_longest_name_and_whatever_bytes_are_taken(files):
    record = await files.create("acme", "a" * 251 + ".bin", pieces(b"\xff\0" * 10, b"x" * 63))
    assert record.bytes == 83
    assert await files.content("acme", record.id) == b"\xff\0" * 10 + b"x" * 63
    assert await files.piece("acme", record.id, 18, 4) == b"\xff\0xx"
    record = await files.create("other", "a.jsonl", pieces(b"\xc3", b"\xa9" * 1), "batch")
    assert await files.content("other", record.id) == "é".encode()


async def test_of_an_upload_that_breaks_off_nothing_stays(files):
    async def lost():
        yield b"x"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await files.create("acme", "a.txt", lost())
    assert await files.all("acme") == []
    assert [blob async for blob in files._blobs.all()] == []
    assert "too_many_bytes_of_files" not in await uploads(files, 1, size=100)


async def test_blobs_of_no_file_are_collected_once_they_are_old(files, namespace):
    (kept,) = await uploads(files, 1, size=5)
    blobs = files._blobs
    for name in ("lost", "other"):
        await blobs.put(blobs.key("acme", name), pieces(b"x"))
    orphans = Orphans(files._redis, namespace, blobs)
    now = datetime.now(UTC)
    assert await orphans.collect(now + timedelta(hours=1)) == 0, "Redis may be what was lost"
    await files._redis.set(orphans._since, (now - timedelta(hours=2)).timestamp())
    assert await orphans.collect(now - timedelta(hours=1)) == 0
    assert await orphans.collect(now + timedelta(hours=1)) == 2
    assert await files.content("acme", kept) == b"x" * 5
    await files.delete("acme", kept)
    assert [blob async for blob in blobs.all()] == []
    await blobs.put(blobs.key("acme", "lost"), pieces(b"x"))
    assert await orphans.collect(now + timedelta(hours=1)) == 1


@pytest.mark.parametrize("failure", [ConnectionError("away"), ValueError("not foreseen")])
async def test_a_look_for_orphans_that_fails_is_counted_and_not_the_last(
    files, namespace, monkeypatch, failure
):
    monkeypatch.setattr(orphans_module, "_EVERY_S", 1)
    orphans, looks = Orphans(files._redis, namespace, files._blobs), 0

    async def fails(before):
        nonlocal looks
        looks += 1
        await files._redis.delete(orphans._turn)
        if looks == 1:
            raise failure

    monkeypatch.setattr(orphans, "collect", fails)
    before = metrics.orphan_looks_failed._value.get()
    orphans.start()
    await until(lambda: looks > 1, 10)
    await orphans.stop()
    assert metrics.orphan_looks_failed._value.get() == before + 1


async def test_what_killed_uploads_left_is_collected_too(files, namespace, tmp_path):
    blobs = Blobs.of(Settings(blobs_url=tmp_path.as_uri(), namespace=namespace))
    left = tmp_path / namespace / "acme" / "file-1#1"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x")
    await Orphans(files._redis, namespace, blobs).collect(datetime.now(UTC) + timedelta(hours=1))
    assert not left.exists()


async def test_what_redis_holds_from_before_is_read_moved_and_deleted(files, namespace):
    tenant, id = "acme", FILE.new()
    record = {"id": id, "filename": "a.txt", "bytes": 7, "created_at": 1, "purpose": "assistants"}
    redis, prefix = files._redis, f"{namespace}:{{files}}:"
    await redis.hset(f"{prefix}acme:index", id, json.dumps(record))
    await redis.set(f"{prefix}acme:file:{id}", "grüße")
    await redis.mset({f"{prefix}acme:bytes": 7, f"{prefix}bytes": 9})
    assert await files.content(tenant, id) == "grüße".encode()
    assert await files.piece(tenant, id, 0, 2) == b"gr"
    key = await files.in_blob(tenant, id)
    assert b"".join([piece async for piece in files._blobs.read(key)]) == "grüße".encode()
    await files.delete(tenant, id)
    assert await redis.mget(f"{prefix}acme:bytes", f"{prefix}bytes") == ["0", "2"]
    assert [blob async for blob in files._blobs.all()] == []


async def test_what_a_refused_file_would_have_taken_is_not_counted(files):
    first = await files.create("acme", "a.txt", pieces(b"x" * 60))
    assert await uploads(files, 2, size=41) == ["too_many_bytes_of_files"] * 2
    with pytest.raises(PenstockError, match="may have 100 bytes of files") as refused:
        await files.create("acme", "a.txt", pieces(b"x" * 41))
    assert refused.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(await uploads(files, 1, size=40)) == 1
    await files.delete("acme", first.id)
    (again,) = await uploads(files, 1, size=60)
    assert again in {file.id for file in await files.all("acme")}


@pytest.fixture
async def small(redis_url: str, namespace: str) -> AsyncIterator[Files]:
    """Room for 250 bytes of all tenants, 100 of each."""
    redis = connect(redis_url)
    limits = GatewaySettings(
        max_blob_bytes_per_tenant=100, max_blob_bytes=250, max_upload_bytes=120
    )
    yield Files(redis, namespace, limits, memory_blobs(namespace))
    await redis.aclose()


def refusals(limit: str) -> float:
    return REGISTRY.get_sample_value("penstock_gateway_files_refused_total", {"limit": limit}) or 0


async def test_tenants_at_once_do_not_fill_redis_together(small):
    of_all = refusals("all")
    tenants = [f"tenant {number}" for number in range(8)]
    outcomes = await asyncio.gather(*(uploads(small, 1, size=100, tenant=t) for t in tenants))
    reasons = [reason for (reason,) in outcomes]
    assert reasons.count("storage_full") == 6
    assert refusals("all") == of_all + 6
    kept = [tenant for tenant in tenants if await small.all(tenant)]
    assert len(kept) == 2
    other = next(tenant for tenant in tenants if tenant not in kept)
    assert len(await uploads(small, 1, size=50, tenant=other)) == 1, "what fits is taken"
    (file,) = await small.all(other)
    assert await small.content(other, file.id) == b"x" * 50


async def test_whose_limit_was_reached_is_told(small):
    for tenant in ("a", "b"):
        await uploads(small, 1, size=100, tenant=tenant)
    with pytest.raises(PenstockError, match="not your own limit") as refused:
        await small.create("c", "a.txt", pieces(b"x" * 51))
    error = refused.value
    assert (error.code, error.reason) == (CODE.RESOURCE_EXHAUSTED, "storage_full")
    assert (http_status(error), error_body(error)["error"]["type"]) == (507, "server_error")
    assert leaks(error.message) == []
    of_tenants = refusals("tenant")
    with pytest.raises(PenstockError, match="A tenant may have 100 bytes") as own:
        await small.create("a", "a.txt", pieces(b"x" * 51))
    assert (own.value.reason, http_status(own.value)) == ("too_many_bytes_of_files", 429)
    assert refusals("tenant") == of_tenants + 1


async def test_deleting_makes_room_for_others_once(small):
    (first,) = await uploads(small, 1, size=100, tenant="a")
    await uploads(small, 1, size=100, tenant="b")
    assert await uploads(small, 1, size=51, tenant="c") == ["storage_full"]
    await asyncio.gather(*(small.delete("a", first) for _ in range(3)))
    assert await uploads(small, 1, size=100, tenant="d") != ["storage_full"]
    assert await uploads(small, 1, size=51, tenant="e") == ["storage_full"]


async def test_a_tenants_files_are_its_own(files):
    (mine,) = await uploads(files, 1, size=90)
    await files.note_store("acme", [mine], "vs_1", held=True)
    for tenant in ("rival", "acme:file", "acm"):
        with pytest.raises(PenstockError):
            await files.get(tenant, mine)
        with pytest.raises(PenstockError):
            await files.content(tenant, mine)
        assert await files.all(tenant) == []
        assert await files.stores_of(tenant, mine) == set()
        await files.note_store(tenant, [mine], "vs_1", held=False)
        await files.delete(tenant, mine)
    assert await files.content("acme", mine) == b"x" * 90
    assert await files.stores_of("acme", mine) == {"vs_1"}
    assert await uploads(files, 1, size=11) == ["too_many_bytes_of_files"]
    (theirs,) = await uploads(files, 1, size=100, tenant="rival")
    assert await files.content("rival", theirs) == b"x" * 100


async def test_which_stores_hold_a_file(files):
    first, second = await uploads(files, 2, size=1)
    for store in ("vs_1", "vs_2", "vs_2"):
        await files.note_store("acme", [first], store, held=True)
    assert await files.stores_of("acme", first) == {"vs_1", "vs_2"}
    assert await files.stores_of("acme", second) == set()
    await files.note_store("acme", [first], "vs_2", held=False)
    assert await files.stores_of("acme", first) == {"vs_1"}
    await files.delete("acme", first)
    assert await files.stores_of("acme", first) == set()


async def test_the_input_of_a_batch_has_the_size_of_a_body(redis_url: str, namespace: str) -> None:
    redis = connect(redis_url)
    limits = GatewaySettings(body_limit_bytes=50, max_upload_bytes=100)
    files = Files(redis, namespace, limits, memory_blobs(namespace))
    with pytest.raises(PenstockError, match="50 bytes") as refused:
        await files.create("acme", "a.jsonl", pieces(b"x" * 51), "batch")
    assert refused.value.reason == "file_too_large"
    await files.create("acme", "a.jsonl", pieces(b"x" * 50), "batch")
    await files.create("acme", "a.txt", pieces(b"x" * 100))
    await redis.aclose()
