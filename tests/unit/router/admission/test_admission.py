"""A router's end of admission against a real Redis: who waits, who is refused, who is told what."""

import asyncio
from typing import Any

import grpc
import pytest

from services.common.errors import PenstockError
from services.common.redis import connect
from services.router import metrics
from services.router.admission import Ticket
from services.router.admission.shared_order import Reply
from tests.support.admission_ends import queued, refusal, ticket
from tests.support.waiting import until, within


async def test_a_grant_reaches_the_other_router(routers):
    first, second = await routers.add(), await routers.add()
    a, b = ticket(), ticket()
    await first.admit(a)
    waiting = asyncio.create_task(second.admit(b))
    await queued(first, 1, 1)
    first.leave(a)
    await within(5, waiting)
    assert b.order == "redis"
    assert ((a.queued, a.before), (b.queued, b.before)) == ((False, 0), (True, 0))
    third = asyncio.create_task(first.admit(ticket()))
    await queued(first, 1, 1)
    last = ticket()
    fourth = asyncio.create_task(second.admit(last))
    await until(lambda: last.queued)
    assert last.before == 1
    second.leave(b)
    await within(5, third)
    fourth.cancel()


async def test_who_has_waited_longer_comes_first_whenever_it_is_entered(routers):
    """As after an outage: the routers enter what waits there in any order."""
    end = await routers.add()
    held, young, old = ticket(), ticket(), ticket()
    old.entered_s -= 10
    for one in (held, young, old):
        await end._shared.enter(one, 9)
    assert (await end._shared.tell("m", [], [(held.id, 0.0)])).granted == [old.id]
    await end._shared.tell("m", [], [(young.id, 0.0), (old.id, 0.0)])


@pytest.mark.parametrize(
    ("held_s", "advice_s"),
    [(0.0, 1.0), (1.75, 3.5), (1000.0, 7.0)],
    ids=["unknown", "mean", "most"],
)
async def test_a_full_queue_advises_no_more_than_the_longest_wait(
    make_routers, namespace, redis_url, held_s, advice_s
):
    routers = make_routers(redis_url, queue_limit=1, queue_timeout_s=7.0)
    end = await routers.add()
    await routers.clients[0].hset(f"{namespace}:{{admission:m}}:clock", "service", str(held_s))
    running, waiting = ticket(), ticket()
    await end.admit(running)
    wait = asyncio.create_task(end.admit(waiting))
    await queued(end, 1, 1)
    assert await refusal(asyncio.create_task(end.admit(ticket()))) == ("queue_full", advice_s)
    end.leave(waiting)
    with pytest.raises(asyncio.CancelledError):
        await wait
    end.leave(running)


@pytest.mark.parametrize("of_another", [False, True])
async def test_the_displaced_is_told(make_routers, redis_url, of_another):
    routers = make_routers(redis_url, queue_limit=2)
    first, second = await routers.add(), await routers.add()
    await until(lambda: routers.listening(first))
    a = ticket("flood")
    await first.admit(a)
    waiting = [asyncio.create_task(first.admit(ticket("flood")))]
    await queued(first, 1, 1)
    newest = ticket("flood")
    waiting.append(asyncio.create_task(first.admit(newest)))
    await queued(first, 1, 2)
    calm = ticket("calm")
    end = second if of_another else first
    other = asyncio.create_task(end.admit(calm))
    reason, retry_after_s = await refusal(waiting[1])
    assert (reason, retry_after_s >= 1) == ("queue_full", True)
    first.leave(newest)
    await queued(first, 1, 2)
    first.leave(a)
    await within(5, other)
    end.leave(calm)
    await within(5, waiting[0])


async def test_a_lost_word_of_displacement_is_found_by_the_renewal(make_routers, redis_url):
    routers = make_routers(redis_url, queue_limit=2)
    end = await routers.add()
    follow = end._follow

    def deaf(model: str, decided: Reply) -> None:
        follow(model, Reply(decided.granted))

    end._follow = deaf  # type: ignore[method-assign]
    a = ticket("flood")
    await end.admit(a)
    flood = [asyncio.create_task(end.admit(ticket("flood")))]
    await queued(end, 1, 1)
    flood.append(asyncio.create_task(end.admit(ticket("flood"))))
    await queued(end, 1, 2)
    calm = asyncio.create_task(end.admit(ticket("calm")))
    end.poke()
    assert (await refusal(flood[1]))[0] == "queue_full"
    assert not calm.done()


