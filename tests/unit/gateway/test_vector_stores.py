"""Vector stores and the files in them: what is made, told, refused, and taken out again."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from services.common.errors import PenstockError, invalid, unavailable
from services.common.redis import RedisAway, connect
from services.gateway.batches.batches import BATCH_KIND
from services.gateway.batches.lines import LINE
from services.gateway.ids import FILE, STORE
from services.gateway.jobs import jobs as jobs_module
from services.gateway.jobs.queue import KINDS, Queue
from services.gateway.stores.indexing import indexing
from services.gateway.stores.vector_stores import removals
from services.gateway.stores.vector_stores.removals import Removal
from services.gateway.stores.vector_stores.store_files import Unready
from services.gateway.stores.vector_stores.vector_stores import Attach
from tests.support.stores_rig import CALLER, RIVAL, THEIRS, WHO, StoresRig
from tests.support.waiting import until

AWAY = unavailable("retrieval is away", stage="retrieval", reason="no_replica")


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[StoresRig]:
    redis = connect(redis_url)
    async with StoresRig(redis, namespace).running() as rig:
        yield rig
    await redis.aclose()


def test_each_kind_of_jobs_is_told_to_the_operator(rig: StoresRig) -> None:
    assert {kind.name for kind in rig.stores.kinds} | {LINE, BATCH_KIND} == KINDS.keys()


async def test_a_deleted_store_is_forgotten_by_its_files(rig: StoresRig) -> None:
    file = await rig.file()
    gone, kept = await rig.store(file), await rig.store(file)
    assert await rig.files.stores_of("acme", file.id) == {gone, kept}
    await rig.stores.delete(CALLER, gone)
    assert await rig.files.stores_of("acme", file.id) == {kept}


async def test_a_deleted_file_leaves_no_key(rig: StoresRig) -> None:
    file = await rig.file()
    await rig.store(file)
    await rig.arrived()
    await rig.stores.delete_file(CALLER, file.id)
    assert await rig.files.stores_of("acme", file.id) == set()
    assert [key async for key in rig.redis.scan_iter(f"*{file.id}*")] == []


async def test_only_what_is_searchable_counts_as_used(rig: StoresRig) -> None:
    store = await rig.store(await rig.file("12345"))
    await rig.arrived()
    rig.retrieval.failure = invalid("no good", "text", stage="retrieval")
    await rig.attach(store, (await rig.file("123")))
    await rig.arrived()
    told = await rig.told(store)
    assert told["usage_bytes"] == 5
    assert (told["file_counts"]["completed"], told["file_counts"]["failed"]) == (1, 1)


async def not_found(call: object) -> PenstockError:
    with pytest.raises(PenstockError) as refused:
        await call  # type: ignore[misc]
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.NOT_FOUND, "not_found")
    assert refused.value.stage == "gateway"
    return refused.value


async def test_a_store_is_told_whole(rig: StoresRig) -> None:
    before = int(time.time())
    file = await rig.file("12345")
    store = await rig.store(file, name="guide", metadata={"k": "v"}, description="of the port")
    made = await rig.told(store)
    assert (made["status"], made["file_counts"]["in_progress"]) == ("in_progress", 1)
    await rig.arrived()
    told = await rig.told(store)
    assert before <= told.pop("created_at") == told.pop("last_active_at") <= time.time()
    assert told == {
        "id": made["id"],
        "object": "vector_store",
        "name": "guide",
        "description": "of the port",
        "cache": None,
        "metadata": {"k": "v"},
        "status": "completed",
        "file_counts": {
            "in_progress": 0,
            "completed": 1,
            "failed": 0,
            "cancelled": 0,
            "total": 1,
        },
        "usage_bytes": 5,
        "expires_after": None,
        "expires_at": None,
        "embedding_model": None,  # not known yet
        "reindexing": None,
    }


async def test_of_a_store_with_an_unknown_file_nothing_is_made(rig: StoresRig) -> None:
    good, rivals = await rig.file(), await rig.file(tenant="rival")
    for missing in (FILE.new(), rivals.id, "odd"):
        error = await not_found(rig.store(good, good.model_copy(update={"id": missing})))
        assert error.param == "file_ids[1]"
    assert await rig.records.ids("acme") == []
    assert rig.retrieval.begun == 0


async def test_a_tenant_has_so_many_stores_and_no_more(rig: StoresRig) -> None:
    made = [await rig.store() for _ in range(10)]
    with pytest.raises(PenstockError, match="may have 10 vector stores") as refused:
        await rig.store()
    assert refused.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.reason == "too_many_vector_stores"
    await rig.store(caller=RIVAL)
    await rig.stores.delete(CALLER, made[0])
    await rig.store()


async def test_stores_made_at_once_do_not_pass_the_limit_together(rig: StoresRig) -> None:
    made = await asyncio.gather(*(rig.store() for _ in range(14)), return_exceptions=True)
    refused = [one for one in made if isinstance(one, PenstockError)]
    assert [error.reason for error in refused] == ["too_many_vector_stores"] * 4
    assert set(await rig.records.ids("acme")) == {one for one in made if isinstance(one, str)}


async def test_a_tenant_has_so_many_files_in_its_stores_and_no_more(rig: StoresRig) -> None:
    """Twenty: a file counts in each store that has it, and a store that is gone gives them back."""
    files = [await rig.file() for _ in range(7)]
    stores = [await rig.store(*files) for _ in range(2)]
    with pytest.raises(PenstockError) as none:
        await rig.store(*files)
    assert none.value.reason == "too_many_files_in_vector_stores"
    assert none.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "20 files in vector stores" in none.value.message
    assert sorted(await rig.records.ids("acme")) == sorted(stores), "no empty one is left"
    last = await rig.store(*files[:5])
    told = await asyncio.gather(
        *(rig.attach(last, file) for file in files[5:]), return_exceptions=True
    )
    assert [isinstance(one, PenstockError) for one in told].count(True) == 1
    wanted = [Attach(file.id, "file_ids[0]") for file in files]
    with pytest.raises(PenstockError, match="20 files"):
        await rig.stores.attach_all(WHO, CALLER, last, wanted)
    assert await rig.files.stores_of("acme", files[6].id) <= {*stores, last}
    await rig.attach(last, files[0])  # in its own place
    await rig.store(await rig.file(tenant="rival"), caller=RIVAL)
    await rig.stores.delete(CALLER, stores[0])
    await rig.stores.attach_all(WHO, CALLER, last, wanted)


async def test_of_a_store_whose_files_have_no_room_nothing_is_made(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_QUEUE", 2)
    files = [await rig.file() for _ in range(3)]
    with pytest.raises(PenstockError) as refused:
        await rig.store(*files)
    assert refused.value.reason == "index_queue_full"
    assert await rig.records.ids("acme") == []
    assert rig.retrieval.begun == 0
    assert [await rig.files.stores_of("acme", file.id) for file in files] == [set()] * 3
    await rig.store(*files[:2])


async def test_a_store_deleted_while_they_are_listed_is_left_out(rig: StoresRig) -> None:
    kept, gone, rivals = await rig.store(), await rig.store(), await rig.store(caller=RIVAL)
    assert set(await rig.records.ids("acme")) == {kept, gone}
    await rig.stores.delete(CALLER, gone)
    some = await rig.records.some("acme", (gone, rivals, kept))
    assert [store.record.id for store in some] == [kept]


async def test_a_deleted_store_leaves_nothing(rig: StoresRig) -> None:
    files = [await rig.file(), await rig.file()]
    gone, kept = await rig.store(*files), await rig.store(*files)
    await rig.arrived()
    await rig.stores.delete(CALLER, gone)
    assert rig.retrieval.removed == [("acme", gone, "")]
    assert {store for _, store, _ in rig.retrieval.documents} == {kept}
    assert await rig.records.ids("acme") == [kept]
    assert [key async for key in rig.redis.scan_iter(f"*{gone}*")] == []
    await not_found(rig.records.store("acme", gone))
    await not_found(rig.stores.delete(CALLER, gone))
    assert await rig.statuses(kept) == ["completed"] * 2


@pytest.mark.parametrize("what", ["delete", "detach", "forget"])
async def test_what_retrieval_did_not_take_out_stays_and_can_be_taken_out_again(
    rig: StoresRig, what: str
) -> None:
    file = await rig.file()
    store = await rig.store(file)
    await rig.arrived()

    async def take_out() -> None:
        if what == "delete":
            await rig.stores.delete(CALLER, store)
        elif what == "detach":
            await rig.stores.detach(CALLER, store, file.id)
        else:
            await rig.stores.delete_file(CALLER, file.id)

    rig.retrieval.remove_failures = [AWAY]
    with pytest.raises(PenstockError) as failed:
        await take_out()
    assert failed.value.reason == "no_replica"
    assert await rig.records.ids("acme") == [store]
    assert await rig.statuses(store) == ["completed"]
    assert await rig.files.stores_of("acme", file.id) == {store}
    await take_out()
    assert rig.retrieval.documents == {}
    assert await rig.records.all_files("acme", store) == []


async def test_a_file_taken_out_of_one_store_stays_in_the_other(rig: StoresRig) -> None:
    file, other = await rig.file(), await rig.file()
    first, second = await rig.store(file, other), await rig.store(file)
    await rig.arrived()
    await rig.stores.detach(CALLER, first, file.id)
    assert set(rig.retrieval.documents) == {
        ("acme", first, other.id),
        ("acme", second, file.id),
    }
    assert [held.id for held in await rig.records.all_files("acme", first)] == [other.id]
    assert await rig.files.stores_of("acme", file.id) == {second}
    await not_found(rig.records.file("acme", first, file.id))
    await not_found(rig.stores.detach(CALLER, first, file.id))
    assert (await rig.records.file("acme", second, file.id)).state == "completed"


async def test_a_deleted_file_is_taken_out_of_every_store_and_no_other_is(rig: StoresRig) -> None:
    file, other = await rig.file(), await rig.file()
    stores = [await rig.store(file, other) for _ in range(3)]
    await rig.arrived()
    await rig.stores.delete_file(CALLER, file.id)
    assert set(rig.retrieval.documents) == {("acme", store, other.id) for store in stores}
    for store in stores:
        assert [held.id for held in await rig.records.all_files("acme", store)] == [other.id]


async def test_another_tenants_stores_and_files_cannot_be_reached(rig: StoresRig) -> None:
    file, theirs = await rig.file(), await rig.file(tenant="rival")
    store, rivals = await rig.store(file), await rig.store(theirs, caller=RIVAL)
    await rig.arrived()
    documents = dict(rig.retrieval.documents)
    for call in (
        rig.records.store("rival", store),
        rig.stores.delete(RIVAL, store),
        rig.stores.require("rival", [rivals, store]),
        rig.records.searched("rival", [store]),
        rig.stores.attach(THEIRS, RIVAL, store, Attach(theirs.id, "file_id")),
        rig.stores.attach(THEIRS, RIVAL, rivals, Attach(file.id, "file_id")),
        rig.records.file("rival", store, file.id),
        rig.stores.detach(RIVAL, store, file.id),
        rig.files.get("rival", file.id),
        rig.files.content("rival", file.id),
        rig.stores.delete_file(RIVAL, file.id),
    ):
        await not_found(call)
    assert await rig.records.all_files("rival", store) == []
    assert await rig.files.stores_of("rival", file.id) == set()
    assert rig.retrieval.documents == documents
    assert await rig.files.content("acme", file.id) == b"text"
    assert await rig.statuses(store) == ["completed"]


async def test_what_is_attached_to_nothing_or_is_nothing_is_named(rig: StoresRig) -> None:
    store, file = await rig.store(), await rig.file()
    assert (
        await not_found(rig.stores.attach(WHO, CALLER, store, Attach(FILE.new(), "file_id")))
    ).param == "file_id"
    assert (
        "vector store"
        in (
            await not_found(rig.stores.attach(WHO, CALLER, STORE.new(), Attach(file.id, "file_id")))
        ).message
    )
    await not_found(rig.records.searched("acme", [STORE.new()]))
    assert await rig.records.searched("acme", [store]) == Unready([], 0)


async def test_a_search_looks_at_a_few_of_many_files_that_it_does_not_find(rig: StoresRig) -> None:
    """All of ten thousand were put in order: 12 ms of Redis, which all tenants share."""
    rig.retrieval.failure = invalid("it is broken", "file")
    store = await rig.store(*[await rig.file() for _ in range(7)])
    await rig.arrived()
    unready = rig.records._key("acme", "store", store, "unready")
    few = await rig.records.searched("acme", [store])
    assert (len(few.files), few.total) == (5, 7)

    async def listed() -> int:
        stats = await rig.redis.info("commandstats")
        return int(stats["cmdstat_smembers"]["calls"])

    await rig.redis.sadd(unready, *(f"gone{n}" for n in range(100)))
    before = await listed()
    assert (await rig.records.searched("acme", [store])).total == 107
    assert await listed() == before


async def test_stores_to_search_must_be_the_tenants_each_of_them(rig: StoresRig) -> None:
    own, also = await rig.store(), await rig.store()
    assert await rig.stores.require("acme", []) == Unready()
    assert await rig.stores.require("acme", [own, also]) == Unready([], 0)
    for missing in (STORE.new(), "odd"):
        error = await not_found(rig.stores.require("acme", [own, missing, also]))
        assert error.param == "tools[0].vector_store_ids[1]"


async def test_while_redis_is_away_stores_pass_but_odd_ids(rig: StoresRig) -> None:
    away = StoresRig(connect("redis://127.0.0.1:1/0"), rig.namespace)
    try:
        assert await away.stores.require("acme", [STORE.new()]) == Unready()
        assert await away.stores.require("acme", []) == Unready()
        await not_found(away.stores.require("acme", [STORE.new(), "odd"]))
        with pytest.raises(RedisAway):
            await away.records.store("acme", STORE.new())
    finally:
        await away.redis.aclose()


@pytest.mark.parametrize("what", ["delete", "detach", "file"])
async def test_what_another_gateway_indexes_behind_its_removal_is_removed_too(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    rig.retrieval.gate.clear()
    file = await rig.file()
    store = await rig.store(file)
    await until(lambda: rig.retrieval.indexing == 1, 10)
    remove = rig.retrieval.remove

    async def then_it_is_indexed(*args: Any) -> None:
        await remove(*args)
        rig.retrieval.gate.set()
        await rig.arrived()

    monkeypatch.setattr(rig.retrieval, "remove", then_it_is_indexed)
    async with rig.another() as other:
        if what == "delete":
            await other.stores.delete(CALLER, store)
        elif what == "detach":
            await other.stores.detach(CALLER, store, file.id)
        else:
            await other.stores.delete_file(CALLER, file.id)
    assert rig.retrieval.begun == 1
    assert rig.retrieval.documents == {}


class Killed(BaseException):
    """As far as Redis can tell, a gateway's end."""


