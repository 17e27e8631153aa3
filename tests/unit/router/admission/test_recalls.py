"""A router's end of admission against a real Redis: who is asked for its slot waits again."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from services.common import script_line
from services.common.errors import PenstockError
from services.router import metrics
from services.router.admission import Ticket
from services.router.admission.shared_order import Reply
from tests.support.admission_ends import queued, ticket
from tests.support.waiting import until, within


@pytest.mark.parametrize("of_another", [False, True])
async def test_a_recalled_ticket_waits_again(make_routers, redis_url, of_another):
    """Its slot goes to the other tenant at once, and it has its old turn afterwards."""
    routers = make_routers(redis_url, recall_after_s=0.05)
    routers.capacity = 2
    first, second = await routers.add(), await routers.add()
    await until(lambda: routers.listening(first))
    flood = [ticket("flood") for _ in range(2)]
    for one in flood:
        await first.admit(one)
    flood.append(ticket("flood"))  # it comes when the others are in: it is behind them for sure
    third = asyncio.create_task(first.admit(flood[2]))
    await queued(first, 2, 1)
    calm = ticket("calm")
    before = metrics.recalls._value.get()
    end = second if of_another else first
    await within(5, end.admit(calm))
    recalled = flood[1]
    await until(recalled.recalled.done)  # the other router may hear of it first
    assert not recalled.holds
    assert metrics.recalls._value.get() == before + 1
    assert recalled.recalls == 1
    again = asyncio.create_task(first.admit_again(recalled))
    end.leave(calm)
    await within(5, again)
    assert recalled.holds
    assert not third.done()  # it came later
    assert not recalled.recalled.done()
    first.leave(recalled)
    await within(5, third)
    for one in flood:
        first.leave(one)
    await queued(first, 0, 0)


async def test_what_is_left_is_charged_by_weight_when_it_goes_on(routers, redis_url):
    routers.capacity = 2
    end = await routers.add()
    flood = [ticket("flood", cost=8) for _ in range(2)]
    for one in flood:
        one.weight = 4.0
        one.progress = lambda: (8.0, 100.0)
        assert (await end._shared.enter(one, 9)).first == "granted"
    calm = ticket("calm")
    calm.weight = 4.0
    assert (await end._shared.enter(calm, 9)).first == "waiting"
    reply = await end._shared.give_back(flood[1], 100.0)
    assert (reply.first, reply.granted) == ("waiting", [calm.id])
    reply = await end._shared.tell("m", [], [(calm.id, 0.0)])
    assert reply.granted == [flood[1].id]
    finish = f"{routers.namespace}:{{admission:m}}:finish"
    assert await routers.clients[0].zscore(finish, "flood") == 2 + 2 + 25
    await end._shared.tell("m", [], [(one.id, 0.0) for one in flood])


async def test_a_recall_without_redis(make_routers, own_redis):
    routers = make_routers(own_redis.url, recall_after_s=0.05)
    routers.capacity = 2
    end = await routers.add()
    flood = [ticket("flood") for _ in range(2)]
    for one in flood:
        await end.admit(one)  # in Redis
    own_redis.stop()
    calm = ticket("calm")
    await within(10, end.admit(calm))
    assert calm.order == "local"
    recalled = next(one for one in flood if one.recalled.done())
    again = asyncio.create_task(end.admit_again(recalled))
    end.leave(calm)
    await within(5, again)
    assert recalled.order == "local"


async def test_a_recalled_ticket_is_never_refused_a_place(make_routers, own_redis):
    """Its answer is under way. Neither a full queue nor one that was lost ends it."""
    routers = make_routers(own_redis.url, recall_after_s=0.0, queue_limit=1, queue_timeout_s=0.5)
    routers.capacity = 2
    end = await routers.add()
    flood = [ticket("flood") for _ in range(2)]
    for one in flood:
        await end.admit(one)
    calm = ticket("calm")
    await within(5, end.admit(calm))
    recalled = next(one for one in flood if one.recalled.done())
    again = asyncio.create_task(end.admit_again(recalled))
    with pytest.raises(PenstockError, match="too many"):
        await end.admit(ticket("another"))
    await routers.clients[0].flushall()
    await queued(end, 2, 1)
    done, _ = await asyncio.wait([again], timeout=0.6)  # longer than others may queue
    assert not done
    end.leave(calm)
    await within(5, again)


def test_each_stint_is_charged_by_itself():
    async def stints() -> None:
        used, left = 100.0, 128.0
        claim = Ticket("a", "m", "t", 2, 228, 2.0, lambda: (used, left))
        claim.granted.set_result(None)
        assert (claim.work, claim.missed) == (114, -64)
        used, left = 140.0, 90.0  # 40 tokens made of the 128 expected
        assert claim.missed == -44
        claim.wait_again(claim.left_over)
        assert (claim.cost, claim.missed, claim.holds) == (90, -45, False)
        used = 250.0
        assert claim.missed == 10  # 110 used in this stint, 90 charged
        claim.granted.set_result(None)
        claim.heard()
        claim.wait_again(40.0)
        assert (claim.recalls, claim.missed) == (2, -20)
        used = 260.0
        assert claim.missed == -15  # 10 used in the third, 40 charged

    asyncio.run(stints())


async def test_a_slot_whose_giving_back_was_told_twice_is_given_back(
    make_routers, redis_url, monkeypatch
):
    routers = make_routers(redis_url, recall_after_s=0.0)
    routers.capacity = 2
    end = await routers.add()
    calls, read, lost = end._shared._script._calls, script_line._read_within, []

    async def losing(connection, seconds):
        reply = await read(connection, seconds)
        if not lost and "yield" in calls[0].words:
            lost.append(reply)
            raise RedisConnectionError("Connection closed by server")
        return reply

    monkeypatch.setattr(script_line, "_read_within", losing)
    flood = [ticket("flood") for _ in range(2)]
    for one in flood:
        await end.admit(one)
    calm = ticket("calm")
    await within(5, end.admit(calm))
    await until(lambda: bool(lost) and not end._giving_back)
    assert [one.holds for one in (*flood, calm)] == [True, False, True]
    assert await end.status(["m"]) == (2, 1)


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