async def test_cancelled_while_waiting_leaves_no_trace(routers, redis_url):
    end = await routers.add()
    a = ticket()
    await end.admit(a)
    tasks = []
    for n in range(20):
        b = ticket(f"t{n}")

        async def run(b: Ticket = b) -> None:
            try:
                await end.admit(b)
            finally:
                end.leave(b)

        tasks.append(asyncio.create_task(run()))
        if n == 9:
            await queued(end, 1, 10)
        else:  # those after it are cancelled before Redis has answered
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await queued(end, 1, 0)
    end.leave(a)
    await queued(end, 0, 0)
    client = connect(redis_url)
    keys = {k.rsplit("}:")[-1] for k in await client.keys(f"{routers.namespace}:*")}
    assert keys <= {"clock", "finish"}
    await client.aclose()


async def test_a_grant_to_who_has_left_is_not_charged(routers, redis_url, monkeypatch):
    """Its client went away while Redis answered."""
    end = await routers.add()
    call, granted, go_on = end._shared._script, asyncio.Event(), asyncio.Event()

    async def slow(keys, args):
        reply = await call(keys, args)
        granted.set()
        await go_on.wait()
        return reply

    monkeypatch.setattr(end._shared, "_script", slow)
    a = ticket(cost=1000)
    waiting = asyncio.create_task(end.admit(a))
    await granted.wait()
    waiting.cancel()
    end.leave(a)
    go_on.set()
    await queued(end, 0, 0)
    client = connect(redis_url)
    assert await client.zscore(f"{routers.namespace}:{{admission:m}}:finish", "t") is None
    await client.aclose()


async def test_what_the_answer_to_one_that_went_away_says_of_others_is_heard(
    make_routers, redis_url, seldom, monkeypatch
):
    routers = make_routers(redis_url, **seldom)
    end = await routers.add()
    held, waits, goes = ticket(), ticket(), ticket("other")
    await end.admit(held)
    waiting = asyncio.create_task(end.admit(waits))
    await queued(end, 1, 1)
    call, answered, go_on = end._shared._script, asyncio.Event(), asyncio.Event()

    async def slow(keys: Any, args: Any) -> Any:
        reply = await call(keys, args)
        answered.set()
        await go_on.wait()
        return reply

    monkeypatch.setattr(end._shared, "_script", slow)
    routers.capacity = 2  # the next call's answer says that `waits` has a slot
    going = asyncio.create_task(end.admit(goes))
    await answered.wait()
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    end.leave(goes)
    go_on.set()
    await within(10, waiting)
    end.leave(held)
    end.leave(waits)


async def test_waiting_too_long_is_told_and_leaves_no_place(make_routers, redis_url):
    routers = make_routers(redis_url, queue_timeout_s=0.3)
    end = await routers.add()
    held = ticket()
    await end.admit(held)
    late = ticket()
    before = refused("queue_timeout")
    with pytest.raises(PenstockError) as told:
        await within(5, end.admit(late))
    error = told.value
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_timeout")
    assert (error.stage, error.retry_after_s) == ("router", 0.15)
    assert "0.3 s" in error.message
    assert refused("queue_timeout") == before + 1
    end.leave(late)
    end.leave(late)  # as often as one likes
    await queued(end, 1, 0)
    end.leave(held)
    await queued(end, 0, 0)


def refused(reason: str) -> float:
    return metrics.refusals.labels(reason)._value.get()


async def test_what_is_counted(routers):
    """At this router alone, and not any more once it has left."""
    end, other = await routers.add(), await routers.add()
    await other.stop()  # the gauges are of the router that started last
    await end.stop()
    end = await routers.add()
    granted = {lane: metrics.grants.labels(lane, "redis")._value.get() for lane in ("high", "low")}
    waited = metrics.wait._sum.get()

    def gauges() -> list[float]:
        samples = [*metrics.admitted.collect(), *metrics.queued.collect()]
        return [sample.value for metric in samples for sample in metric.samples]

    urgent, low = ticket(lane=1), ticket(lane=3)
    await end.admit(urgent)
    waiting = asyncio.create_task(end.admit(low))
    await queued(end, 1, 1)
    assert gauges() == [1, 1]
    end.leave(urgent)
    await within(5, waiting)
    assert gauges() == [1, 0]
    end.leave(low)
    assert gauges() == [0, 0]
    for lane, before in granted.items():
        assert metrics.grants.labels(lane, "redis")._value.get() == before + 1
    assert metrics.wait._sum.get() > waited


async def test_what_another_routers_request_was_given_is_counted_as_such(routers):
    end = await routers.add()
    counts = metrics.grants.labels("normal", "before")
    before = counts._value.get()
    resumed = ticket()
    resumed.resumed = True
    await end.admit(resumed)
    assert resumed.order == "before"
    assert counts._value.get() == before + 1
