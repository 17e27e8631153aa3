"""Files that another embedding model indexed: indexed anew by a job, once each, through losses."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos.common_pb2 import Caller
from protos.retrieval_pb2 import IndexProgress
from services.common.errors import PenstockError, invalid, unavailable
from services.common.redis import connect
from services.gateway.jobs import jobs as jobs_module
from services.gateway.jobs.queue import Claimed
from services.gateway.stores.indexing import reindexing
from services.gateway.stores.indexing.reindexing import Round
from services.gateway.stores.vector_stores.store_files import AttachedFile
from tests.support.stores_rig import CALLER, RIVAL, StoresRig
from tests.support.waiting import until


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[StoresRig]:
    redis = connect(redis_url)
    async with StoresRig(redis, namespace).running() as rig:
        yield rig
    await redis.aclose()


async def aged(rig: StoresRig, files: int = 3, caller: Caller = CALLER) -> str:
    """A store of so many files, and then the model is another."""
    rig.retrieval.embedder = "e1"
    tenant = caller.tenant
    store = await rig.store(*[await rig.file(tenant=tenant) for _ in range(files)], caller=caller)
    await rig.arrived()
    rig.retrieval.embedder = "e2"
    rig.retrieval.embedded.clear()
    return store


async def search(rig: StoresRig, store: str, tenant: str = "acme") -> None:
    """And what it begins has begun."""
    await rig.stores.searched(tenant, [store])
    await asyncio.gather(*rig.reindexing._beginning.values())


async def how(rig: StoresRig, store: str) -> dict[str, Any] | None:
    return (await rig.records.store("acme", store)).reindexing(rig.retrieval.embedder)


async def counts(rig: StoresRig, store: str) -> tuple[str, int, int, int]:
    told = await how(rig, store)
    assert told is not None
    of = told["file_counts"]
    assert of["total"] == of["in_progress"] + of["completed"] + of["failed"]
    return told["status"], of["in_progress"], of["completed"], of["failed"]


async def by_id(rig: StoresRig, store: str) -> dict[str, AttachedFile]:
    return {file.id: file for file in await rig.records.all_files("acme", store)}


async def test_a_search_begins_it_and_each_file_is_embedded_once(rig: StoresRig) -> None:
    store = await aged(rig)
    assert await counts(rig, store) == ("pending", 3, 0, 0)
    await search(rig, store)
    await rig.arrived()
    files = await by_id(rig, store)
    assert sorted(rig.retrieval.embedded) == sorted(("e2", id) for id in files)
    assert await counts(rig, store) == ("completed", 0, 3, 0)
    assert {file.state for file in files.values()} == {"completed"}, "and found all the time"
    for _ in range(3):
        await search(rig, store)
    await rig.arrived()
    assert len(rig.retrieval.embedded) == 3
    charged = [run.who for run in rig.metered.settled if run.who["route"] == "reindex"]
    assert [(who["tenant"], who["user"], who["tier"]) for who in charged] == [
        ("acme", store, "low")
    ] * 3, "at the tenant's cost, as the store's"


async def test_more_files_than_one_look_takes_are_done_the_latest_first(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reindexing, "_SOME", 2)
    store = await aged(rig, 5)
    for age, id in enumerate(await by_id(rig, store)):
        await rig.records.change_file(
            "acme",
            store,
            id,
            lambda file, age=age: file.model_copy(update={"created_at": 1000 - age}),  # type: ignore[misc]
        )
    files = sorted((await by_id(rig, store)).values(), key=lambda file: -file.created_at)
    await search(rig, store)
    await rig.arrived()
    assert rig.retrieval.embedded == [("e2", file.id) for file in files]
    assert await counts(rig, store) == ("completed", 0, 5, 0)


async def test_to_cancel_what_has_nothing_to_do_changes_nothing(rig: StoresRig) -> None:
    store = await rig.store(await rig.file())
    await rig.arrived()
    await rig.reindexing.cancel("acme", store)
    assert await how(rig, store) is None
    rig.retrieval.embedder = "e2"
    await search(rig, store)
    await rig.arrived()
    await rig.reindexing.cancel("acme", store)
    assert await counts(rig, store) == ("completed", 0, 1, 0)
    (id,) = await by_id(rig, store)
    await rig.records.change_file(  # as a gateway of an earlier version does
        "acme", store, id, lambda file: file.model_copy(update={"embedder": ""})
    )
    await search(rig, store)
    await rig.arrived()
    assert await counts(rig, store) == ("completed", 0, 1, 0), "it began by itself again"


async def test_searches_of_a_store_with_nothing_to_do_begin_nothing(rig: StoresRig) -> None:
    store = await rig.store(await rig.file())
    await rig.arrived()
    await search(rig, store)
    assert await rig.jobs.queues.size(rig.reindexing._queue("acme")) == 0
    assert await how(rig, store) is None
    rig.retrieval.embedder = ""  # replicas have several, or none has told
    await search(rig, store)
    assert await rig.jobs.queues.size(rig.reindexing._queue("acme")) == 0
    with pytest.raises(PenstockError, match="not known") as refused:
        await rig.reindexing.begin("acme", store, asked=True)
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE


async def test_to_ask_again_and_again_makes_no_work(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time was a job more, in Redis, for nothing."""
    store = await aged(rig)
    rig.retrieval.gate.clear()
    runs, run = [], rig.reindexing.run

    async def noted(job: Claimed) -> None:
        runs.append(job.body)
        await run(job)

    monkeypatch.setattr(rig.reindexing, "run", noted)
    for _ in range(3):
        await rig.reindexing.begin("acme", store, asked=True)
    rig.retrieval.gate.set()
    await rig.arrived()
    for _ in range(3):
        await rig.reindexing.begin("acme", store, asked=True)
    await rig.arrived()
    assert len({Round.model_validate_json(body).token for body in runs}) == 1
    assert len(rig.retrieval.embedded) == 3


