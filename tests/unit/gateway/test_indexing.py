"""Files on their way into vector stores: in turn, bounded, and each with an outcome."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from protos.retrieval_pb2 import IndexProgress
from services.common.errors import PenstockError, invalid, unavailable
from services.common.redis import connect
from services.gateway.identity.limits import Bound, Limit
from services.gateway.jobs import jobs as jobs_module
from services.gateway.metering.run import Room, Verdict
from services.gateway.stores.indexing import indexing, outcomes
from services.gateway.stores.indexing.indexing import Wanted
from services.gateway.stores.vector_stores.store_files import AttachedFile
from services.gateway.stores.vector_stores.vector_stores import Attach
from tests.support.blob_folder import pieces
from tests.support.stores_rig import CALLER, RIVAL, WHO, StoresRig
from tests.support.waiting import until


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[StoresRig]:
    redis = connect(redis_url)
    async with StoresRig(redis, namespace).running() as rig:
        yield rig
    await redis.aclose()


async def the_file(rig: StoresRig, store: str) -> AttachedFile:
    (file,) = await rig.records.all_files("acme", store)
    return file


async def test_files_that_fail_or_are_given_up_give_their_turn_back(rig: StoresRig) -> None:
    rig.retrieval.failure = invalid("no good", "text", stage="retrieval")
    store = await rig.store(*[await rig.file() for _ in range(5)])
    await rig.arrived()
    assert await rig.statuses(store) == ["failed"] * 5
    rig.retrieval.failure = None
    rig.retrieval.gate.clear()
    for _ in range(5):
        given_up = await rig.file()
        await rig.attach(store, given_up)
        await until(lambda: rig.retrieval.indexing == 1, 5)
        await rig.stores.detach(CALLER, store, given_up.id)
    rig.retrieval.gate.set()
    await rig.attach(store, (await rig.file()))
    await rig.arrived()
    assert sorted(await rig.statuses(store)) == ["completed"] + ["failed"] * 5


async def test_a_file_attached_again_is_indexed_once_at_a_time(rig: StoresRig) -> None:
    rig.retrieval.gate.clear()
    file = await rig.file()
    store = await rig.store(file)
    await until(lambda: rig.retrieval.indexing == 1, 5)
    await rig.attach(store, file)
    await until(lambda: rig.retrieval.begun == 2, 5)
    rig.retrieval.gate.set()
    await rig.arrived()
    assert rig.retrieval.most_at_once == 1
    assert await rig.statuses(store) == ["completed"]


async def test_files_of_who_may_not_use_the_embedding_model_are_not_indexed(
    rig: StoresRig,
) -> None:
    who = rig.who["acme"] = replace(WHO, models=frozenset({"tiny"}))
    store, file = await rig.store(), await rig.file()
    one = Attach(file.id, "file_id")
    await rig.stores.attach(who, CALLER, store, one)  # no retrieval was ever seen
    await rig.arrived()
    attached = await the_file(rig, store)
    assert attached.state == "failed"
    assert "'tiny-embed'" in str(attached.error)
    for ask in (
        rig.stores.attach(who, CALLER, store, Attach((await rig.file()).id, "file_id")),
        rig.stores.create(who, CALLER, lambda record: record, [one]),
    ):
        with pytest.raises(PenstockError, match="'tiny-embed'") as refused:
            await ask
        assert refused.value.reason == "model_not_allowed"
    assert await rig.stores.create(who, CALLER, lambda record: record)
    assert (rig.retrieval.begun, len(await rig.records.all_files("acme", store))) == (0, 1)
    who = rig.who["acme"] = replace(who, models=frozenset({"tiny-embed"}))
    await rig.stores.attach(who, CALLER, store, Attach(file.id, "file_id"))
    await rig.arrived()
    assert rig.retrieval.begun == 1


async def test_what_is_given_up_has_ended_before_anything_comes_after_it(rig: StoresRig) -> None:
    rig.retrieval.gate.clear()
    rig.retrieval.let_go.clear()
    file = await rig.file()
    store = await rig.store(file)
    await until(lambda: rig.retrieval.indexing == 1, 5)
    again = asyncio.create_task(rig.attach(store, file))
    await until(lambda: rig.retrieval.cancelled == 1, 5)
    done, _ = await asyncio.wait([again], timeout=0.1)
    assert not done
    rig.retrieval.let_go.set()
    await again
    rig.retrieval.gate.set()
    await rig.arrived()
    assert rig.retrieval.most_at_once == 1


async def test_what_retrieval_is_given(rig: StoresRig) -> None:
    file = await rig.files.create("acme", "guide.md", pieces("grüße".encode()))
    store = await rig.store(file)
    await rig.arrived()
    (request,) = rig.retrieval.documents.values()
    assert (request.caller, request.collection, request.source_id) == (CALLER, store, file.id)
    assert (request.title, request.blob) == ("guide.md", file.blob)
    attached = await the_file(rig, store)
    assert (attached.id, attached.filename, attached.bytes) == (file.id, "guide.md", 7)


async def test_how_far_a_file_is_and_what_is_to_be_known_of_it_is_in_its_record(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "_NOTED_EVERY_S", 0.0)
    seen: list[object] = []
    keep = rig.records.change_file

    async def change(*place: str, edit: Any) -> AttachedFile:
        changed = await keep(*place, edit)
        seen.append(changed.as_json()["penstock"])
        return changed

    monkeypatch.setattr(rig.records, "change_file", lambda *told: change(*told[:-1], edit=told[-1]))
    rig.retrieval.progress = [IndexProgress(done=done, chunks=130) for done in (0, 64)]
    rig.retrieval.note = "is called .pdf and was read as HTML"
    await rig.store(await rig.file())
    await rig.arrived()
    assert seen == [
        {"progress": {"done": 0, "chunks": 130}},
        {"progress": {"done": 64, "chunks": 130}},
        {"note": "the file is called .pdf and was read as HTML"},
    ]


async def test_a_file_that_retrieval_was_lost_over_is_tried_again_and_not_for_ever(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_AGAIN_S", 0.01)
    rig.retrieval.failure = unavailable("gone", stage="retrieval", reason="index_lost")
    store = await rig.store(await rig.file())
    await rig.arrived()
    assert (await rig.statuses(store), rig.retrieval.begun) == (["failed"], 3)


@pytest.mark.parametrize(
    "reason",
    [
        "blobs_unavailable",
        "queue_full",
        "retrieval_outdated",
        "revisions_away",
        "store_away",
        "store_failed",
        "store_slow",
    ],
)
async def test_a_file_waits_while_what_it_is_read_from_or_stored_in_is_away(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(indexing, "_AGAIN_S", 0.01)
    away = unavailable("away", stage="retrieval", reason=reason, retry_after_s=0.01)
    rig.retrieval.failure = away
    store = await rig.store(await rig.file())
    await until(lambda: rig.retrieval.begun > 4, 10)
    assert await rig.statuses(store) == ["in_progress"]
    rig.retrieval.failure = None
    await rig.arrived()
    assert await rig.statuses(store) == ["completed"]
    monkeypatch.setattr(indexing, "QUEUEING_S", -60.0)
    rig.retrieval.failure = away
    late = await rig.store(await rig.file())
    await rig.arrived()
    assert await rig.statuses(late) == ["failed"], "not for ever"


@pytest.mark.parametrize("what", ["detach", "delete", "attach"])
async def test_what_failed_to_take_a_file_off_its_way_leaves_it_there(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(indexing, "_AGAIN_S", 0.01)
    rig.retrieval.gate.clear()
    file = await rig.file()
    store = await rig.store(file)
    await until(lambda: rig.retrieval.indexing == 1, 5)
    rig.retrieval.remove_failures = [unavailable("away", stage="retrieval", reason="no_replica")]
    take_off = {
        "attach": lambda: rig.attach(store, file),
        "delete": lambda: rig.stores.delete(CALLER, store),
        "detach": lambda: rig.stores.detach(CALLER, store, file.id),
    }
    with monkeypatch.context() as patch:
        patch.setattr(rig.records, "put", Mock(side_effect=ConnectionError))
        with pytest.raises((PenstockError, ConnectionError)):
            await take_off[what]()
    await until(lambda: rig.retrieval.cancelled == 1, 5)
    rig.retrieval.gate.set()

    async def arrived() -> bool:
        return await rig.statuses(store) == ["completed"]

    await until(arrived, 10)


async def test_a_file_of_no_known_kind_is_told_as_such(rig: StoresRig) -> None:
    rig.retrieval.failure = invalid(
        "an image", "file", reason="unsupported_file", stage="retrieval"
    )
    store = await rig.store(await rig.file())
    await rig.arrived()
    assert (await the_file(rig, store)).error_code == "unsupported_file"


async def test_a_gateway_that_is_lost_while_it_attaches_leaves_no_file_that_waits_for_nobody(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as Redis can tell, an exception behind a write is a kill there."""
    store, file = await rig.store(), await rig.file()
    for what in (rig.jobs.queues, rig.files, rig.records):
        for name in ("add", "note_store", "put"):
            if (write := getattr(what, name, None)) is None:
                continue

            async def lost(*args: Any, write: Any = write, **more: Any) -> None:
                await write(*args, **more)
                raise ConnectionError

            with monkeypatch.context() as patch:
                patch.setattr(what, name, lost)
                with pytest.raises(ConnectionError):
                    await rig.attach(store, file)
            waits = await rig.jobs.queues.size(rig.indexing._queue("acme"))
            assert waits >= len(await rig.records.all_files("acme", store))
            await rig.jobs.queues.drop(rig.indexing._queue("acme"))


