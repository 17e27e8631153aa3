"""Citations, pages, the intake, records: the gateway's small concepts."""

import asyncio
import contextlib
import weakref

import grpc
import pytest

from protos.common_pb2 import Passage, Record
from services.common.errors import PenstockError
from services.common.fairness.shares import Shares
from services.gateway import metrics
from services.gateway.api.resources.pages import PageQuery, page
from services.gateway.api.rest.http import http_status
from services.gateway.api.rest.queries import page_query
from services.gateway.ids import FILE
from services.gateway.intake import Intake
from services.gateway.runs.citations import annotations
from services.gateway.runs.records import Journal, Records, client_context


def test_marks_become_annotations_of_the_passages_that_exist():
    passages = [Passage(title="a.md", source_id="file-1"), Passage(title="b")]
    text = "[2] é[1], [3] [0] [x] [1][01]"
    cited = annotations(text, passages)
    assert [(c["index"], c["file_id"], c["filename"]) for c in cited] == [
        (0, None, "b"),
        (5, "file-1", "a.md"),
        (22, "file-1", "a.md"),
        (25, "file-1", "a.md"),
    ]
    assert annotations(text, []) == []


def test_ids_sort_by_the_time_they_were_made():
    ids = [FILE.new() for _ in range(50)]
    assert len(set(ids)) == 50
    assert [i[:19] for i in ids] == sorted(i[:19] for i in ids)


def test_pages_join_up_to_the_whole():
    items = [{"id": f"x{n}"} for n in range(7)]
    for order in ("asc", "desc"):
        seen, after = [], None
        while True:
            one = page(items, PageQuery(limit=3, after=after, order=order))
            seen += [item["id"] for item in one["data"]]
            after = one["last_id"]
            if not one["has_more"]:
                break
        assert seen == sorted((i["id"] for i in items), reverse=order == "desc")
    assert page([], PageQuery())["data"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "9" * 99}, "limit"),
        ({"limit": "²"}, "limit"),
        ({"order": "up"}, "order"),
        ({"before": "x"}, "before"),
    ],
)
def test_odd_pages_are_refused(query, param):
    with pytest.raises(PenstockError) as refused:
        page_query(query)
    assert refused.value.param == param


def test_a_holder_takes_no_more_than_it_leaves_free():
    shares = Shares(12)
    for holder, takes in (("a", 6), ("b", 3), ("c", 2), ("d", 1)):
        assert [shares.take(holder) for _ in range(takes)] == [True] * takes
        assert not shares.take(holder)
    assert (shares.taken, shares.take("e")) == (12, False)
    shares.give_back("a", 6)
    assert (shares.held("a"), shares.taken) == (0, 6)
    assert not shares.take("a", 7)
    assert shares.take("a", 6)


async def test_the_intake_is_bounded_and_drains():
    intake = Intake(3, 100)
    with intake.slot("a"), intake.slot("a"):
        with pytest.raises(PenstockError) as full, intake.slot("a"):
            pass
        assert full.value.reason == "too_many_requests"
        assert full.value.retry_after_s > 0
        with intake.slot("b"):
            pass
        draining = asyncio.create_task(intake.drain(5))
        await asyncio.sleep(0)
        with pytest.raises(PenstockError) as closed, intake.slot("b"):
            pass
        assert closed.value.reason == "draining"
        assert not draining.done()
    await draining
    assert intake.running == 0


async def test_a_tenants_bytes_are_bounded_and_come_back():
    intake = Intake(10, 100)
    with intake.slot("a") as first:
        first.hold(50)
        with intake.visit("a") as second, pytest.raises(PenstockError) as full:
            second.hold(1)
        assert full.value.reason == "too_many_bytes"
        with intake.slot("b") as other:
            other.hold(40)
            other.release(20)
            assert intake.bytes_held == 70
    assert intake.bytes_held == 0


async def test_what_never_fits_is_not_told_to_come_back():
    intake = Intake(10, 100)
    with intake.slot("b") as other, intake.slot("a") as place:
        other.hold(50)
        with pytest.raises(PenstockError) as full:
            place.hold(60)
        assert (full.value.reason, full.value.retry_after_s) == ("too_many_bytes", 1.0)
        with pytest.raises(PenstockError) as never:
            place.hold(101)
        assert (never.value.reason, http_status(never.value)) == ("body_too_large", 413)
        assert never.value.retry_after_s == 0
    with intake.slot("a") as place:
        place.hold(60)
        with pytest.raises(PenstockError) as never:
            place.hold(1)
        assert never.value.reason == "body_too_large", "it had more than it left free"


def test_nothing_is_kept_of_who_holds_nothing():
    shares = Shares(3)
    assert shares.take("a")
    assert shares.take("b", 0)
    assert not shares.take("a", 3)
    assert (shares.held("a"), shares.held("b"), shares.taken) == (1, 0, 1)
    assert shares.take("c")
    assert shares.take("c", 0), "nothing is always to be had"
    shares.give_back("a")
    shares.give_back("c", 1)
    assert shares.taken == 0
    assert not shares._held


