"""Files of stores whose embedding model is a served one: whose vectors, in whose name, and what is
waited for."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protos.common_pb2 import PRIORITY_LOW
from protos.retrieval_pb2 import IndexProgress
from services.common.errors import unavailable
from services.common.redis import connect
from services.gateway.identity.standing import Grantee
from services.gateway.jobs import jobs
from services.gateway.stores.indexing import indexing
from services.gateway.stores.vector_stores.store_files import AttachedFile
from tests.support.gateway_parts import Opened
from tests.support.stores_rig import CALLER, StoresRig
from tests.support.waiting import until
from tests.unit.gateway.generating import CODE, ends
from tests.unit.gateway.test_questions import embeds


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[StoresRig]:
    redis = connect(redis_url)
    async with StoresRig(redis, namespace).running() as rig:
        rig.retrieval.further = {"axes": "a1"}
        rig.tokenizers.script = embeds(1, 0, 0)
        yield rig
    await redis.aclose()


async def outcome(rig: StoresRig, store: str) -> tuple[str, str]:
    await rig.arrived()
    (file,) = await rig.records.all_files("acme", store)
    return file.state, file.error


async def test_a_file_has_vectors_of_its_store_s_model(rig: StoresRig) -> None:
    file = await rig.file("some words")
    store = await rig.store(file, embedding_model="axes")
    assert await outcome(rig, store) == ("completed", "")
    (told,) = rig.retrieval.vectors
    assert [list(one.values) for one in told.vectors] == [[1, 0, 0]]
    (opened,) = rig.tokenizers.opened
    assert opened.request.model == "axes"
    assert [one.text for one in opened.request.pool.inputs] == ["some words"]
    assert opened.request.pool.judged, "as an upload, by retrieval"
    caller = opened.request.caller
    assert (caller.tenant, caller.priority) == ("acme", PRIORITY_LOW)
    assert caller.request_id == f"{CALLER.request_id}:{file.id}:0"
    (run,) = rig.metered.settled
    assert (run.who["route"], run.who["model"], run.used.prompt) == ("index", "axes", 10)
    plain = await rig.store(await rig.file())
    assert await outcome(rig, plain) == ("completed", "")
    assert len(rig.tokenizers.opened) == 1, "of retrieval's own model it tells none"


async def test_while_the_model_is_away_a_file_waits(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(opened: Opened) -> None:
        tried = len(rig.tokenizers.opened)
        ends(CODE.NOT_FOUND if tried == 1 else CODE.UNAVAILABLE)(opened)
        if tried == 2:
            rig.tokenizers.script = embeds(1, 0, 0)

    monkeypatch.setattr("services.gateway.stores.indexing.served_embedders._AGAIN_S", 0.05)
    rig.tokenizers.script = away
    store = await rig.store(await rig.file(), embedding_model="axes")
    assert await outcome(rig, store) == ("completed", "")
    assert len(rig.tokenizers.opened) == 3
    assert [run.used.prompt for run in rig.metered.settled if run.used.prompt] == [10]
    monkeypatch.setattr(indexing, "QUEUEING_S", -1.0)
    rig.tokenizers.script = ends(CODE.UNAVAILABLE)
    store = await rig.store(await rig.file(), embedding_model="axes")
    state, error = await outcome(rig, store)
    assert state == "failed"
    assert error.startswith("the embedding model 'axes': ")


@pytest.mark.parametrize("ends", ["taken out", "failed"])
async def test_what_was_embedded_by_tries_that_ended_is_paid_for_where_it_is_given_up(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Taken out between two of them; what fails in the end costs nothing."""
    monkeypatch.setattr(indexing, "_AGAIN_S", 0.01)
    index = rig.retrieval.index
    away = unavailable("away", stage="retrieval", reason="store_away", retry_after_s=0.01)

    async def breaks(request: Any, span: Any, tell: Any, embed: Any) -> None:
        if rig.retrieval.vectors:
            raise unavailable("broken", stage="retrieval", reason="broken")
        await index(request, span, tell, embed)
        if ends == "taken out":
            place = ("acme", request.collection, request.source_id)
            (file,) = await rig.records.files(*place[:2], [place[2]])
            await rig.records.drop(*place, file.attachment)
        raise away

    monkeypatch.setattr(rig.retrieval, "index", breaks)
    store, file = await rig.store(embedding_model="axes"), await rig.file()
    attached = await rig.attach(store, file)
    await rig.arrived()
    settled = [(run.status, run.used.prompt) for run in rig.metered.settled]
    assert settled == [("failed", 0), ("cancelled", 10) if ends == "taken out" else ("failed", 0)]
    assert {run.id for run in rig.metered.settled} == {f"{file.id}:{attached.attachment}"}
    assert rig.metered.settled[-1].who["model"] == "axes"