@pytest.mark.parametrize("what", ["delete", "detach", "file"])
@pytest.mark.parametrize("after", ["revise", "remove", "drop", "delete", "note_store"])
async def test_what_a_killed_gateway_was_taking_out_is_taken_out(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, what: str, after: str
) -> None:
    monkeypatch.setattr(jobs_module, "_PROMISED_S", 0.3)
    file, other = await rig.file(), await rig.file()
    store = await rig.store(file, other)
    await rig.arrived()
    of: Any = {"remove": rig.retrieval, "note_store": rig.files}.get(after, rig.records)
    step, killed = getattr(of, after), [False]

    async def killed_once(*args: Any, **more: Any) -> Any:
        told = await step(*args, **more)
        if not killed[0]:
            killed[0] = True
            raise Killed
        return told

    monkeypatch.setattr(of, after, killed_once)
    takes_out = {
        "delete": lambda: rig.stores.delete(CALLER, store),
        "detach": lambda: rig.stores.detach(CALLER, store, file.id),
        "file": lambda: rig.stores.delete_file(CALLER, file.id),
    }[what]
    with suppress(Killed):
        await takes_out()

    async def over() -> bool:
        return await rig.jobs.queues.counts("remove") == (0, 0)

    await until(over, 10, "the removal is a job's")
    assert ("acme", store, file.id) not in rig.retrieval.documents
    left = [held.id for held in await rig.records.all_files("acme", store)]
    assert left == ([] if what == "delete" else [other.id])
    assert await rig.records.ids("acme") == ([] if what == "delete" else [store])
    if what != "file":
        await rig.stores.delete_file(CALLER, file.id)
    assert [key async for key in rig.redis.scan_iter(f"*{file.id}*")] == []


