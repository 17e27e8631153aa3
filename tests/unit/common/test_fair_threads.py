"""Threads shared by tenants in turn."""

import asyncio
import threading

import pytest

from services.common.fairness.fair_threads import FairThreads
from tests.support.waiting import until


async def test_much_work_of_one_tenant_does_not_hold_up_anothers():
    threads = FairThreads(1, "test")
    gate, order = threading.Event(), list[str]()

    async def run(tenant: str, name: str) -> None:
        def work() -> None:
            gate.wait(10)
            order.append(name)

        await threads.run(tenant, work)

    flood = [asyncio.create_task(run("flood", f"flood {n}")) for n in range(20)]
    await asyncio.sleep(0)
    other = asyncio.create_task(run("other", "other"))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*flood, other)
    assert order.index("other") == 2  # one ran, and one was before it in turn
    threads.stop()


async def test_results_and_errors_come_back():
    threads = FairThreads(2, "test")
    assert await threads.run("a", threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 // 0)
    threads.stop()
    for _ in range(3):  # and never waits for a place that is not given back
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(threads.run("a", threading.get_ident), 5)


async def test_what_was_given_up_keeps_its_thread_until_it_ends():
    threads = FairThreads(1, "test")
    began, gate = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        gate.wait(10)

    given_up = asyncio.create_task(threads.run("a", work))
    await until(began.is_set, 5)
    waiting = asyncio.create_task(threads.run("b", threading.get_ident))
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await asyncio.sleep(0)
    assert threads._pool._work_queue.empty()  # it waits for its turn, not in the pool
    assert not waiting.done()
    gate.set()
    assert await asyncio.wait_for(waiting, 5)
    threads.stop()


async def test_what_is_given_up_before_its_turn_has_ended_too():
    threads = FairThreads(1, "test")
    gate, ended = threading.Event(), list[str]()
    first = asyncio.create_task(threads.run("a", gate.wait, lambda: ended.append("first")))
    second = asyncio.create_task(threads.run("a", gate.wait, lambda: ended.append("second")))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()  # before anything is asserted: a thread that waits would hold up the test's end
    assert ended == ["second"]
    await first
    await until(lambda: ended == ["second", "first"], 5)
    threads.stop()
