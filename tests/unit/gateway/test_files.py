"""What is taken as a file, and a tenant's share of files, however many uploads come at once."""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from prometheus_client import REGISTRY

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.common.redis import connect
from services.gateway.api.rest.http import error_body, http_status
from services.gateway.stores.files import Files
from tests.support.inside import leaks

CODE = grpc.StatusCode


@pytest.fixture
async def files(redis_url: str, namespace: str) -> AsyncIterator[Files]:
    redis = connect(redis_url)
    limits = GatewaySettings(max_files=3, max_file_bytes_per_tenant=100)
    yield Files(redis, namespace, limits, max_chars=120)
    await redis.aclose()


async def uploads(files: Files, number: int, size: int, tenant: str = "acme") -> list[str]:
    """At the same time; returns why each was refused, or its id."""

    async def upload() -> str:
        try:
            return (await files.create(tenant, "a.txt", b"x" * size)).id
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
    assert await files.content("acme", third) == "x" * 50
    assert {file.id for file in await files.all("acme")} == {second, third}


async def test_a_file_is_told_whole_and_by_its_id(files):
    before = int(time.time())
    record = await files.create("acme", "Guide.MD", "grüße".encode())
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
    }
    assert await files.content("acme", record.id) == "grüße"
    await files.delete("acme", record.id)
    for gone in (files.get("acme", record.id, "file_id"), files.content("acme", record.id)):
        with pytest.raises(PenstockError) as refused:
            await gone
        assert (refused.value.code, refused.value.reason) == (
            grpc.StatusCode.NOT_FOUND,
            "not_found",
        )


@pytest.mark.parametrize(
    ("name", "content", "reason", "said"),
    [
        ("a" * 252 + ".txt", b"x", "", "longer than 255 characters"),
        ("a.pdf", b"x", "unsupported_file", ".txt, .md"),
        ("txt", b"x", "unsupported_file", "text files"),
        ("", b"x", "unsupported_file", "text files"),
        ("a.txt", b"ab\xff", "invalid_file", "bad byte at 2"),
        ("a.txt", b"", "invalid_file", "empty"),
        ("a.md", b"\xef\xbb\xbf \n\t", "invalid_file", "empty"),
        ("a.txt", b"x" * 121, "file_too_long", "121 characters; at most 120"),
    ],
)
async def test_what_is_no_text_file_is_refused(files, name, content, reason, said):
    with pytest.raises(PenstockError, match=said) as refused:
        await files.create("acme", name, content)
    error = refused.value
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert (error.stage, error.param, error.reason) == ("gateway", "file", reason)
    assert await files.all("acme") == []


async def test_the_longest_name_and_text_are_taken_and_a_mark_of_order_is_not_text(files):
    record = await files.create("acme", "a" * 251 + ".txt", b"\xef\xbb\xbf" + b"x" * 80)
    assert record.bytes == 83
    assert await files.content("acme", record.id) == "x" * 80
    record = await files.create("other", "a.txt", b"x" * 100)
    assert record.bytes == 100


async def test_what_a_refused_file_would_have_taken_is_not_counted(files):
    first = await files.create("acme", "a.txt", b"x" * 60)
    assert await uploads(files, 2, size=41) == ["too_many_bytes_of_files"] * 2
    with pytest.raises(PenstockError, match="may have 100 bytes of files") as refused:
        await files.create("acme", "a.txt", b"x" * 41)
    assert refused.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(await uploads(files, 1, size=40)) == 1
    await files.delete("acme", first.id)
    (again,) = await uploads(files, 1, size=60)
    assert again in {file.id for file in await files.all("acme")}


@pytest.fixture
async def small(redis_url: str, namespace: str) -> AsyncIterator[Files]:
    """Room for 250 bytes of all tenants, 100 of each."""
    redis = connect(redis_url)
    limits = GatewaySettings(max_file_bytes_per_tenant=100, max_file_bytes=250)
    yield Files(redis, namespace, limits, max_chars=120)
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
    assert await small.content(other, file.id) == "x" * 50


async def test_whose_limit_was_reached_is_told(small):
    for tenant in ("a", "b"):
        await uploads(small, 1, size=100, tenant=tenant)
    with pytest.raises(PenstockError, match="not your own limit") as refused:
        await small.create("c", "a.txt", b"x" * 51)
    error = refused.value
    assert (error.code, error.reason) == (CODE.RESOURCE_EXHAUSTED, "storage_full")
    assert (http_status(error), error_body(error)["error"]["type"]) == (507, "server_error")
    assert leaks(error.message) == []
    of_tenants = refusals("tenant")
    with pytest.raises(PenstockError, match="A tenant may have 100 bytes") as own:
        await small.create("a", "a.txt", b"x" * 51)
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
    assert await files.content("acme", mine) == "x" * 90
    assert await files.stores_of("acme", mine) == {"vs_1"}
    assert await uploads(files, 1, size=11) == ["too_many_bytes_of_files"]
    (theirs,) = await uploads(files, 1, size=100, tenant="rival")
    assert await files.content("rival", theirs) == "x" * 100


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
