"""Who may go ahead of the order, and that the order hears of it."""

import asyncio

import pytest

from services.router.admission import room
from services.router.admission.room import Room
from tests.support.admission_ends import queued, ticket
from tests.support.waiting import until, within


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    return now


def taken(one: Room, model: str = "m") -> int:
    """How many may go ahead."""
    count = 0
    while one.take(model):
        count += 1
    return count


@pytest.mark.parametrize(
    ("capacity", "routers", "held", "may"),
    [
        (8, 1, 0, 4),
        (8, 1, 3, 2),
        (8, 1, 7, 0),
        (8, 2, 0, 2),
        (3, 2, 0, 0),
        (8, 0, 0, 4),
        (0, 1, 0, 0),
    ],
)
def test_each_router_takes_its_part_of_half_of_what_is_free(clock, capacity, routers, held, may):
    one = Room(lambda model: capacity, lambda: routers)
    one.hear("m", held, 0)
    assert taken(one) == may


def test_without_news_nobody_goes_ahead(clock):
    one = Room(lambda model: 100, lambda: 1)
    assert not one.take("m")
    one.hear("m", 0, 0)
    assert one.take("m")
    assert not one.take("other")
    clock[0] += 1.1
    assert not one.take("m")
    one.hear("m", 1, 0)
    assert one.take("m")
    one.forget()
    assert not one.take("m")


def test_nobody_passes_those_that_wait(clock):
    one = Room(lambda model: 100, lambda: 1)
    one.hear("m", 50, 1)
    assert not one.take("m")


def test_what_the_order_has_confirmed_makes_room(clock):
    one = Room(lambda model: 8, lambda: 1)
    one.hear("m", 0, 0)
    assert taken(one) == 4
    one.entered("m")
    assert taken(one) == 1


async def test_the_order_hears_of_who_went_ahead(routers):
    routers.capacity = 8
    end, other = await routers.add(), await routers.add()
    first, second = ticket(), ticket()
    await end.admit(first)
    await end.admit(second)
    assert [first.order, second.order] == ["redis", "ahead"]
    await queued(other, 2, 0)  # both are in the order that all share
    end.leave(first)
    end.leave(second)
    await queued(other, 0, 0)


async def test_who_goes_ahead_is_charged(routers, lua):
    """Its tenant is served behind another afterwards."""
    routers.capacity = 4
    end = await routers.add()
    running = [ticket("much", cost=1000) for _ in range(2)]
    for one in running:
        await end.admit(one)
    assert running[1].order == "ahead"
    await queued(end, 2, 0)
    routers.capacity = 2
    waiting = {
        name: asyncio.create_task(end.admit(ticket(name, cost=1))) for name in ("much", "other")
    }
    await queued(end, 2, 2)
    end.leave(running[0])
    await within(5, waiting["other"])
    assert not waiting["much"].done()
    end.leave(running[1])
    await within(5, waiting["much"])


async def test_who_went_ahead_and_left_at_once_leaves_nothing(routers):
    routers.capacity = 8
    end = await routers.add()
    first, second = ticket(), ticket()
    await end.admit(first)
    await end.admit(second)
    end.leave(second)
    await queued(end, 1, 0)
    end.leave(first)
    await queued(end, 0, 0)


async def test_who_asks_the_order_comes_behind_who_went_ahead(routers):
    """So one router never runs more than may."""
    routers.capacity = 2
    end = await routers.add()
    await queued(end, 0, 0)  # it knows that both are free
    claims = [ticket() for _ in range(3)]
    waiting = [asyncio.create_task(end.admit(claim)) for claim in claims]
    await queued(end, 2, 1)
    assert [claim.order for claim in claims[:2]] == ["ahead", "redis"]
    assert [task.done() for task in waiting] == [True, True, False]
    end.leave(claims[0])
    await within(5, waiting[2])


async def test_nobody_goes_ahead_into_slots_that_the_own_router_has_asked_for(routers):
    """Those who went ahead are confirmed; what others asked for meanwhile is under way still."""
    routers.capacity = 10
    end = await routers.add()
    await queued(end, 0, 0)
    script, answer, told = end._shared._script, asyncio.Event(), []

    async def late(reply):
        await answer.wait()
        return await reply

    def called(keys, args):
        reply = script(keys, args)
        if args[0] == "tell":
            told.append((args[8], reply))
        return asyncio.ensure_future(late(reply)) if args[0] == "enter" else reply

    end._shared._script = called
    claims = [ticket() for _ in range(15)]
    waiting = [asyncio.create_task(end.admit(claim)) for claim in claims]
    await until(lambda: bool(told), 5, "who went ahead is told of before who asks")
    [(held, reply)] = told
    assert held == 5, "half of what is free goes ahead"
    await reply
    for _ in range(3):
        await asyncio.sleep(0)  # who called hears of it
    claims += [ticket() for _ in range(5)]
    waiting += [asyncio.create_task(end.admit(claim)) for claim in claims[15:]]
    await asyncio.sleep(0)
    answer.set()
    await queued(end, 10, 10)
    assert sum(claim.holds for claim in claims) == 10
    for claim in claims:
        end.leave(claim)
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_full_model_lets_nobody_ahead(routers):
    routers.capacity = 2
    end = await routers.add()
    claims = [ticket() for _ in range(2)]
    for claim in claims:
        await end.admit(claim)
    late = ticket()
    waiting = asyncio.create_task(end.admit(late))
    await queued(end, 2, 1)
    assert not waiting.done()
    end.leave(claims[0])
    await within(5, waiting)
    assert late.order == "redis"


async def test_who_went_ahead_as_redis_went_goes_on_and_is_entered_later(make_routers, own_redis):
    routers = make_routers(own_redis.url)
    routers.capacity = 8
    end = await routers.add()
    first, second = ticket(), ticket()
    await end.admit(first)
    own_redis.stop()
    await end.admit(second)
    assert second.order == "ahead"
    await until(lambda: end.away)
    assert second.holds
    third = ticket()
    await within(5, end.admit(third))
    assert third.order == "local"
    own_redis.start()
    await until(lambda: not end.away)
    await queued(end, 3, 0)
