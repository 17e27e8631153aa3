"""Who is told what, who has which slots, and what an outage of Redis leaves behind."""

import asyncio
import contextlib
from typing import Any, cast

import grpc
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from services.common.config import Settings
from services.common.errors import PenstockError
from services.router import metrics
from services.router.admission import admission
from services.router.admission.shared_order import Reply, SharedOrder
from tests.support.admission_ends import queued, ticket
from tests.support.waiting import until, within

# ---- recalls, without a renewal's help ----------------------------------------------------------


@pytest.mark.parametrize("away", [False, True])
async def test_a_recall_is_asked_for_when_its_time_has_come(make_routers, own_redis, seldom, away):
    routers = make_routers(own_redis.url, recall_after_s=0.05, **seldom)
    routers.capacity = 2
    end = await routers.add()
    flood = [ticket("flood") for _ in range(2)]
    for one in flood:
        await end.admit(one)
    if away:
        own_redis.stop()
    calm = ticket("calm")
    await within(10, end.admit(calm))
    assert (calm.order, calm.queued) == ("local" if away else "redis", True)
    assert [one.holds for one in flood] == [True, False]


@pytest.mark.parametrize("state", ["kept", "unknown", "left"])
async def test_a_slot_that_nobody_needs_any_more_is_kept(routers, seldom, monkeypatch, state):
    end = await routers.add()
    one = ticket()
    await end.admit(one)
    before = metrics.recalls._value.get()
    asked = asyncio.Event()

    async def give_back(ticket: Any, left_over: float) -> Reply:
        if state == "left":  # while Redis takes its slot
            end.leave(one)
        asked.set()
        return Reply(first="waiting" if state == "left" else state)

    monkeypatch.setattr(end._shared, "give_back", give_back)
    end._follow("m", Reply(recalled=[one.id]))
    await within(5, asked.wait())
    await until(lambda: not end._giving_back)
    assert one.holds
    assert not one.recalled.done()
    assert (one.recalls, metrics.recalls._value.get()) == (0, before)


# ---- who is told --------------------------------------------------------------------------------


async def test_models_have_slots_and_queues_of_their_own(make_routers, redis_url, seldom):
    """And a word to another router says which model it is of."""
    routers = make_routers(redis_url, queue_limit=1, **seldom)
    first, second = await routers.add(), await routers.add()
    await until(lambda: routers.listening(second))
    held = {model: ticket(model=model) for model in ("m", "a:b", "m}")}
    waiting = {}
    for model, one in held.items():
        await within(5, first.admit(one))  # whatever the others hold
        wait = ticket(model=model)
        waiting[model] = wait, asyncio.create_task(second.admit(wait))
        await queued(first, 1, 1, model)
    assert await first.status(held) == (3, 3)
    for model, one in held.items():
        wait, admitted = waiting.pop(model)
        first.leave(one)
        await within(5, admitted)
        assert not any(task.done() for _, task in waiting.values())
        second.leave(wait)
        await queued(first, 0, 0, model)


async def test_installs_in_one_redis_know_nothing_of_each_other(make_routers, redis_url, namespace):
    ends = [
        await make_routers(redis_url, namespace=f"{namespace}-{n}").add() for n in range(2)
    ]  # routers of the same name
    for end in ends:
        await within(5, end.admit(ticket()))
    assert [await end.status(["m"]) for end in ends] == [(1, 0)] * 2


async def test_what_waits_is_entered_and_words_are_heard_again_after_an_outage(
    make_routers, own_redis, seldom
):
    routers = make_routers(own_redis.url, **seldom)
    first, second = await routers.add(), await routers.add()
    await until(lambda: routers.listening(second))
    own_redis.stop()
    one = ticket()
    await first.admit(one)
    two = ticket()
    mine = asyncio.create_task(first.admit(two))
    await until(lambda: first._local.waiting("m") == 1)
    own_redis.start()
    first.poke()
    await until(lambda: not first.away)
    await queued(first, 1, 1)
    await until(lambda: routers.listening(second))
    theirs = asyncio.create_task(second.admit(ticket()))
    await queued(first, 1, 2)
    first.leave(one)
    await within(5, mine)
    first.leave(two)
    await within(5, theirs)