async def test_files_of_before_anybody_noted_their_embedder_are_looked_at_once(
    rig: StoresRig,
) -> None:
    """As records of an earlier version are: no count of embedders, none in the record."""
    rig.retrieval.note = "was read as text"
    store = await rig.store(*[await rig.file() for _ in range(2)])
    await rig.arrived()
    for id in await by_id(rig, store):
        await rig.records.change_file(
            "acme", store, id, lambda file: file.model_copy(update={"embedder": ""})
        )
    await rig.redis.delete(rig.records._key("acme", "store", store, "embedders"))
    rig.retrieval.embedded.clear()
    await search(rig, store)
    await rig.arrived()
    assert rig.retrieval.embedded == [], "retrieval has them by the present model"
    looked_at = [(file.embedder, file.note) for file in (await by_id(rig, store)).values()]
    assert looked_at == [("e1", "was read as text")] * 2
    begun = rig.retrieval.begun
    await search(rig, store)
    await rig.arrived()
    assert rig.retrieval.begun == begun


async def test_a_file_that_cannot_be_is_noted_and_the_others_are(rig: StoresRig) -> None:
    store = await aged(rig)
    bad, *_ = await by_id(rig, store)
    rig.retrieval.failures[bad] = invalid("has no text", "file", stage="retrieval")
    await search(rig, store)
    await rig.arrived()
    assert await counts(rig, store) == ("completed", 0, 2, 1)
    file = (await by_id(rig, store))[bad]
    assert (file.state, file.embedder) == ("completed", "e1")
    note = "the file is found by its words alone, as it could not be indexed anew: has no text"
    assert file.as_json()["penstock"]["note"] == note
    begun = rig.retrieval.begun
    await search(rig, store)
    await rig.arrived()
    assert rig.retrieval.begun == begun, "it is not tried for ever"
    rig.retrieval.failures.clear()
    await rig.attach(store, await rig.files.get("acme", bad))
    await rig.arrived()
    assert await counts(rig, store) == ("completed", 0, 3, 0)


