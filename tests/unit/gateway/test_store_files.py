"""Where a file in a store stands, and who may say so."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from services.common.errors import PenstockError, invalid
from services.common.redis import connect
from services.gateway.ids import FILE, STORE
from services.gateway.stores.vector_stores.store_files import (
    AttachedFile,
    State,
    Unready,
    attribute_values,
    told_attributes,
)
from services.gateway.stores.vector_stores.store_record import StoreRecord
from services.gateway.stores.vector_stores.store_records import StoreRecords


@pytest.fixture
async def records(redis_url: str, namespace: str) -> AsyncIterator[StoreRecords]:
    redis = connect(redis_url)
    yield StoreRecords(redis, namespace, max_files=1000, max_attribute_bytes=2000)
    await redis.aclose()


def attached(store: str, name: str = "guide.md", **more: Any) -> AttachedFile:
    now = time.time()
    told = {"id": FILE.new(), "created_at": int(now), "bytes": 10}
    return AttachedFile(store=store, filename=name, **{**told, **more})


async def made(records: StoreRecords, tenant: str = "t", **about: Any) -> str:
    record = StoreRecord(id=STORE.new(), name="", created_at=0, **about)
    assert await records.create(tenant, record, 99)
    return record.id


async def settle(records: StoreRecords, file: AttachedFile, state: State, error: str = "") -> None:
    def settled(stored: AttachedFile) -> AttachedFile:
        return stored.model_copy(update={"state": state, "error": error})

    await records.change_file("t", file.store, file.id, settled)


async def unready(records: StoreRecords, *stores: str, tenant: str = "t") -> Unready:
    return await records.searched(tenant, stores)


async def told(records: StoreRecords, store: str) -> dict[str, Any]:
    return (await records.store("t", store)).as_json()


async def test_unready_are_those_on_their_way_and_those_that_failed(records: StoreRecords) -> None:
    stores = [await made(records), await made(records)]
    done, failed, waiting = attached(stores[0]), attached(stores[1]), attached(stores[1])
    for file in (done, failed, waiting):
        await records.put("t", file.store, [file])
    assert (await unready(records, *stores)).total == 3
    await settle(records, done, "completed")
    await settle(records, failed, "failed", "no")
    found = await unready(records, *stores)
    assert ({f.id for f in found.files}, found.total) == ({failed.id, waiting.id}, 2)
    assert await unready(records, stores[0]) == Unready([], 0)
    await records.put("t", done.store, [done])
    assert (await unready(records, *stores)).total == 3, "attached anew"
    await records.drop("t", stores[1], failed.id, failed.attachment)
    assert (await unready(records, *stores)).total == 2
    await records.delete("t", stores[1])
    assert (await unready(records, stores[0])).total == 1


async def test_a_warning_names_a_few_and_counts_the_others(records: StoreRecords) -> None:
    store = await made(records)
    for n in range(12):
        file = attached(store, f"{n:02}" + "long" * 100 + ".md")
        await records.put("t", store, [file])
        if n % 2:
            await settle(records, file, "failed", "e" * 5000)
    warning = (await unready(records, store)).warning()
    assert warning.startswith("not searched: 00long")
    assert warning.count("is still being indexed") == 3
    assert warning.count("failed: eee") == 2
    assert warning.endswith("and 7 more")
    assert len(warning) < 1000
    assert Unready().warning() == ""


async def test_counts_are_those_of_the_files_whatever_becomes_of_them(
    records: StoreRecords,
) -> None:
    store = await made(records)
    files = [attached(store, bytes=n) for n in (1, 2, 4, 8)]
    await records.put("t", store, files)
    await settle(records, files[0], "completed")
    await settle(records, files[1], "completed")
    await settle(records, files[2], "failed")

    async def counts() -> tuple[str, list[int], int]:
        is_now = await told(records, store)
        return is_now["status"], list(is_now["file_counts"].values()), is_now["usage_bytes"]

    assert await counts() == ("in_progress", [1, 2, 1, 0, 4], 3)
    await settle(records, files[3], "cancelled")
    assert await counts() == ("completed", [0, 2, 1, 1, 4], 3)
    again = attached(store, id=files[1].id, bytes=2)
    await records.put("t", store, [again])
    assert await counts() == ("in_progress", [1, 1, 1, 1, 4], 1)
    assert not await records.drop("t", store, again.id, files[1].attachment), "it is another's"
    assert await records.drop("t", store, again.id, again.attachment)
    assert await records.drop("t", store, files[0].id, files[0].attachment)
    assert await counts() == ("completed", [0, 0, 1, 1, 2], 0)


async def test_counts_that_an_earlier_version_left_behind_are_made_anew(
    records: StoreRecords, namespace: str
) -> None:
    store = await made(records)
    files = [attached(store, bytes=n) for n in (1, 2)]
    await records.put("t", store, files)
    await settle(records, files[0], "completed")
    facts = f"{namespace}:{{t}}:store:{store}:facts"
    await records._redis.delete(facts)
    assert (await told(records, store))["file_counts"]["total"] == 2
    await records._redis.hincrby(facts, "completed", 3)
    is_now = await told(records, store)
    assert (is_now["file_counts"]["completed"], is_now["usage_bytes"]) == (1, 1)
    await records._redis.delete(facts)
    await settle(records, files[1], "completed")
    is_now = await told(records, store)
    assert (is_now["file_counts"]["completed"], is_now["usage_bytes"]) == (2, 3)


async def test_a_change_that_was_overtaken_begins_again_and_none_is_lost(
    records: StoreRecords,
) -> None:
    store = await made(records)

    def with_key(key: str) -> Callable[[StoreRecord], StoreRecord]:
        return lambda is_now: is_now.model_copy(update={"metadata": {**is_now.metadata, key: "1"}})

    keys = [f"k{n}" for n in range(20)]
    await asyncio.gather(*(records.change("t", store, with_key(key)) for key in keys))
    assert set((await told(records, store))["metadata"]) == set(keys)
    file = attached(store)
    await records.put("t", store, [file])

    def described(key: str) -> Callable[[AttachedFile], AttachedFile]:
        return lambda is_now: is_now.model_copy(
            update={"attributes": {**is_now.attributes, key: 1}}
        )

    changes = [records.change_file("t", store, file.id, described(key)) for key in keys]
    await asyncio.gather(*changes, settle(records, file, "completed"))
    is_now = await records.file("t", store, file.id)
    assert (set(is_now.attributes), is_now.state) == (set(keys), "completed")


async def test_numbers_of_attributes_are_kept_to_the_last_digit(records: StoreRecords) -> None:
    store = await made(records)
    given = {"pi": 3.141592653589793, "n": 9007199254740991, "flag": True, "one": 1, "text": "1"}
    file = attached(store, attributes=given)
    await records.put("t", store, [file])
    await settle(records, file, "completed")
    is_now = (await records.file("t", store, file.id)).as_json()["attributes"]
    assert (is_now, [type(v) for v in is_now.values()]) == (given, [float, int, bool, int, str])


async def test_attributes_of_all_a_tenants_files_together_are_bounded(
    records: StoreRecords,
) -> None:
    """2,000 bytes here, whichever store they are in; what does not grow is always taken."""
    one, other = await made(records), await made(records)
    first = attached(one, attributes={"k": "x" * 900})
    await records.put("t", one, [first])
    await records.put("t", other, [attached(other, attributes={"k": "ä" * 450})])
    with pytest.raises(PenstockError, match="2000 bytes of attributes") as refused:
        await records.put("t", other, [attached(other, attributes={"k": "x" * 300})])
    assert refused.value.reason == "too_many_bytes_of_attributes"

    def says(text: str) -> Callable[[AttachedFile], AttachedFile]:
        return lambda file: file.model_copy(update={"attributes": {"k": text}})

    with pytest.raises(PenstockError, match="attributes"):
        await records.change_file("t", one, first.id, says("x" * 1200))
    ended = await records.change_file(
        "t", one, first.id, lambda file: file.model_copy(update={"state": "completed"})
    )
    assert ended.state == "completed"
    await records.change_file("t", one, first.id, says("x" * 500))
    await records.put("t", other, [attached(other, attributes={"k": "x" * 300})])
    await records.drop("t", one, first.id, first.attachment)
    await records.put("t", other, [attached(other, attributes={"k": "x" * 400})])
    await records.delete("t", other)
    await records.put("t", one, [attached(one, attributes={"k": "x" * 1900})])


async def test_attributes_that_an_earlier_version_did_not_count_are_counted(
    records: StoreRecords,
) -> None:
    store = await made(records)
    await records.put("t", store, [attached(store, attributes={"k": "x" * 1500})])
    await records._redis.hdel(records._key("t", "store", store, "facts"), "attributes")
    with pytest.raises(PenstockError, match="attributes"):
        await records.put("t", store, [attached(store, attributes={"k": "x" * 600})])


def test_a_whole_number_comes_back_from_a_search_as_one() -> None:
    told = {"year": 1999, "share": 0.5, "open": True, "name": "3.0", "none": -0.0}
    back = told_attributes(attribute_values(told))
    assert json.dumps(back) == json.dumps({**told, "none": 0})


async def test_revisions_grow_and_belong_to_an_attachment(
    records: StoreRecords, namespace: str
) -> None:
    store = await made(records)
    file = attached(store)
    place = ("t", store, file.id)
    first = await records.revise(*place)
    assert first > 1e15, "above what a clock gave before there were any"
    await records.put("t", store, [file])
    assert await records.revise(*place) == 0, "it is there"
    assert await records.revise(*place, "another") == 0
    facts = f"{namespace}:{{t}}:store:{store}:facts"
    ahead = int(await records._redis.hget(facts, "revision") or 0) + 10**12
    await records._redis.hset(facts, "revision", ahead)  # Redis' clock went back
    given = [await records.revise(*place, file.attachment) for _ in range(3)]
    assert given == [ahead + 1, ahead + 2, ahead + 3]
    await records.delete("t", store)
    assert await records.revise(*place) > first
    assert [key async for key in records._redis.scan_iter(f"*{store}*")] == []


async def test_a_tenants_and_a_stores_files_are_its_own(
    records: StoreRecords, namespace: str
) -> None:
    store, other = await made(records), await made(records)
    mine = attached(store)
    await records.put("t", store, [mine])
    for tenant, where in (("rival", store), ("t", other)):
        assert await records.all_files(tenant, where) == []
        for call in (
            records.file(tenant, where, mine.id),
            records.change_file(tenant, where, mine.id, lambda file: file),
        ):
            with pytest.raises(PenstockError) as refused:
                await call
            assert refused.value.code == grpc.StatusCode.NOT_FOUND
        assert not await records.drop(tenant, where, mine.id, mine.attachment)
        assert not await records.revise(tenant, where, mine.id, mine.attachment)
    assert await records.delete("rival", store) == (False, [])
    assert await records.clear("rival", store) == []
    for call in (
        records.put("rival", store, [mine]),
        records.store("rival", store),
        records.searched("rival", [store]),
        records.change("rival", store, lambda record: record),
    ):
        with pytest.raises(PenstockError) as refused:
            await call
        assert (refused.value.code, refused.value.reason) == (
            grpc.StatusCode.NOT_FOUND,
            "not_found",
        )
    assert [key async for key in records._redis.scan_iter(f"{namespace}:{{rival}}*")] == []
    assert [file.state for file in await records.all_files("t", store)] == ["in_progress"]


async def test_those_named_are_the_oldest_of_the_first_stores(records: StoreRecords) -> None:
    stores = [await made(records), await made(records)]
    files = [attached(store) for store in (*stores, *stores) for _ in range(2)]
    for file in reversed(files):
        await records.put("t", file.store, [file])
    found = await unready(records, *stores)
    by_age = [file.id for store in stores for file in files if file.store == store]
    assert ([file.id for file in found.files], found.total) == (by_age[:5], 8)
    assert found.warning().endswith("; and 3 more")


def test_whose_fault_a_failure_is() -> None:
    file = attached(STORE.new())
    assert file.as_json()["last_error"] is None
    assert file.as_json()["usage_bytes"] == 0
    file.fail(invalid("the text makes too many chunks", "text"))
    assert file.as_json()["last_error"] == {
        "code": "invalid_file",
        "message": "the text makes too many chunks",
    }
    file = attached(STORE.new())
    file.fail(PenstockError(grpc.StatusCode.INTERNAL, "broken"))
    assert file.as_json()["last_error"]["code"] == "server_error"
    file = attached(STORE.new(), state="completed")
    assert (file.as_json()["usage_bytes"], file.as_json()["last_error"]) == (10, None)


def test_a_file_in_a_store_is_told_whole() -> None:
    file = attached(STORE.new(), state="completed", created_at=1_700_000_000)
    assert file.as_json() == {
        "id": file.id,
        "object": "vector_store.file",
        "created_at": 1_700_000_000,
        "vector_store_id": file.store,
        "status": "completed",
        "usage_bytes": 10,
        "last_error": None,
        "attributes": {},
        "chunking_strategy": {"type": "other"},
        "penstock": {},
    }
    file.fail("broken")
    assert (file.as_json()["status"], file.as_json()["usage_bytes"]) == ("failed", 0)


def test_a_warning_shows_the_beginning_of_long_names_and_errors() -> None:
    for length, shown in ((60, "x" * 60), (61, "x" * 59 + "…")):
        assert attached(STORE.new(), "x" * length).why_unready().startswith(f"{shown} (file-")
    for length in (160, 161):
        file = attached(STORE.new())
        file.fail("e" * length)
        assert file.why_unready().endswith(" failed: " + "e" * 160)