async def test_two_files_are_indexed_at_once_and_the_others_wait(rig: StoresRig) -> None:
    rig.retrieval.gate.clear()
    store = await rig.store(*[await rig.file() for _ in range(5)])
    await until(lambda: rig.retrieval.indexing == 2, 5)
    await rig.attach(store, (await rig.file()))
    assert await rig.statuses(store) == ["in_progress"] * 6
    rig.retrieval.gate.set()
    await rig.arrived()
    assert rig.retrieval.most_at_once == 2
    assert await rig.statuses(store) == ["completed"] * 6


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (invalid("too many chunks", "text"), "invalid_file", "too many chunks"),
        (unavailable("lost", stage="retrieval", reason="index_lost"), "server_error", "lost"),
        (ValueError("of the inside"), "server_error", "internal error"),
    ],
)
async def test_however_it_fails_it_is_told(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, failure: Exception, code: str, message: str
) -> None:
    monkeypatch.setattr(indexing, "_AGAIN_S", 0.01)
    rig.retrieval.failure = failure
    store = await rig.store(await rig.file())
    await rig.arrived()
    told = (await the_file(rig, store)).as_json()
    assert (told["status"], told["last_error"]) == ("failed", {"code": code, "message": message})
    rig.retrieval.failure = None
    for _ in range(2):  # as many as are indexed at once
        await rig.attach(store, (await rig.file()))
    await rig.arrived()
    assert sorted(await rig.statuses(store)) == ["completed"] * 2 + ["failed"]


