"""The store against Qdrant's local mode: tenants apart, replacing without a gap, failures told."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from qdrant_client import QdrantClient

from services.common.config import RetrievalSettings, Settings
from services.common.errors import PenstockError
from services.retrieval import store as store_module
from services.retrieval.documents.chunks import Chunk
from services.retrieval.qdrant import Qdrant, StoreUnusableError
from services.retrieval.store import Store
from tests.support.waiting import until

DIMENSION = 8


def make(
    folder: Path, fingerprint: str = "f1", dimension: int = DIMENSION, qdrant_url: str = ""
) -> Qdrant:
    settings = Settings(
        data_dir=folder,
        qdrant_url=qdrant_url,
        namespace="test",
        retrieval=RetrievalSettings(timeout_s=20),
    )
    return Qdrant(settings, f"model-{fingerprint}", fingerprint, dimension)


@pytest.fixture
async def qdrant(tmp_path: Path) -> AsyncIterator[Qdrant]:
    opened = make(tmp_path)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def store(qdrant: Qdrant) -> Store:
    return Store(qdrant)


def axis(n: int) -> np.ndarray:
    return np.eye(DIMENSION, dtype=np.float32)[n]


def document(*words: str) -> tuple[list[Chunk], np.ndarray]:
    """One chunk a word; chunk n points along axis n."""
    chunks = [Chunk("Doc", word, 0, len(word), 1) for word in words]
    return chunks, np.stack([axis(n) for n in range(len(words))])


async def texts(store: Store, tenant: str, *collections: str, limit: int = 50) -> set[str]:
    found = await store.search(tenant, collections, np.ones(DIMENSION, np.float32), limit)
    return {passage.text for passage in found}


async def test_the_nearest_come_first_with_their_source(store: Store) -> None:
    await store.replace("t", "c", "doc", *document("north", "east", "south"))
    question = axis(1) * 0.9 + axis(2) * 0.3
    found = await store.search("t", ["c"], question, 2)
    assert [(p.text, p.title, p.source_id, p.position) for p in found] == [
        ("east", "Doc", "doc", 1),
        ("south", "Doc", "doc", 2),
    ]
    assert found[0].score == pytest.approx(0.9487, abs=1e-3)
    assert [p.text for p in await store.search("t", ["c"], question, 9, 0.5)] == ["east"]


async def test_tenants_are_apart_even_under_equal_names(store: Store) -> None:
    await store.replace("ours", "c", "doc", *document("our text"))
    await store.replace("theirs", "c", "doc", *document("their text"))
    assert await texts(store, "ours", "c") == {"our text"}
    assert await texts(store, "theirs", "c") == {"their text"}
    assert await texts(store, "nobody", "c") == set()
    assert await store.remove("nobody", "c") == 0
    assert await store.remove("ours", "c") == 1
    assert await texts(store, "theirs", "c") == {"their text"}


async def test_a_source_is_removed_from_the_named_collection_alone(store: Store) -> None:
    """A file may be in several vector stores, under one id."""
    for collection in ("a", "b"):
        for source in ("one", "two"):
            await store.replace("t", collection, source, *document(f"{source} in {collection}"))
    assert await store.remove("t", "a", "one") == 1
    assert await texts(store, "t", "a", "b") == {"two in a", "one in b", "two in b"}
    assert await store.remove("t", "b") == 2
    assert await texts(store, "t", "a", "b") == {"two in a"}


async def test_the_local_store_needs_none_of_the_librarys_filters(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take 50 µs for each point of all tenants (local_filters.py)."""
    monkeypatch.setattr("qdrant_client.local.payload_filters.check_filter", None)
    await store.replace("a", "c", "s", *document("old", "older"))
    await store.replace("a", "c", "s", *document("new"))
    assert await texts(store, "a", "c") == {"new"}
    assert await store.remove("a", "c", "s") == 1


async def test_only_the_named_collections_are_searched(store: Store) -> None:
    for name in ("a", "b", "c"):
        await store.replace("t", name, "doc", *document(f"text of {name}"))
    assert await texts(store, "t", "a", "c", "unknown") == {"text of a", "text of c"}


async def test_replacing_leaves_nothing_of_the_earlier_text(store: Store) -> None:
    await store.replace("t", "c", "doc", *document("old one", "old two", "old three"))
    await store.replace("t", "c", "other", *document("untouched"))
    await store.replace("t", "c", "doc", *document("new one", "new two"))
    assert await texts(store, "t", "c") == {"new one", "new two", "untouched"}


