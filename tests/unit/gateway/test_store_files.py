"""Where a file in a store stands, and who may say so."""

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.common.errors import PenstockError, invalid
from services.common.redis import connect
from services.gateway.ids import FILE, STORE
from services.gateway.stores.store_files import AttachedFile, StoreFiles, Unready


@pytest.fixture
async def files(redis_url: str, namespace: str) -> AsyncIterator[StoreFiles]:
    redis = connect(redis_url)
    yield StoreFiles(redis, namespace)
    await redis.aclose()


def attached(store: str, name: str = "guide.md", **more: Any) -> AttachedFile:
    now = time.time()
    told = {"id": FILE.new(), "created_at": int(now), "bytes": 10}
    return AttachedFile(store=store, filename=name, **{**told, **more})


async def test_an_outcome_is_noted_for_its_own_attachment_only(files: StoreFiles) -> None:
    store = STORE.new()
    first = attached(store)
    await files.put("t", first)
    again = attached(store, id=first.id)
    await files.put("t", again)
    first.fail("too late")
    assert await files.settle("t", first) == "replaced"
    assert (await files.get("t", store, first.id)).state == "in_progress"
    again.state = "completed"
    assert await files.settle("t", again) == "kept"
    assert (await files.get("t", store, first.id)).state == "completed"
    await files.drop("t", store, first.id)
    assert await files.settle("t", again) == "gone"
    assert await files.all("t", store) == []


async def test_unready_are_those_on_their_way_and_those_that_failed(files: StoreFiles) -> None:
    stores = [STORE.new(), STORE.new()]
    done, failed, waiting = attached(stores[0]), attached(stores[1]), attached(stores[1])
    for file in (done, failed, waiting):
        await files.put("t", file)
    assert (await files.unready("t", stores)).total == 3
    done.state = "completed"
    failed.fail("no")
    for file in (done, failed):
        await files.settle("t", file)
    found = await files.unready("t", stores)
    assert ({f.id for f in found.files}, found.total) == ({failed.id, waiting.id}, 2)
    assert await files.unready("t", stores[:1]) == Unready([], 0)
    assert await files.unready("other", stores) == Unready([], 0)
    done.state = "in_progress"
    await files.put("t", done)
    assert (await files.unready("t", stores)).total == 3, "attached anew"
    await files.drop("t", stores[1], failed.id)
    assert (await files.unready("t", stores)).total == 2
    await files.drop_all("t", stores[1])
    assert (await files.unready("t", stores)).total == 1


async def test_a_warning_names_a_few_and_counts_the_others(files: StoreFiles) -> None:
    store = STORE.new()
    for n in range(12):
        file = attached(store, f"{n:02}" + "long" * 100 + ".md")
        await files.put("t", file)
        if n % 2:
            file.fail("e" * 5000)
            await files.settle("t", file)
    warning = (await files.unready("t", [store])).warning()
    assert warning.startswith("not searched: 00long")
    assert warning.count("is still being indexed") == 3
    assert warning.count("failed: eee") == 2
    assert warning.endswith("and 7 more")
    assert len(warning) < 1000
    assert Unready().warning() == ""


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


async def test_a_tenants_and_a_stores_files_are_its_own(files: StoreFiles) -> None:
    store, other = STORE.new(), STORE.new()
    mine = attached(store)
    await files.put("t", mine)
    mine.state = "completed"
    for tenant, where in (("rival", store), ("t", other)):
        assert await files.all(tenant, where) == []
        with pytest.raises(PenstockError) as refused:
            await files.get(tenant, where, mine.id)
        assert (refused.value.code, refused.value.reason) == (
            grpc.StatusCode.NOT_FOUND,
            "not_found",
        )
        assert await files.settle(tenant, mine.model_copy(update={"store": other})) == "gone"
        await files.drop(tenant, where, mine.id)
        await files.drop_all(tenant, where)
    assert await files.settle("rival", mine) == "gone"
    assert [file.state for file in await files.all("t", store)] == ["in_progress"]
    assert (await files.unready("t", [store])).total == 1


async def test_those_named_are_the_oldest_of_the_first_stores(files: StoreFiles) -> None:
    stores = [STORE.new(), STORE.new()]
    made = [attached(store) for store in (*stores, *stores) for _ in range(2)]
    for file in reversed(made):
        await files.put("t", file)
    found = await files.unready("t", stores)
    by_age = [file.id for store in stores for file in made if file.store == store]
    assert ([file.id for file in found.files], found.total) == (by_age[:5], 8)
    assert found.warning().endswith("; and 3 more")


async def test_attaching_anew_takes_the_failure_back(files: StoreFiles) -> None:
    store = STORE.new()
    first = attached(store)
    await files.put("t", first)
    first.fail("no")
    assert await files.settle("t", first) == "kept"
    again = attached(store, id=first.id)
    assert again.attachment != first.attachment
    await files.put("t", again)
    told = await files.get("t", store, first.id)
    assert (told.state, told.as_json()["last_error"]) == ("in_progress", None)


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