async def test_a_file_whose_text_is_gone_has_failed(rig: StoresRig) -> None:
    file = await rig.file()
    store = await rig.store()
    await rig.files.delete("acme", file.id)
    await rig.indexing.begin(WHO, CALLER, store, [Wanted(file)])
    await rig.arrived()
    assert (await the_file(rig, store)).state == "failed"
    assert rig.retrieval.begun == 0


async def test_indexing_that_takes_too_long_ends_and_gives_its_turn_back(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.retrieval.gate.clear()
    monkeypatch.setattr(indexing, "INDEXING_S", 0.05)
    store = await rig.store(*[await rig.file() for _ in range(3)])
    await rig.arrived()
    assert [(f.state, f.error) for f in await rig.records.all_files("acme", store)] == [
        ("failed", "indexing took too long")
    ] * 3, "the third had its turn too"


async def test_too_many_waiting_files_of_one_tenant(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_QUEUE", 3)
    rig.retrieval.gate.clear()
    store = await rig.store(*[await rig.file() for _ in range(3)])
    fourth = await rig.file()
    with pytest.raises(PenstockError) as refused:
        await rig.attach(store, fourth)
    assert (refused.value.code, refused.value.reason, refused.value.retry_after_s) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "index_queue_full",
        5.0,
    )
    assert len(await rig.records.all_files("acme", store)) == 3
    assert await rig.files.stores_of("acme", fourth.id) == set()
    await rig.store(await rig.file(tenant="rival"), caller=RIVAL)
    rig.retrieval.gate.set()
    await rig.arrived()
    await rig.attach(store, fourth)
    await rig.arrived()
    assert await rig.statuses(store) == ["completed"] * 4, "those that are done wait no more"


async def test_an_outcome_that_redis_does_not_take_is_noted_later(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "_RETRY_S", 0.02)  # thirty of them are longer than the outage
    change, back = rig.records.change_file, time.monotonic() + 0.2

    async def away(*args: Any) -> AttachedFile:
        if time.monotonic() < back:
            raise ConnectionError
        return await change(*args)

    monkeypatch.setattr(rig.records, "change_file", away)
    store = await rig.store(await rig.file())
    await rig.arrived()
    assert await rig.statuses(store) == ["completed"]


async def test_what_was_taken_out_elsewhere_is_removed_again_until_it_is(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "_RETRY_S", 0)
    rig.retrieval.gate.clear()
    file = await rig.file()
    store = await rig.store(file)
    await until(lambda: rig.retrieval.indexing == 1, 5)
    async with rig.another() as other:
        await other.stores.detach(CALLER, store, file.id)
    away = unavailable("away", stage="retrieval", reason="no_replica")
    rig.retrieval.remove_failures = [away, away]
    rig.retrieval.gate.set()
    await rig.arrived()
    assert rig.retrieval.documents == {}
    assert rig.retrieval.remove_failures == []
    assert await rig.records.all_files("acme", store) == []


async def test_what_was_attached_anew_elsewhere_is_left_to_that(rig: StoresRig) -> None:
    rig.retrieval.gate.clear()
    file = await rig.file()
    store = await rig.store(file)
    await until(lambda: rig.retrieval.indexing == 1, 5)
    async with rig.another() as other:
        await other.attach(store, file)
        await until(lambda: rig.retrieval.indexing == 2, 5)
        rig.retrieval.gate.set()
        await rig.arrived()
    assert set(rig.retrieval.documents) == {("acme", store, file.id)}
    assert rig.retrieval.removed == []
    assert await rig.statuses(store) == ["completed"]


async def test_taking_a_file_out_of_one_store_leaves_its_way_into_the_others(
    rig: StoresRig,
) -> None:
    rig.retrieval.gate.clear()
    file, other = await rig.file(), await rig.file()
    first, second = await rig.store(file), await rig.store(file)
    await rig.stores.attach(WHO, CALLER, first, Attach(other.id, "file_id"))
    await until(lambda: rig.retrieval.indexing == 2, 5)
    await rig.stores.detach(CALLER, first, file.id)
    rig.retrieval.gate.set()
    await rig.arrived()
    assert set(rig.retrieval.documents) == {("acme", first, other.id), ("acme", second, file.id)}
    assert await rig.statuses(first) == await rig.statuses(second) == ["completed"]


async def test_what_a_gateway_had_when_it_ended_is_anothers(rig: StoresRig) -> None:
    rig.retrieval.gate.clear()
    store = await rig.store(*[await rig.file() for _ in range(3)])
    await until(lambda: rig.retrieval.indexing == 2, 5)
    await rig.jobs.stop()
    assert rig.retrieval.indexing == 0
    assert await rig.statuses(store) == ["in_progress"] * 3
    rig.retrieval.gate.set()
    async with rig.another():
        await rig.arrived()
    assert await rig.statuses(store) == ["completed"] * 3


async def test_of_what_was_taken_out_under_a_killed_gateway_nothing_stays(
    rig: StoresRig,
) -> None:
    file = await rig.file()
    rig.retrieval.gate.clear()
    store = await rig.store(file)
    await until(lambda: rig.retrieval.indexing == 1, 5)
    (job,) = rig.jobs._own.values()
    attachment = (await the_file(rig, store)).attachment
    await rig.records.drop("acme", store, file.id, attachment)
    await rig.indexing.run(job._replace(claims=2))
    assert rig.retrieval.removed == [("acme", store, file.id)]
    rig.retrieval.gate.set()


async def test_who_may_no_longer_has_nothing_indexed(rig: StoresRig) -> None:
    del rig.who["acme"]
    store = await rig.store(await rig.file())
    await rig.arrived()
    attached = await the_file(rig, store)
    assert (attached.state, attached.error) == ("failed", "The API key was revoked.")
    assert rig.retrieval.begun == 0


async def test_a_file_whose_job_nobody_can_read_has_failed_in_words(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_LEFT_S", 0.01), ("_LOOK_EVERY_S", 0.01), ("_MOST_LEFT", 1)):
        monkeypatch.setattr(jobs_module, name, value)
    store, file = await rig.store(), await rig.file()
    to_json = indexing.Task.model_dump_json

    def of_a_later_version(task: indexing.Task) -> str:
        told = json.loads(to_json(task))
        del told["who"]
        return json.dumps(told)

    monkeypatch.setattr(indexing.Task, "model_dump_json", of_a_later_version)
    await rig.attach(store, file)
    await rig.arrived()
    attached = await the_file(rig, store)
    assert attached.state == "failed"
    assert "no gateway could read it" in attached.error
    (dead,) = await rig.jobs.queues.dead(10)
    assert file.id in dead.body


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_of_a_batch_that_is_cancelled_nothing_stays_that_had_not_arrived(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Retrieval has stored some of it by then."""
    index = rig.retrieval.index

    async def stored_at_once(request: Any, *more: Any) -> Any:
        rig.retrieval.documents[request.caller.tenant, request.collection, request.source_id] = (
            request
        )
        return await index(request, *more)

    monkeypatch.setattr(rig.retrieval, "index", stored_at_once)
    rig.retrieval.gate.clear()
    store, files = await rig.store(), [await rig.file() for _ in range(4)]
    wanted = [Attach(file.id, "file_ids[0]") for file in files]
    batch = await rig.stores.attach_all(WHO, CALLER, store, wanted)
    await until(lambda: rig.retrieval.indexing == 2, 5)
    async with rig.another() as other:
        at = rig if where == "here" else other
        await at.stores.cancel_batch(CALLER, store, batch.id)
        assert await rig.statuses(store) == ["cancelled"] * 4
        rig.retrieval.gate.set()
        await rig.arrived()
    assert rig.retrieval.documents == {}
    again = await rig.attach(store, files[0])
    await rig.arrived()
    assert (await rig.records.file("acme", store, again.id)).state == "completed"
    assert len(rig.retrieval.documents) == 1


# ---- what it costs ------------------------------------------------------------------------------

TOKENS = Limit(name="tpm", of="tokens", most=100, per="minute")


async def test_each_attachment_is_charged_once_to_who_made_it(rig: StoresRig) -> None:
    file = await rig.file("one two three")
    store = await rig.store(file)
    await rig.arrived()
    rig.who["acme"] = replace(WHO, user="key_2")
    await rig.stores.attach(rig.who["acme"], CALLER, store, Attach(file.id, "file_id"))
    await rig.arrived()
    first, second = rig.metered.settled
    assert (first.who["tenant"], first.who["model"]) == ("acme", "tiny-embed")
    assert [run.used.prompt for run in (first, second)] == [3, 3]
    assert [run.id.partition(":")[0] for run in (first, second)] == [file.id] * 2
    assert first.id != second.id
    assert (first.who["user"], second.who["user"]) == ("key_1", "key_2")
    assert first.held.tokens == 4, "of 13 bytes"


async def test_what_was_not_indexed_costs_nothing(rig: StoresRig) -> None:
    rig.retrieval.failure = unavailable("gone", stage="retrieval", reason="timeout")
    await rig.store(await rig.file())
    await rig.arrived()
    rig.retrieval.failure = None
    rig.retrieval.gate.clear()
    file = await rig.file()
    store = await rig.store(file)
    await until(lambda: rig.retrieval.indexing == 1, 5)
    await rig.stores.detach(CALLER, store, file.id)
    await until(lambda: len(rig.metered.settled) == 2, 5)
    told = [(run.status, run.used.prompt) for run in rig.metered.settled]
    assert told == [("failed", 0), ("cancelled", 0)]


async def test_a_file_waits_while_its_limits_cannot_be_checked(rig: StoresRig) -> None:
    """Redis was away a moment ago: a durable job is not lost by that."""
    closed = TOKENS.model_copy(update={"without_redis": "closed"})
    rig.who["acme"] = replace(WHO, limits=(Bound("tenant:acme", closed),))
    rig.metered.verdict = ConnectionError("away")
    store = await rig.store(await rig.file())
    await until(lambda: rig.metered.released, 5, "it came to the door")
    rig.metered.verdict = Verdict()
    await rig.arrived()
    assert await rig.statuses(store) == ["completed"]


async def test_a_limit_without_room_is_waited_for_and_an_empty_budget_is_not(
    rig: StoresRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = Bound("tenant:acme", TOKENS)
    limited = rig.who["acme"] = replace(WHO, limits=(bound,))
    rig.metered.verdict = Verdict((Room(bound, 0, 1),), bound, 0.01)
    store = await rig.store()
    await rig.stores.attach(limited, CALLER, store, Attach((await rig.file()).id, "file_id"))
    await until(lambda: len(rig.metered.reserved) >= 3, 5)
    file = await rig.file(tenant="rival")  # of who has no limits: no turn is taken meanwhile
    await rig.store(file, caller=RIVAL)
    await until(lambda: rig.retrieval.begun == 1, 5)
    rig.metered.verdict = Verdict()
    await rig.arrived()
    assert await rig.statuses(store) == ["completed"]
    budget = Bound("tenant:acme", TOKENS.model_copy(update={"per": "day"}))
    rig.metered.verdict = Verdict((Room(budget, 0, 1),), budget, 900.0)
    rig.who["acme"] = replace(WHO, limits=(budget,))
    await rig.attach(store, (await rig.file()))
    await rig.arrived()
    failed = next(f for f in await rig.records.all_files("acme", store) if f.state == "failed")
    assert "100 tokens per day" in failed.error
