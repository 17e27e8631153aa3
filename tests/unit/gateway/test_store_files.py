"""Where a file in a store stands, and who may say so."""

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.common.errors import PenstockError, invalid
from services.common.redis import connect
from services.gateway.ids import FILE, STORE
from services.gateway.store_files import AttachedFile, StoreFiles, Unready


@pytest.fixture
async def files(redis_url: str, namespace: str) -> AsyncIterator[StoreFiles]:
    redis = connect(redis_url)
    yield StoreFiles(redis, namespace)
    await redis.aclose()


def attached(store: str, name: str = "guide.md", **more: Any) -> AttachedFile:
    now = time.time()
    told = {"id": FILE.new(), "created_at": int(now), "bytes": 10, "indexing_until": now + 60}
    return AttachedFile(store=store, filename=name, **{**told, **more})


async def test_an_outcome_is_noted_for_its_own_attachment_only(files: StoreFiles) -> None:
    store = STORE.new()
    first = attached(store)
    await files.put("t", first)
    again = attached(store, id=first.id)
    await files.put("t", again)
    first.fail("too late")
    assert await files.settle("t", first) == "replaced"
    assert (await files.get("t", store, first.id)).status == "in_progress"
    again.state = "completed"
    assert await files.settle("t", again) == "kept"
    assert (await files.get("t", store, first.id)).status == "completed"
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


def test_an_indexing_that_was_interrupted_has_failed() -> None:
    file = attached(STORE.new(), indexing_until=time.time() - 1)
    assert file.as_json()["status"] == "failed"
    assert "interrupted" in file.as_json()["last_error"]["message"]
    assert Unready([file], 1).warning() == (
        f"not searched: guide.md ({file.id}) failed: indexing was interrupted"
    )