async def test_what_one_model_refused_is_the_former_s_again_when_that_comes_back(
    rig: StoresRig,
) -> None:
    store = await aged(rig)
    bad, *_ = await by_id(rig, store)
    rig.retrieval.failures[bad] = invalid("has no text", "file", stage="retrieval")
    await search(rig, store)
    await rig.arrived()
    rig.retrieval.embedder = "e1"  # which has that file, and has lost the others
    assert await counts(rig, store) == ("pending", 2, 1, 0)
    rig.retrieval.failures.clear()
    await search(rig, store)
    await rig.arrived()
    assert await counts(rig, store) == ("completed", 0, 3, 0)
    assert (await rig.stores.searched("acme", [store])).aged == (), "nothing is left to be begun"
    await rig.stores.detach(CALLER, store, bad)
    assert await counts(rig, store) == ("completed", 0, 2, 0)


async def test_a_file_that_retrieval_is_lost_over_is_tried_three_times(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reindexing, "_AGAIN_S", 0.01)
    store = await aged(rig, 2)
    bad, _ = await by_id(rig, store)
    rig.retrieval.failures[bad] = unavailable("lost", stage="retrieval", reason="index_lost")
    begun = rig.retrieval.begun
    await search(rig, store)
    await rig.arrived()
    assert rig.retrieval.begun == begun + 3 + 1
    assert await counts(rig, store) == ("completed", 0, 1, 1)


@pytest.mark.parametrize("comes_on", [True, False])
async def test_a_file_that_takes_long_is_gone_on_with_while_it_comes_on(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, comes_on: bool
) -> None:
    monkeypatch.setattr(reindexing, "_AGAIN_S", 0.01)
    store, index, times = await aged(rig, 1), rig.retrieval.index, 0

    async def slow(request: Any, span: Any, tell: Any, embed: Any) -> Any:
        nonlocal times
        times += 1
        if times == 6:
            return await index(request, span, tell)
        await tell(IndexProgress(done=64 * times if comes_on else 64, chunks=640))
        raise unavailable("index took longer than 1800 s", stage="retrieval", reason="timeout")

    monkeypatch.setattr(rig.retrieval, "index", slow)
    await search(rig, store)
    await rig.arrived()
    done, refused = (1, 0) if comes_on else (0, 1)
    assert await counts(rig, store) == ("completed", 0, done, refused)
    assert times == (6 if comes_on else 4)
    assert (await by_id(rig, store)).popitem()[1].progress is None, "it is found all the time"


AWAY = unavailable("the store is away", stage="retrieval", reason="store_away", retry_after_s=0.01)
FULL = PenstockError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much waits", stage="retrieval")


@pytest.mark.parametrize("failure", [AWAY, FULL], ids=["away", "full"])
async def test_while_something_is_away_it_waits_and_says_so(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, failure: PenstockError
) -> None:
    monkeypatch.setattr(reindexing, "_AWAY_S", 0.01)
    store = await aged(rig)
    rig.retrieval.failure = failure
    begun = rig.retrieval.begun
    await search(rig, store)
    await until(lambda: rig.retrieval.begun > begun + 4, 10)
    told = await how(rig, store)
    assert told is not None
    assert (told["status"], told["reason"]) == ("in_progress", failure.message)
    rig.retrieval.failure = None
    await rig.arrived()
    assert await counts(rig, store) == ("completed", 0, 3, 0)
    assert len(rig.retrieval.embedded) == 3