async def test_a_word_that_none_waits_for_gives_the_slot_back(routers):
    """Its request left while the grant was under way, and its leaving came first."""
    end, other = await routers.add(), await routers.add()
    gone = ticket()
    entered = await end._shared.enter(gone, 9)
    assert entered.first == "granted"
    waiting = asyncio.create_task(other.admit(ticket()))
    await queued(other, 1, 1)
    end._follow("m", Reply(granted=[gone.id]))
    await within(5, waiting)


async def test_what_leaves_while_its_lease_is_renewed_ends_no_renewal(routers, monkeypatch):
    """Redis does not know it, and it is no more there to be entered or held again."""
    end = await routers.add()
    holds, waits = ticket(), ticket()
    await end.admit(holds)
    waiting = asyncio.create_task(end.admit(waits))
    await queued(end, 1, 1)
    renewed = asyncio.Event()

    async def renew(model: str, held: list[str], waiting: list[str]) -> Reply:
        assert (held, waiting) == ([holds.id], [waits.id])
        end.leave(holds)
        end.leave(waits)
        renewed.set()
        return Reply(first=held, second=waiting)

    monkeypatch.setattr(end._shared, "renew", renew)
    end.poke()
    await within(5, renewed.wait())
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await queued(end, 0, 0)
    end.check()


async def test_what_the_answer_to_one_that_went_away_says_of_others_is_heard(
    make_routers, redis_url, seldom, monkeypatch
):
    routers = make_routers(redis_url, **seldom)
    end = await routers.add()
    held, waits, goes = ticket(), ticket(), ticket("other")
    await end.admit(held)
    waiting = asyncio.create_task(end.admit(waits))
    await queued(end, 1, 1)
    pipe = end._shared._script
    send, answered, go_on = pipe._round_trip, asyncio.Event(), asyncio.Event()

    async def slow(calls: Any) -> Any:
        replies = await send(calls)
        answered.set()
        await go_on.wait()
        return replies

    monkeypatch.setattr(pipe, "_round_trip", slow)
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


async def test_a_router_that_stops_gives_back_what_it_holds(routers):
    end, other = await routers.add(), await routers.add()
    await end.admit(ticket())
    waiting = asyncio.create_task(end.admit(ticket()))
    await queued(other, 1, 1)
    mine = asyncio.create_task(other.admit(ticket()))
    await queued(other, 1, 2)
    await end.stop()
    await within(5, mine)
    assert await other.status(["m"]) == (1, 0)
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert waiting.cancelled()


async def test_a_renewal_that_has_ended_is_no_health(routers):
    end = await routers.add()
    end.check()
    end._loops[0].cancel()
    await asyncio.wait(end._loops[:1])
    with pytest.raises(RuntimeError, match="admission renewal has ended"):
        end.check()


# ---- one request --------------------------------------------------------------------------------


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


# ---- outages ------------------------------------------------------------------------------------


async def test_a_router_without_requests_finds_redis_back_and_not_before(
    make_routers, own_redis, monkeypatch
):
    monkeypatch.setattr(admission, "_RENEW_S", 0.05)
    routers = make_routers(own_redis.url)
    end = await routers.add()
    looks = 0
    renew = end._renew

    async def counted() -> None:
        nonlocal looks
        looks += 1
        await renew()

    monkeypatch.setattr(end, "_renew", counted)
    one = ticket()
    await end.admit(one)
    own_redis.stop()
    end.leave(one)
    await until(lambda: end.away)
    assert metrics.redis_away._value.get() == 1
    seen = looks
    await until(lambda: looks > seen + 2)
    assert end.away
    own_redis.start()
    await until(lambda: not end.away)
    assert metrics.redis_away._value.get() == 0
    await queued(end, 0, 0)


