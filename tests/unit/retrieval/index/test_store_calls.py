"""Calls of the vector store: deadlines, turns, and what its failures become."""

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from services.common.errors import PenstockError
from services.retrieval.index.calls import Calls
from services.retrieval.index.points import StoreAwayError, StoreFailedError, StoreUnusableError
from tests.support.inside import check
from tests.support.waiting import until


def make(threads: int = 1, opens: Exception | None = None) -> Calls:
    def opened() -> None:
        if opens is not None:
            raise opens

    points: Any = SimpleNamespace(kind="fake", threads=threads, open=opened, close=lambda: None)
    return Calls(points, 20)


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    made = make()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (StoreAwayError("10.0.0.7"), "store_away"),
        (StoreFailedError("10.0.0.7"), "store_failed"),
        (StoreUnusableError("set PENSTOCK_DATA_DIR", "store_locked"), "store_locked"),
    ],
)
async def test_a_failure_is_unavailable_and_tells_nothing_of_the_inside(
    calls: Calls, failure: Exception, reason: str
) -> None:
    def fail(_: object) -> None:
        raise failure

    with pytest.raises(PenstockError) as raised:
        await calls.read("search", "t", fail)
    error = raised.value
    check(error.message)
    assert (error.code, error.stage, error.reason) == (
        grpc.StatusCode.UNAVAILABLE,
        "retrieval",
        reason,
    )
    assert "PENSTOCK" not in error.message
    assert await calls.read("search", "t", lambda _: "works again") == "works again"


async def test_a_store_that_is_away_is_no_obstacle_to_starting_an_unusable_one_is() -> None:
    for failure in (StoreAwayError(""), StoreFailedError("")):
        await make(opens=failure).open()
    with pytest.raises(StoreUnusableError):
        await make(opens=StoreUnusableError("", "store_locked")).open()


async def test_a_slow_store_ends_at_the_deadline_and_the_loop_stays_live(calls: Calls) -> None:
    calls._timeout_s = 0.2
    gate = threading.Event()
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.005)
            turns += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(PenstockError, match=r"within 0\.2 s") as raised:
        await calls.read("search", "t", lambda _: gate.wait(10))
    ticking.cancel()
    assert raised.value.reason == "store_slow"
    assert turns > 5
    gate.set()


async def test_a_write_past_its_deadline_keeps_its_place_until_it_ends(calls: Calls) -> None:
    """Or the next one would stand before the searches as well."""
    calls._timeout_s = 0.1
    gate = threading.Event()
    with pytest.raises(PenstockError, match="did not answer"):
        await calls.write("write", "t", lambda _: gate.wait(10))
    next_one = asyncio.create_task(calls.write("write", "t", lambda _: None))
    await asyncio.sleep(0)
    assert calls._waiting.taken == 1
    gate.set()
    calls._timeout_s = 10
    await next_one


async def test_waiting_calls_are_bounded_and_tenants_have_their_turns(calls: Calls) -> None:
    calls._waiting.total = 8
    gate, order = threading.Event(), list[str]()

    def call(tenant: str) -> asyncio.Task[None]:
        def work(_: object) -> None:
            gate.wait(10)
            order.append(tenant)

        return asyncio.create_task(calls.read("search", tenant, work))

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
    await until(lambda: calls._waiting.taken == 0, 5)


async def test_writes_hold_half_of_the_threads_and_searches_have_the_rest() -> None:
    calls = make(threads=8)
    gate, writing = threading.Event(), list[int]()

    def write(_: object) -> None:
        writing.append(1)
        gate.wait(20)

    writes = [asyncio.create_task(calls.write("write", "t", write)) for _ in range(12)]
    try:
        await until(lambda: len(writing) == 4)
        await asyncio.wait_for(calls.read("search", "t", lambda _: None), 10)
        assert len(writing) == 4
    finally:
        gate.set()
    await asyncio.wait_for(asyncio.gather(*writes), 20)  # each gives its place back
    await calls.close()


async def test_a_write_that_finds_no_room_keeps_no_place(calls: Calls) -> None:
    calls._waiting.total = 0
    for _ in range(20):  # more than there are places
        with pytest.raises(PenstockError) as full:
            await asyncio.wait_for(calls.write("write", "t", lambda _: None), 10)
        assert (full.value.code, full.value.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "queue_full",
        )
        assert full.value.retry_after_s > 0
    calls._waiting.total = 8
    await asyncio.wait_for(calls.write("write", "t", lambda _: None), 10)