@pytest.mark.parametrize("what", ["store", "in a store", "file", "file in a store"])
async def test_of_several_who_delete_the_same_one_has_deleted_it(rig: StoresRig, what: str) -> None:
    file = await rig.file()
    store = await rig.store(*([file] if what != "file" else []))
    await rig.arrived()
    calls = {
        "store": lambda: rig.stores.delete(CALLER, store),
        "in a store": lambda: rig.stores.detach(CALLER, store, file.id),
    }
    call = calls.get(what, lambda: rig.stores.delete_file(CALLER, file.id))
    told = await asyncio.gather(*(call() for _ in range(4)), return_exceptions=True)
    failures = [one for one in told if one is not None]
    assert len(failures) == 3
    assert {getattr(one, "reason", one) for one in failures} == {"not_found"}
    assert await rig.jobs.queues.counts("remove") == (0, 0), "nothing is left to do"


async def test_what_is_taken_out_while_it_is_attached_anew_was_taken_out(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await rig.file()
    store = await rig.store(file)
    await rig.arrived()
    remove = rig.indexing.remove_file

    async def beside(*place: Any) -> bool:
        await rig.attach(store, file)
        return await remove(*place)

    monkeypatch.setattr(rig.indexing, "remove_file", beside)
    await rig.stores.detach(CALLER, store, file.id)
    await rig.arrived()
    assert await rig.statuses(store) == ["completed"]


async def test_what_was_indexed_behind_a_killed_gateways_removal_is_removed_by_the_job(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record was gone already: nothing else tells of it."""
    rig.retrieval.gate.clear()
    file = await rig.file()
    store = await rig.store(file)
    await until(lambda: rig.retrieval.indexing == 1, 10)
    async with rig.another() as other:
        drop = other.records.drop

        async def killed(*args: Any) -> None:
            rig.retrieval.gate.set()
            await rig.arrived()
            await drop(*args)
            raise Killed

        monkeypatch.setattr(other.records, "drop", killed)
        with suppress(Killed):
            await other.stores.detach(CALLER, store, file.id)
    assert ("acme", store, file.id) in rig.retrieval.documents
    queue = Queue("remove", "acme", "all")
    async for jobs in rig.jobs.queues.rest(queue):
        for job in jobs:
            await rig.jobs.queues.hasten(queue, job)
    rig.jobs.look("remove")

    async def over() -> bool:
        return await rig.jobs.queues.counts("remove") == (0, 0)

    await until(over, 10)
    assert rig.retrieval.documents == {}


async def test_what_was_attached_anew_is_not_taken_out_by_an_old_removal(rig: StoresRig) -> None:
    file = await rig.file()
    store = await rig.store(file)
    await rig.arrived()
    old = (await rig.records.file("acme", store, file.id)).attachment
    await rig.attach(store, file)
    await rig.arrived()
    queue = Queue("remove", "acme", "all")
    removal = Removal(request_id="r", store=store, file=file.id, attachment=old)
    await rig.jobs.queues.add(queue, removal.model_dump_json())
    rig.jobs.look("remove")

    async def over() -> bool:
        return await rig.jobs.queues.counts("remove") == (0, 0)

    await until(over, 10)
    assert await rig.statuses(store) == ["completed"]
    assert ("acme", store, file.id) in rig.retrieval.documents


async def test_a_removal_waits_for_retrieval(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals, "_AGAIN_S", 0.05)
    store = await rig.store(await rig.file())
    await rig.arrived()
    rig.retrieval.remove_failures = [AWAY, AWAY]
    removal = Removal(request_id="r", store=store)
    await rig.jobs.queues.add(Queue("remove", "acme", "all"), removal.model_dump_json())
    rig.jobs.look("remove")

    async def gone() -> bool:
        return await rig.records.ids("acme") == []

    await until(gone, 20)
    assert rig.retrieval.documents == {}


class Slow:
    """The next removal waits in retrieval until it is let on."""

    def __init__(self, rig: StoresRig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        remove, held = rig.retrieval.remove, [True]

        async def slow(*args: Any) -> None:
            if held.pop() if held else False:
                self.reached.set()
                await self.go_on.wait()
            await remove(*args)

        monkeypatch.setattr(rig.retrieval, "remove", slow)


async def test_a_removal_that_takes_long_is_not_begun_twice(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_PROMISED_S", 0.3)
    store = await rig.store(await rig.file())
    await rig.arrived()
    slow, begun = Slow(rig, monkeypatch), []
    run = rig.stores.removals.run

    async def noted(job: Any) -> None:
        begun.append(job)
        await run(job)

    monkeypatch.setattr(rig.stores.removals, "run", noted)
    deleting = asyncio.create_task(rig.stores.delete(CALLER, store))
    await slow.reached.wait()
    done, _ = await asyncio.wait([deleting], timeout=1.5)  # several times as long as it is promised
    assert (done, begun) == (set(), [])
    slow.go_on.set()
    await deleting
    assert await rig.jobs.queues.counts("remove") == (0, 0)


@pytest.mark.parametrize("what", ["detach", "file"])
async def test_a_late_removal_leaves_what_was_attached_anew_meanwhile(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It is to be found, is in the store's list, and the file knows of the store."""
    file = await rig.file()
    store = await rig.store(file)
    await rig.arrived()
    slow = Slow(rig, monkeypatch)
    async with rig.another() as other:
        frozen = asyncio.create_task(other.stores.detach(CALLER, store, file.id))
        await slow.reached.wait()
        await rig.stores.detach(CALLER, store, file.id)
        anew = await rig.attach(store, file)
        await rig.arrived()
        slow.go_on.set()
        await frozen
    assert (await rig.records.file("acme", store, file.id)).attachment == anew.attachment
    assert ("acme", store, file.id) in rig.retrieval.documents
    assert await rig.files.stores_of("acme", file.id) == {store}
    if what == "file":
        await rig.stores.delete_file(CALLER, file.id)
        assert rig.retrieval.documents == {}


@pytest.mark.parametrize("before", ["remove", "delete"])
async def test_of_a_store_that_is_deleted_while_files_are_attached_nothing_stays(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """An attachment that comes before any of the deletion's steps, or behind the last."""
    file = await rig.file()
    store = await rig.store(await rig.file())
    await rig.arrived()
    of: Any = rig.retrieval if before == "remove" else rig.records
    step = getattr(of, before)

    async def attached_first(*args: Any) -> Any:
        monkeypatch.setattr(of, before, step)
        with suppress(PenstockError):
            await rig.attach(store, file)
            await rig.arrived()
        return await step(*args)

    monkeypatch.setattr(of, before, attached_first)
    await rig.stores.delete(CALLER, store)
    assert (await not_found(rig.attach(store, file))).message.startswith("No such vector store")
    assert [key async for key in rig.redis.scan_iter(f"*{store}*")] == []
    assert await rig.files.stores_of("acme", file.id) == set()
    assert rig.retrieval.documents == {}


async def test_an_attachment_that_comes_behind_the_stores_end_leaves_nothing(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked at the store before."""
    file, store = await rig.file(), await rig.store()
    put = rig.records.put

    async def deleted_first(*args: Any) -> None:
        await rig.stores.delete(CALLER, store)
        await put(*args)

    monkeypatch.setattr(rig.records, "put", deleted_first)
    await not_found(rig.attach(store, file))
    assert [key async for key in rig.redis.scan_iter(f"*{store}*")] == []
    assert await rig.files.stores_of("acme", file.id) == set()


async def test_attributes_that_retrieval_did_not_take_are_a_jobs(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_PROMISED_S", 0.3)
    monkeypatch.setattr(removals, "_AGAIN_S", 0.05)
    file = await rig.file()
    store = await rig.store(file)
    await rig.arrived()
    take, away = rig.retrieval.set_attributes, [AWAY, AWAY]

    async def away_at_first(*args: Any) -> None:
        if away:
            raise away.pop()
        await take(*args)

    monkeypatch.setattr(rig.retrieval, "set_attributes", away_at_first)
    with pytest.raises(PenstockError) as told:
        await rig.stores.attributes.change(CALLER, store, file.id, {"n": 1})
    assert told.value.reason == "no_replica"
    document = rig.retrieval.documents["acme", store, file.id]
    await until(lambda: document.attributes["n"].number == 1, 10, "the job brings it about")

    async def over() -> bool:
        return await rig.jobs.queues.counts("attributes") == (0, 0)

    await until(over, 10)


async def test_of_two_changes_at_once_the_last_is_the_one_that_searches_know(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reaches retrieval behind the second."""
    file = await rig.file()
    store = await rig.store(file)
    await rig.arrived()
    take, late, go_on = rig.retrieval.set_attributes, asyncio.Event(), asyncio.Event()

    async def first_waits(request: Any, span: Any) -> None:
        if request.attributes["n"].number == 1 and not late.is_set():
            late.set()
            await go_on.wait()
        await take(request, span)

    monkeypatch.setattr(rig.retrieval, "set_attributes", first_waits)
    first = asyncio.create_task(rig.stores.attributes.change(CALLER, store, file.id, {"n": 1}))
    await late.wait()
    await rig.stores.attributes.change(CALLER, store, file.id, {"n": 2})
    go_on.set()
    await first
    assert (await rig.records.file("acme", store, file.id)).attributes == {"n": 2}
    assert rig.retrieval.documents["acme", store, file.id].attributes["n"].number == 2


async def batch_of(rig: StoresRig, store: str, files: int) -> str:
    wanted = [Attach((await rig.file()).id, "file_ids[0]") for _ in range(files)]
    return (await rig.stores.attach_all(WHO, CALLER, store, wanted)).id


async def told_of_batch(rig: StoresRig, store: str, batch: str) -> tuple[str, dict[str, int]]:
    record, facts = await rig.records.batch("acme", store, batch)
    told = record.as_json(facts)
    counts = {state: count for state, count in told["file_counts"].items() if count}
    return told["status"], counts


@pytest.mark.parametrize("after", ["cancel", "change_file"])
async def test_a_batch_that_a_killed_gateway_was_cancelling_is_cancelled_whole(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    monkeypatch.setattr(jobs_module, "_PROMISED_S", 0.3)
    rig.retrieval.gate.clear()
    store = await rig.store()
    batch = await batch_of(rig, store, 4)
    await until(lambda: rig.retrieval.indexing == 2, 5)
    step, killed = getattr(rig.records, after), [False]

    async def killed_once(*args: Any) -> Any:
        told = await step(*args)
        if not killed[0]:
            killed[0] = True
            raise Killed
        return told

    monkeypatch.setattr(rig.records, after, killed_once)
    with suppress(Killed):
        await rig.stores.cancel_batch(CALLER, store, batch)

    async def over() -> bool:
        return await rig.jobs.queues.counts("cancel") == (0, 0)

    await until(over, 10, "the rest is a job's")
    rig.retrieval.gate.set()
    await rig.arrived()
    assert await told_of_batch(rig, store, batch) == ("cancelled", {"cancelled": 4, "total": 4})
    assert rig.retrieval.documents == {}


async def test_a_batch_that_has_ended_is_not_cancelled(rig: StoresRig) -> None:
    store = await rig.store()
    done = await batch_of(rig, store, 2)
    await rig.arrived()
    await rig.stores.cancel_batch(CALLER, store, done)
    assert await told_of_batch(rig, store, done) == ("completed", {"completed": 2, "total": 2})
    rig.retrieval.failure = invalid("no good", "text", stage="retrieval")
    failed = await batch_of(rig, store, 1)
    await rig.arrived()
    await rig.stores.cancel_batch(CALLER, store, failed)
    assert await told_of_batch(rig, store, failed) == ("failed", {"failed": 1, "total": 1})
    assert await rig.jobs.queues.counts("cancel") == (0, 0)