async def test_status_without_redis_is_of_this_router(make_routers, own_redis):
    routers = make_routers(own_redis.url)
    end = await routers.add()
    one = ticket()
    await end.admit(one)
    own_redis.stop()
    waiting = [asyncio.create_task(end.admit(ticket())) for _ in range(2)]
    await until(lambda: end._local.waiting("m") == 2)
    assert await end.status(["m"]) == (1, 2)
    for task in waiting:
        task.cancel()


async def test_each_outage_begins_with_the_slots_held_then(make_routers, own_redis):
    """Also those that were granted between the two."""
    routers = make_routers(own_redis.url)
    end = await routers.add()
    first = ticket()
    own_redis.stop()
    await within(10, end.admit(first))
    assert first.order == "local"
    own_redis.start()
    await until(lambda: not end.away)
    end.leave(first)
    second = ticket()
    await within(5, end.admit(second))
    assert second.order == "redis"
    own_redis.stop()
    third = ticket()
    waiting = asyncio.create_task(end.admit(third))
    await until(lambda: end.away and end._local.waiting("m") == 1)
    assert third.waits
    end.leave(second)
    await within(5, waiting)
    assert third.order == "local"


async def test_what_goes_on_during_an_outage_takes_part_of_the_share(make_routers, own_redis):
    routers = make_routers(own_redis.url)
    end = await routers.add()
    held = ticket()
    await end.admit(held)
    own_redis.stop()
    next_one = ticket()
    waiting = asyncio.create_task(end.admit(next_one))
    await until(lambda: end.away and end._local.waiting("m") == 1)
    resumed = ticket(cost=0)
    resumed.resumed = True
    await within(5, end.admit(resumed))
    end.leave(held)
    await until(lambda: not end._leaving or end.away)
    assert next_one.waits, "the one that went on has the slot"
    end.leave(resumed)
    await within(5, waiting)


async def test_more_slots_without_redis_are_granted_at_once(make_routers, own_redis):
    routers = make_routers(own_redis.url)
    end = await routers.add()
    own_redis.stop()
    await within(10, end.admit(ticket()))
    waiting = asyncio.create_task(end.admit(ticket()))
    await until(lambda: end._local.waiting("m") == 1)
    routers.capacity = 2
    end.poke()
    await within(5, waiting)


async def test_a_lost_channel_is_not_asked_for_again_and_again():
    """While Redis is away, each look for it waits a while."""
    looks = 0

    class Away:
        def register_script(self, source: str) -> None: ...

        def pubsub(self, **_: object) -> None:
            nonlocal looks
            looks += 1
            raise RedisConnectionError("refused")

    shared = SharedOrder(cast(Any, Away()), Settings(), "r", lambda model: 1)
    listening = asyncio.create_task(shared.listen(lambda model, reply: None))
    for _ in range(100):
        await asyncio.sleep(0)
    assert (looks, listening.done()) == (1, False)
    listening.cancel()


async def test_the_last_to_leave_are_told_when_too_many_left(make_routers, own_redis, monkeypatch):
    """The first were of old: their leases end first."""
    monkeypatch.setattr(admission, "_LEAVING_KEPT", 2)
    monkeypatch.setattr(admission, "_RENEW_S", 1000.0)
    routers = make_routers(own_redis.url, slot_lease_s=3000.0)
    end = await routers.add()
    routers.capacity = 5
    tickets = [ticket() for _ in range(5)]
    for one in tickets:
        await end.admit(one)
    told: list[list[tuple[str, float]]] = []
    leave = end._shared.leave

    async def spy(model, leavers):
        told.append(list(leavers))
        return await leave(model, leavers)

    monkeypatch.setattr(end._shared, "leave", spy)
    own_redis.stop()
    for one in tickets:
        end.leave(one)
    await until(lambda: end.away)
    await until(lambda: not any(t.get_name() == "admission leave" for t in end._tasks))
    told.clear()
    own_redis.start()
    end.poke()
    await until(lambda: not end.away and bool(told))
    assert [[id for id, _ in leavers] for leavers in told] == [[one.id for one in tickets[-2:]]]