async def test_a_long_document_goes_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_POINTS_PER_READ", 3)
    monkeypatch.setattr(store_module, "_POINTS_PER_WRITE", 2)
    await store.replace("t", "c", "doc", *document(*"abcdefgh"))
    assert await texts(store, "t", "c") == set("abcdefgh")
    await store.replace("t", "c", "doc", *document("new"))
    assert await texts(store, "t", "c") == {"new"}
    await store.replace("t", "c", "doc", *document(*"abcdefgh"))
    assert await store.remove("t", "c") == 8
    assert await texts(store, "t", "c") == set()


async def test_without_a_threshold_the_least_alike_is_found_too(store: Store) -> None:
    await store.replace("t", "c", "doc", *document("north"))
    assert [p.text for p in await store.search("t", ["c"], -axis(0), 9)] == ["north"]
    assert not await store.search("t", ["c"], -axis(0), 9, 0.1)


async def test_a_clock_that_goes_backwards_does_not_lose_the_newer_text(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.replace("t", "c", "doc", *document("first"))
    monkeypatch.setattr(store_module.time, "time_ns", lambda: 1_000_000)
    await store.replace("t", "c", "doc", *document("second"))
    assert await texts(store, "t", "c") == {"second"}


async def test_a_search_during_replacing_always_finds_the_document(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_POINTS_PER_WRITE", 1)
    await store.replace("t", "c", "doc", *document(*(f"old {n}" for n in range(8))))
    replacing = asyncio.create_task(
        store.replace("t", "c", "doc", *document(*(f"new {n}" for n in range(8))))
    )
    old, new = ({f"{age} {n}" for n in range(8)} for age in ("old", "new"))
    looks = 0
    while not replacing.done():
        seen = await texts(store, "t", "c")
        assert old <= seen or new <= seen
        looks += 1
    await replacing
    assert looks > 2
    assert await texts(store, "t", "c") == new


@pytest.mark.parametrize("held_before", ["_put", "_delete"])
async def test_of_two_writers_at_once_the_newer_version_remains(
    store: Store, monkeypatch: pytest.MonkeyPatch, held_before: str
) -> None:
    """The older one is held up in the middle, while the newer one comes and goes."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    step = getattr(store, held_before)

    async def held(*args: object) -> None:
        monkeypatch.setattr(store, held_before, step)
        reached.set()
        await go_on.wait()
        await step(*args)

    monkeypatch.setattr(store, held_before, held)
    older = asyncio.create_task(store.replace("t", "c", "doc", *document("old 0", "old 1")))
    await asyncio.wait_for(reached.wait(), 10)
    await store.replace("t", "c", "doc", *document("new 0"))
    assert "new 0" in await texts(store, "t", "c")
    go_on.set()
    await older
    assert await texts(store, "t", "c") == {"new 0"}


async def test_a_search_waits_behind_one_batch_of_all_that_is_written_and_removed(
    qdrant: Qdrant, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_POINTS_PER_WRITE", 1)
    await store.replace("t", "c", "gone", *document(*"abcdefgh"))
    executed: list[str] = []

    async def logged(
        operation: str, tenant: str, work: Callable[[QdrantClient], Any], ended: Any
    ) -> Any:
        def log_and_work(client: QdrantClient) -> Any:
            executed.append(operation)
            return work(client)

        return await as_ever(operation, tenant, log_and_work, ended)

    as_ever = qdrant._run
    monkeypatch.setattr(qdrant, "_run", logged)
    work = [store.replace("t", "c", f"doc {n}", *document(*"abcdefgh")) for n in range(3)]
    tasks = [asyncio.create_task(one) for one in (*work, store.remove("t", "c", "gone"))]
    for _ in range(8):
        before = len(executed)
        await texts(store, "t", "c")
        behind = executed[before : executed.index("search", before)]
        assert sum(operation in ("write", "delete") for operation in behind) <= 1
    assert not all(task.done() for task in tasks), "they were still at it"
    await asyncio.gather(*tasks)
    assert executed.count("write") == 24
    assert executed.count("delete") == 8
    assert await texts(store, "t", "c") == set("abcdefgh")
    assert await store.remove("t", "c") == 24


async def test_a_write_that_is_given_up_is_taken_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_POINTS_PER_WRITE", 1)
    await store.replace("t", "c", "doc", *document("old"))
    written = asyncio.Event()
    put = store._put

    async def stuck_after_one(*args: Any) -> None:
        await put(*args)
        written.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "_put", stuck_after_one)
    task = asyncio.create_task(store.replace("t", "c", "doc", *document("new", "newer")))
    await asyncio.wait_for(written.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.finish()
    assert await texts(store, "t", "c") == {"old"}


async def test_documents_outlive_the_process_and_one_process_holds_them(
    tmp_path: Path,
) -> None:
    first = make(tmp_path)
    await first.open()
    await Store(first).replace("t", "c", "doc", *document("kept"))
    second = make(tmp_path)
    with pytest.raises(StoreUnusableError, match="in use by another process") as raised:
        await second.open()
    assert raised.value.reason == "store_locked"
    with pytest.raises(PenstockError) as told:  # a client learns nothing of how it is set up
        await texts(Store(second), "t", "c")
    assert (told.value.code, told.value.reason) == (grpc.StatusCode.UNAVAILABLE, "store_locked")
    assert str(tmp_path) not in told.value.message
    assert "PENSTOCK" not in told.value.message
    await second.close()
    await first.close()
    third = make(tmp_path)
    await third.open()
    assert await texts(Store(third), "t", "c") == {"kept"}
    await third.close()


@pytest.mark.parametrize("dimension", [DIMENSION, 16])
async def test_another_models_vectors_are_refused(tmp_path: Path, dimension: int) -> None:
    first = make(tmp_path)
    await first.open()
    await first.close()
    second = make(tmp_path, fingerprint="f2", dimension=dimension)
    with pytest.raises(StoreUnusableError, match=r"made by model-f1.*runs model-f2") as raised:
        await second.open()
    assert raised.value.reason == "embedding_model_changed"
    await second.close()


async def test_a_server_that_is_away_is_no_obstacle_to_starting_but_fails_calls(
    tmp_path: Path,
) -> None:
    away = make(tmp_path, qdrant_url="http://127.0.0.1:1")
    await away.open()
    with pytest.raises(PenstockError) as raised:
        await texts(Store(away), "t", "c")
    error = raised.value
    assert (error.code, error.stage, error.reason) == (
        grpc.StatusCode.UNAVAILABLE,
        "retrieval",
        "store_away",
    )
    await away.close()


async def test_a_slow_store_ends_at_the_deadline_and_the_loop_stays_live(tmp_path: Path) -> None:
    slow = make(tmp_path)
    await slow.open()
    slow._timeout_s = 0.2
    gate = threading.Event()
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.005)
            turns += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(PenstockError, match=r"within 0\.2 s") as raised:
        await slow.run("search", "t", lambda client: gate.wait(10))
    ticking.cancel()
    assert raised.value.reason == "store_slow"
    assert turns > 5
    gate.set()
    slow._timeout_s = 10
    assert await texts(Store(slow), "t", "c") == set()
    await slow.close()


async def test_a_write_past_its_deadline_keeps_its_place_until_it_ends(qdrant: Qdrant) -> None:
    """Or the next one would stand before the searches as well."""
    qdrant._timeout_s = 0.1
    gate = threading.Event()
    with pytest.raises(PenstockError, match="did not answer"):
        await qdrant.write("write", "t", lambda client: gate.wait(10))
    next_one = asyncio.create_task(qdrant.write("write", "t", lambda client: None))
    await asyncio.sleep(0)
    assert qdrant._waiting.taken == 1
    gate.set()
    qdrant._timeout_s = 10
    await next_one


async def test_waiting_calls_are_bounded_and_tenants_have_their_turns(qdrant: Qdrant) -> None:
    qdrant._waiting.total = 8
    gate, order = threading.Event(), list[str]()

    def call(tenant: str) -> asyncio.Task[None]:
        def work(_: object) -> None:
            gate.wait(10)
            order.append(tenant)

        return asyncio.create_task(qdrant.run("search", tenant, work))

    held = [call("flood") for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(PenstockError) as raised:
        await call("flood")
    assert raised.value.reason == "queue_full"
    held.append(call("other"))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*held)
    assert order.index("other") <= 2
    await call("flood")
    await until(lambda: qdrant._waiting.taken == 0, 5)
