"""Citations, pages, the intake, records: the gateway's small concepts."""

import asyncio
import weakref

import grpc
import pytest
from opentelemetry import trace

from protos.common_pb2 import Passage, Record
from services.common.errors import PenstockError
from services.common.shares import Shares
from services.gateway.citations import annotations
from services.gateway.ids import FILE
from services.gateway.intake import Intake
from services.gateway.pages import PageQuery, page, page_query
from services.gateway.records import Journal, Records, client_context


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
    assert told.value.reason == "draining"
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
        ("00-short-01", False),
        ("", False),
        (None, False),
    ],
)
def test_only_a_valid_trace_context_is_taken(header, valid):
    parent = trace.get_current_span(client_context(header)).get_span_context()
    assert parent.is_valid == valid
    assert not valid or parent.trace_flags.sampled


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