async def test_what_a_request_holds_is_counted_to_the_byte():
    intake = Intake(10, 100)
    running = metrics.running._value.get()
    with intake.slot("a") as place:
        assert (intake.running, metrics.running._value.get()) == (1, running + 1)
        for size in (10, 20, 15):
            place.hold(size)
        place.release(20)
        place.release(5)
        assert intake.bytes_held == 20
        place.hold(25)
        with pytest.raises(PenstockError, match="would take 101 bytes"):
            place.hold(56)
        assert intake.bytes_held == 45
    assert (intake.bytes_held, intake.running) == (0, 0)
    assert metrics.running._value.get() == running
    with contextlib.suppress(KeyError), intake.slot("a") as place:
        place.hold(7)
        raise KeyError
    assert (intake.bytes_held, intake.running) == (0, 0)


async def test_what_is_refused_says_why_and_when_to_come_back():
    intake = Intake(1, 1)
    before = metrics.refused.labels("too_many_requests")._value.get()
    with (
        intake.slot("a"),
        pytest.raises(PenstockError, match="1 of your requests run here") as full,
        intake.slot("a"),
    ):
        pass
    told = full.value
    assert (told.code, told.stage) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "gateway")
    assert (told.reason, told.retry_after_s) == ("too_many_requests", 1.0)
    assert metrics.refused.labels("too_many_requests")._value.get() == before + 1


async def test_who_looks_only_holds_no_drain_up():
    intake = Intake(1, 100)
    with intake.visit("a") as visitor:
        visitor.hold(10)
        await intake.drain(60)
        with intake.visit("b"):
            assert intake.bytes_held == 10
    assert intake.bytes_held == 0


async def test_a_drain_waits_for_all_and_a_cancel_stays_a_cancel():
    intake, over = Intake(10, 1), [asyncio.Event() for _ in range(3)]

    async def runs(number: int) -> None:
        with intake.slot("abc"[number]):
            await over[number].wait()

    requests = [asyncio.create_task(runs(number)) for number in range(3)]
    await asyncio.sleep(0)
    draining = asyncio.create_task(intake.drain(60))
    await asyncio.sleep(0)
    requests[0].cancel()  # its client has gone
    over[1].set()
    await asyncio.wait(requests[:2])
    assert requests[0].cancelled()
    assert (intake.running, draining.done()) == (1, False)
    over[2].set()
    await asyncio.gather(draining, *requests[1:])
    assert intake.running == 0


async def test_a_request_that_will_not_end_does_not_hold_the_gateway_up(monkeypatch):
    monkeypatch.setattr("services.gateway.intake._LAST_WORDS_S", 0.01)
    intake, let_go = Intake(2, 1), asyncio.Event()

    async def stubborn() -> None:
        with intake.slot("a"):
            while not let_go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await let_go.wait()

    async def gone_as_well() -> None:
        with intake.slot("b"):
            try:
                await asyncio.Event().wait()
            finally:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()  # by its client, as it is told of the drain

    requests = [asyncio.create_task(stubborn()), asyncio.create_task(gone_as_well())]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await intake.drain(0.01)
    left, gone = intake.running, requests[1].cancelled()
    let_go.set()
    await requests[0]
    assert (left, gone) == (1, True)


async def test_a_drain_gives_up_after_its_grace():
    intake = Intake(1, 1)

    async def never_ends() -> None:
        with intake.slot("a"):
            await asyncio.Event().wait()

    request = asyncio.create_task(never_ends())
    await asyncio.sleep(0)
    assert intake.running == 1
    async with asyncio.timeout(5):
        await intake.drain(0.01)
    assert request.done()
    with pytest.raises(PenstockError, match="shut down before the answer was whole") as told:
        await request
    assert (told.value.reason, told.value.stage) == ("draining", "gateway")
    assert intake.running == 0
    with pytest.raises(PenstockError, match="shutting down"), intake.slot("b"):
        pass


def test_records_are_bounded():
    records = Records(2)
    for number in range(3):
        journal = Journal(f"req_{number}", "chat")
        journal.close(Record())
        records.keep(journal)
    assert list(records._journals) == ["req_1", "req_2"]
    assert records.find("req_2", "acme") is None  # never authenticated: nobody's


@pytest.mark.parametrize(
    ("header", "valid"),
    [
        ("00-" + "ab" * 16 + "-" + "cd" * 8 + "-00", True),
        ("00-" + "00" * 16 + "-" + "cd" * 8 + "-01", False),
        ("00-" + "xy" * 16 + "-" + "cd" * 8 + "-01", False),
        ("01-" + "ab" * 16 + "-" + "cd" * 8 + "-01", False),
        ("00-" + "ab" * 16 + "-" + "cd" * 8 + "-01-more", False),
        ("00-short-01", False),
        ("", False),
        (None, False),
    ],
)
def test_only_a_valid_trace_context_is_taken(header, valid):
    parent = client_context(header)
    assert bool(parent.trace_id and parent.span_id) == valid
    assert parent.sampled


def test_a_record_holds_nothing_of_the_request_that_failed():
    class Large:
        pass

    def fails(journal: Journal) -> "weakref.ref[Large]":
        body = Large()
        try:
            raise PenstockError(grpc.StatusCode.INVALID_ARGUMENT, "bad", param="x", reason="odd")
        except PenstockError as error:
            journal.fail(error)
        return weakref.ref(body)

    journal = Journal("req_1", "chat")
    assert fails(journal)() is None
    journal.close(Record())
    told = journal.as_json()
    assert (told["status"], told["error"]["code"]) == ("invalid_argument", "odd")