async def test_what_a_killed_gateway_had_is_gone_on_with_by_another(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed: it says nothing more, and its lease ends."""
    store = await aged(rig)
    rig.retrieval.gate.clear()
    await search(rig, store)
    await until(lambda: rig.retrieval.indexing == 1, 10)
    begun = rig.retrieval.begun
    monkeypatch.setattr(rig.jobs.queues, "release", lambda job: asyncio.sleep(0))
    await rig.jobs.stop()
    rig.retrieval.gate.set()
    async with rig.another() as other:
        other.jobs.queues._lease_ms = 1
        await other.arrived()
    assert rig.retrieval.begun == begun + 3
    assert sorted(rig.retrieval.embedded) == sorted(("e2", id) for id in await by_id(rig, store))
    assert await counts(rig, store) == ("completed", 0, 3, 0)


async def test_what_was_embedded_but_not_noted_is_not_embedded_twice(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Redis is away between the two."""
    store = await aged(rig, 1)
    change, fails = rig.records.change_file, [ConnectionError()]

    async def away(*args: Any) -> AttachedFile:
        if fails:
            raise fails.pop()
        return await change(*args)

    monkeypatch.setattr(rig.records, "change_file", away)
    await search(rig, store)
    await rig.arrived()
    assert len(rig.retrieval.embedded) == 1
    assert await counts(rig, store) == ("completed", 0, 1, 0)


async def test_a_cancelled_one_ends_behind_its_file_and_goes_on_when_asked(rig: StoresRig) -> None:
    store = await aged(rig)
    rig.retrieval.gate.clear()
    await search(rig, store)
    await until(lambda: rig.retrieval.indexing == 1, 10)
    await rig.reindexing.cancel("acme", store)
    assert await counts(rig, store) == ("cancelled", 3, 0, 0)
    rig.retrieval.gate.set()
    await rig.arrived()
    assert await counts(rig, store) == ("cancelled", 2, 1, 0)
    await search(rig, store)
    await rig.arrived()
    assert await counts(rig, store) == ("cancelled", 2, 1, 0), "not by itself"
    await rig.reindexing.begin("acme", store, asked=True)
    await rig.arrived()
    assert await counts(rig, store) == ("completed", 0, 3, 0)
    assert len(rig.retrieval.embedded) == 3


async def test_a_model_that_changes_again_meanwhile(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reindexing, "_OTHERS_S", 0.01)
    store = await aged(rig)
    rig.retrieval.gate.clear()
    await search(rig, store)
    await until(lambda: rig.retrieval.indexing == 1, 10)
    rig.retrieval.embedder = "e3"
    await search(rig, store)
    rig.retrieval.gate.set()
    await rig.arrived()
    await search(rig, store)
    await rig.arrived()
    assert {file.embedder for file in (await by_id(rig, store)).values()} == {"e3"}
    rig.retrieval.embedder = "e2"  # back
    await search(rig, store)
    await rig.arrived()
    assert {file.embedder for file in (await by_id(rig, store)).values()} == {"e2"}


async def test_replicas_of_two_models_are_waited_for(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reindexing, "_OTHERS_S", 0.01)
    store = await aged(rig, 1)
    rig.retrieval.by.clear()
    await rig.reindexing.begin("acme", store, asked=True)
    rig.retrieval.embedder = "e1"  # who takes the call is of the one before
    monkeypatch.setattr(type(rig.reindexing), "embedders", property(lambda _: {"": "e2"}))
    begun = rig.retrieval.begun
    await until(lambda: rig.retrieval.begun > begun + 2, 10)
    assert (await by_id(rig, store)).popitem()[1].embedder == "e1"
    rig.retrieval.embedder = "e2"
    await rig.arrived()
    assert await counts(rig, store) == ("completed", 0, 1, 0)


@pytest.mark.parametrize("what", ["detach", "delete", "another"])
async def test_of_a_file_that_is_taken_out_meanwhile_nothing_stays(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = await aged(rig, 1)
    rig.retrieval.gate.clear()
    await search(rig, store)
    await until(lambda: rig.retrieval.indexing == 1, 10)
    (id,) = await by_id(rig, store)
    if what == "delete":
        await rig.stores.delete(CALLER, store)
    elif what == "detach":
        await rig.stores.detach(CALLER, store, id)
        assert rig.retrieval.cancelled == 1
    else:
        async with rig.another() as other:
            await other.stores.detach(CALLER, store, id)
    rig.retrieval.gate.set()
    await rig.arrived()
    assert rig.retrieval.documents == {}


async def test_of_a_file_that_a_killed_gateway_was_amid_when_it_was_taken_out_nothing_stays(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await aged(rig, 1)
    rig.retrieval.gate.clear()
    await search(rig, store)
    await until(lambda: rig.retrieval.indexing == 1, 10)
    monkeypatch.setattr(rig.jobs.queues, "release", lambda job: asyncio.sleep(0))
    await rig.jobs.stop()
    (id,) = await by_id(rig, store)
    async with rig.another() as other:
        await other.stores.detach(CALLER, store, id)
        place, request = ("acme", store, id), rig.retrieval.last
        rig.retrieval.documents[place] = request  # what it had sent arrives late
        other.jobs.queues._lease_ms = 1
        await other.arrived()
    assert rig.retrieval.documents == {}


async def test_a_file_attached_anew_meanwhile_is_left_to_that(rig: StoresRig) -> None:
    store = await aged(rig, 1)
    rig.retrieval.gate.clear()
    await search(rig, store)
    await until(lambda: rig.retrieval.indexing == 1, 10)
    (id,) = await by_id(rig, store)
    async with rig.another() as other:
        again = await other.attach(store, await rig.files.get("acme", id))
        await until(lambda: rig.retrieval.indexing == 2, 10)
        rig.retrieval.gate.set()
        await rig.arrived()
    file = (await by_id(rig, store))[id]
    assert (file.attachment, file.state, file.embedder) == (again.attachment, "completed", "e2")
    assert list(rig.retrieval.documents) == [("acme", store, id)]


async def test_attributes_that_change_meanwhile_are_found(rig: StoresRig) -> None:
    store = await aged(rig, 1)
    rig.retrieval.gate.clear()
    await search(rig, store)
    await until(lambda: rig.retrieval.indexing == 1, 10)
    (id,) = await by_id(rig, store)
    await rig.stores.attributes.change(CALLER, store, id, {"year": 2026})
    rig.retrieval.gate.set()
    await rig.arrived()
    (document,) = rig.retrieval.documents.values()
    assert document.attributes["year"].number == 2026


async def test_a_tenant_that_may_not_is_told_and_it_begins_again_when_asked(
    rig: StoresRig,
) -> None:
    store = await aged(rig, 1)
    who = rig.who.pop("acme")
    await search(rig, store)
    await rig.arrived()
    told = await how(rig, store)
    assert told is not None
    assert (told["status"], told["reason"]) == ("failed", "The tenant is suspended.")
    rig.who["acme"] = who
    await search(rig, store)
    await rig.arrived()
    assert await counts(rig, store) == ("failed", 1, 0, 0), "not with each search"
    await rig.reindexing.begin("acme", store, asked=True)
    await rig.arrived()
    assert await counts(rig, store) == ("completed", 0, 1, 0)


async def test_tenants_are_apart(rig: StoresRig) -> None:
    mine, theirs = await aged(rig), await aged(rig, 2, RIVAL)
    for ask in (rig.reindexing.cancel, rig.reindexing.begin):
        more = {"asked": True} if ask == rig.reindexing.begin else {}
        with pytest.raises(PenstockError) as refused:
            await ask("acme", theirs, **more)
        assert refused.value.reason == "not_found"
    await search(rig, mine)
    await rig.arrived()
    assert {place[0] for place, by in rig.retrieval.by.items() if by == "e2"} == {"acme"}
    await search(rig, theirs, "rival")
    await rig.arrived()
    places = [place for place, by in rig.retrieval.by.items() if by == "e2"]
    assert len([place for place in places if place[:2] == ("rival", theirs)]) == 2
    assert len(places) == 5


async def test_searches_at_several_gateways_begin_it_once(rig: StoresRig) -> None:
    store = await aged(rig)
    async with rig.another() as other:
        await asyncio.gather(*(search(one, store) for one in (rig, other) * 3))
        await rig.arrived()
    assert len(rig.retrieval.embedded) == 3


async def test_one_that_gateways_died_of_is_told_as_failed(rig: StoresRig) -> None:
    store = await aged(rig, 1)
    rig.retrieval.gate.clear()
    await search(rig, store)
    await until(lambda: rig.retrieval.indexing == 1, 10)
    (job,) = [job for job in rig.jobs._own.values() if job.queue.kind == "reindex"]
    await rig.reindexing.give_up(job, "it was begun 3 times, and never ended")
    told = await how(rig, store)
    assert told is not None
    assert (told["status"], told["reason"]) == ("failed", "it was begun 3 times, and never ended")
    rig.retrieval.gate.set()
    assert jobs_module.MAX_CLAIMS == 4


# ---- a store that has chosen its embedding model -------------------------------------------------


async def test_a_store_s_files_are_embedded_by_its_own_model_and_so_charged(rig: StoresRig) -> None:
    rig.retrieval.further = {"wide": "w1"}
    store = await rig.store(await rig.file(), embedding_model="wide")
    plain = await rig.store(await rig.file())
    await rig.arrived()
    (id,) = await by_id(rig, store)
    assert sorted(by for by, _ in rig.retrieval.embedded) == ["e1", "w1"]
    assert ("w1", id) in rig.retrieval.embedded
    who = {run.who["model"] for run in rig.metered.settled}
    assert who == {"wide", "tiny-embed"}
    unready = await rig.stores.searched("acme", [store, plain])
    assert (unready.models, unready.aged) == ({store: "wide"}, ()), "nothing is due in either"
    rig.retrieval.embedder = "e2"
    unready = await rig.stores.searched("acme", [store, plain])
    assert unready.aged == (plain,), "the other model is as it was"
    await asyncio.gather(*rig.reindexing._beginning.values())
    await rig.arrived()


async def test_another_model_for_a_store_has_it_indexed_anew(rig: StoresRig) -> None:
    rig.retrieval.further = {"wide": "w1"}
    store = await rig.store(await rig.file(), await rig.file())
    await rig.arrived()
    rig.retrieval.embedded.clear()

    async def choose(model: str) -> None:
        about = {"embedding_model": model}
        await rig.stores.update("acme", store, lambda record: record.model_copy(update=about))
        await asyncio.gather(*rig.reindexing._beginning.values())
        await rig.arrived()

    await choose("wide")
    assert [by for by, _ in rig.retrieval.embedded] == ["w1", "w1"]
    assert {file.embedder for file in (await by_id(rig, store)).values()} == {"w1"}
    told = (await rig.records.store("acme", store)).reindexing("w1")
    assert told is not None
    assert told["status"] == "completed"
    charged = [run.who["model"] for run in rig.metered.settled if run.who["route"] == "reindex"]
    assert charged == ["wide", "wide"]
    await choose("wide")
    assert len(rig.retrieval.embedded) == 2, "it is that model's"
    await choose("")
    assert [by for by, _ in rig.retrieval.embedded[2:]] == ["e1", "e1"]


async def test_a_choice_that_is_taken_back_ends_what_the_first_began(rig: StoresRig) -> None:
    rig.retrieval.further = {"wide": "w1"}
    store = await rig.store(await rig.file(), await rig.file())
    await rig.arrived()
    rig.retrieval.embedded.clear()
    rig.retrieval.gate.clear()
    begun = rig.retrieval.begun
    for model in ("wide", ""):
        about = {"embedding_model": model}
        await rig.stores.update("acme", store, lambda record, a=about: record.model_copy(update=a))  # type: ignore[misc]
        await asyncio.gather(*rig.reindexing._beginning.values())
        await until(lambda: rig.retrieval.begun > begun, 10)
    rig.retrieval.gate.set()
    await rig.arrived()
    assert [by for by, _ in rig.retrieval.embedded].count("w1") == 1, "the file that was under way"
    await search(rig, store)
    await rig.arrived()
    assert {file.embedder for file in (await by_id(rig, store)).values()} == {"e1"}