LATE = unavailable("index took longer than 1800 s", stage="retrieval", reason="timeout")


@pytest.mark.parametrize("comes_on", [True, False])
async def test_a_file_behind_others_is_gone_on_with_while_it_comes_on(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, comes_on: bool
) -> None:
    monkeypatch.setattr(indexing, "_AGAIN_S", 0.01)
    monkeypatch.setattr(jobs, "_LOOK_EVERY_S", 0.01)
    index, times = rig.retrieval.index, 0

    async def slow(request: Any, span: Any, tell: Any, embed: Any) -> Any:
        nonlocal times
        times += 1
        if times == 6:
            return await index(request, span, tell, embed)
        await tell(IndexProgress(done=64 * times if comes_on else 64, chunks=640))
        raise LATE

    monkeypatch.setattr(rig.retrieval, "index", slow)
    store = await rig.store(await rig.file(), embedding_model="axes")
    assert await outcome(rig, store) == (
        ("completed", "") if comes_on else ("failed", LATE.message)
    )
    assert times == (6 if comes_on else 4)


async def test_a_file_of_retrieval_s_own_model_that_takes_too_long_has_failed(
    rig: StoresRig,
) -> None:
    rig.retrieval.failure = LATE
    store = await rig.store(await rig.file())
    assert await outcome(rig, store) == ("failed", LATE.message)
    assert rig.retrieval.begun == 1


def test_a_file_that_comes_on_may_wait_anew_for_what_is_away() -> None:
    about = {"store": "vs_1", "file": "file-1", "attachment": "a"}
    who = Grantee(tenant="acme", user="key_1", at=0)
    task = indexing.Task(who=who, **about)
    file = AttachedFile(id="file-1", store="vs_1", filename="a", created_at=0, bytes=1)
    assert not indexing._may_wait(file, task.coming_on(0))
    assert indexing._may_wait(file, task.coming_on(64))
    assert not indexing._may_wait(file, task.model_copy(update={"done": 64}).coming_on(64))


async def test_what_the_model_cannot_read_fails_the_file_in_words(rig: StoresRig) -> None:
    rig.tokenizers.script = ends(CODE.INVALID_ARGUMENT)
    store = await rig.store(await rig.file(), embedding_model="axes")
    state, error = await outcome(rig, store)
    assert (state, error.partition(":")[0]) == ("failed", "the embedding model 'axes'")


async def test_a_store_that_chooses_it_is_indexed_anew_by_it(rig: StoresRig) -> None:
    store = await rig.store(await rig.file())
    assert await outcome(rig, store) == ("completed", "")
    rig.metered.settled.clear()
    await rig.stores.update(
        "acme", store, lambda record: record.model_copy(update={"embedding_model": "axes"})
    )
    await asyncio.gather(*rig.reindexing._beginning.values())
    await rig.arrived()
    (run,) = rig.metered.settled
    assert (run.who["route"], run.who["model"], run.used.prompt) == ("reindex", "axes", 10)
    (file,) = await rig.records.all_files("acme", store)
    assert file.embedder == "a1"


async def test_a_file_that_is_taken_out_gives_its_vectors_up(rig: StoresRig) -> None:
    rig.tokenizers.script = lambda opened: None
    file = await rig.file()
    store = await rig.store(file, embedding_model="axes")
    await until(lambda: bool(rig.tokenizers.opened), 5)
    await rig.stores.detach(CALLER, store, file.id)
    await rig.arrived()
    assert rig.tokenizers.opened[0].cancelled


@pytest.mark.parametrize("stored", [0, 7])
async def test_what_was_embedded_of_a_file_that_is_taken_out_is_paid_for(
    rig: StoresRig, stored: int
) -> None:
    """Else whoever takes his files out before they are whole has the model for nothing. `stored`:
    of tries that something away has ended, which were not charged."""

    def once(opened: Opened) -> None:
        if len(rig.tokenizers.opened) == 1:
            embeds(1, 0, 0)(opened)

    rig.tokenizers.script = once
    rig.retrieval.rounds = 2
    rig.retrieval.progress = [IndexProgress(done=64, chunks=128, tokens=stored)]
    file = await rig.file()
    store = await rig.store(file, embedding_model="axes")
    await until(lambda: len(rig.tokenizers.opened) == 2, 5)
    await rig.stores.detach(CALLER, store, file.id)
    await rig.arrived()
    (run,) = rig.metered.settled
    assert (run.status, run.used.prompt) == ("cancelled", stored + 10)
