"""A router's end of admission while Redis is slow, away or emptied, and after it."""

import asyncio
from typing import Any, cast
from unittest.mock import Mock

import grpc
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.common import script_line
from services.common.config import RouterSettings, Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError
from services.common.redis import connect
from services.router import metrics
from services.router.admission import admission, news
from services.router.admission.local_order import LocalOrder
from services.router.admission.shared_order import Reply, SharedOrder
from tests.support.admission_ends import queued, refusal, ticket
from tests.support.waiting import until, within


async def test_open_without_redis_and_back(make_routers, own_redis):
    """Redis dies under held slots and a queue: both go on, in order, and return to Redis."""
    routers = make_routers(own_redis.url)
    end = await routers.add()
    a, b, c, low = ticket(), ticket(), ticket(lane=1), ticket(lane=3)
    await end.admit(a)
    waiting = {name: asyncio.create_task(end.admit(t)) for name, t in {"b": b, "low": low}.items()}
    await queued(end, 1, 2)
    own_redis.stop()
    waiting["c"] = asyncio.create_task(end.admit(c))
    await until(lambda: end.away)
    assert not waiting["b"].done()
    end.leave(a)
    await within(5, waiting["c"])
    assert c.order == "local"
    assert not waiting["b"].done()
    own_redis.start()
    await until(lambda: not end.away)
    await queued(end, 1, 2)  # c's slot was entered again, and the two places
    end.leave(c)
    await within(5, waiting["b"])
    assert b.order == "redis"
    end.leave(b)
    await within(5, waiting["low"])
    end.leave(low)
    await queued(end, 0, 0)


async def test_a_full_queue_is_shared_without_redis_too(make_routers, own_redis):
    routers = make_routers(own_redis.url, queue_limit=2)
    end = await routers.add()
    own_redis.stop()
    a = ticket("flood")
    await end.admit(a)
    flood = []
    for n in range(2):
        flood.append(asyncio.create_task(end.admit(ticket("flood"))))
        await until(lambda n=n: end._local.waiting("m") == n + 1)
    with pytest.raises(PenstockError, match="too many"):
        await end.admit(ticket("flood"))
    calm = asyncio.create_task(end.admit(ticket("calm")))
    assert (await refusal(flood[1]))[0] == "queue_full"
    end.leave(a)
    await within(5, calm)
    assert not flood[0].done()
    flood[0].cancel()


async def test_closed_without_redis(make_routers, own_redis):
    routers = make_routers(own_redis.url, admission_without_redis="closed")
    end = await routers.add()
    a, b = ticket(), ticket()
    await end.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    own_redis.stop()
    with pytest.raises(PenstockError) as refused:
        await within(5, waiting)
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert refused.value.reason == "admission_away"
    assert refused.value.retry_after_s > 0
    assert a.holds  # what runs goes on
    end.leave(a)
    end.leave(b)


async def test_what_was_recalled_goes_on_without_redis_though_admission_is_closed():
    """Its answer is under way."""
    settings = RouterSettings(admission_without_redis="closed")
    order = LocalOrder(settings, lambda model: 1, lambda: 1, {})
    with pytest.raises(PenstockError, match="closed"):
        order.enter(ticket(), 9)
    recalled = ticket()
    recalled.recalls = 1
    assert order.enter(recalled, 9).first == "granted"


async def test_flushed_redis_is_told_again(make_routers, own_redis):
    routers = make_routers(own_redis.url)
    end = await routers.add()
    a, b = ticket(), ticket()
    await end.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    await routers.clients[0].flushall()
    await queued(end, 1, 1)
    end.leave(a)
    await within(5, waiting)
    end.leave(b)
    await queued(end, 0, 0)


async def test_what_left_during_an_outage_frees_its_slot_after_it(make_routers, tmp_path):
    with EmbeddedRedis(tmp_path) as server:  # it remembers the slots
        routers = make_routers(server.url)
        end = await routers.add()
        a, b = ticket(), ticket()
        await end.admit(a)
        server.stop()
        end.leave(a)
        await until(lambda: end.away)
        server.start()
        await until(lambda: not end.away)
        await within(5, end.admit(b))  # sooner than a lease
        assert b.order == "redis"
        end.leave(b)
        await queued(end, 0, 0)


async def test_what_went_ahead_as_redis_went_away_is_told_of_by_renewals(
    make_routers, own_redis, monkeypatch
):
    """Only what holds its slot still; and there is as much room as before."""
    monkeypatch.setattr(news, "GATHER_S", 1000.0)
    routers = make_routers(own_redis.url)
    end = await routers.add()
    routers.capacity = 100
    await queued(end, 0, 0)
    stays, gone = ticket(), ticket()
    for one in (stays, gone):
        await end.admit(one)
        assert one.order == "ahead"
    own_redis.stop()
    end._lose_redis(ConnectionError("away"))
    assert not len(end._news)
    assert not end._room._ahead.total()
    end.leave(gone)
    own_redis.start()
    await until(lambda: not end.away)
    await queued(end, 1, 0)
    assert not end._room._ahead.total()
    end.leave(stays)
    await queued(end, 0, 0)


async def test_a_burst_is_no_outage(routers, redis_url):
    routers.capacity = 2000
    end = await routers.add()
    claims = [ticket() for _ in range(1000)]
    await asyncio.gather(*(end.admit(claim) for claim in claims))
    assert {claim.order for claim in claims} == {"redis"}
    for claim in claims:
        end.leave(claim)
    await queued(end, 0, 0)
    client = connect(redis_url)
    assert len(await client.client_list()) < 20
    await client.aclose()


async def test_one_lost_reply_is_no_outage(routers, monkeypatch):
    """The call is made again, whether or not it was carried out; two in a row are an outage."""
    end = await routers.add()
    read = script_line._read_within
    failures = ["lost reply"]

    async def lossy(connection, seconds):
        if not failures:
            return await read(connection, seconds)
        if failures.pop() == "lost reply":
            await read(connection, seconds)
        raise RedisConnectionError("Connection closed by server")

    monkeypatch.setattr(script_line, "_read_within", lossy)
    a, b = ticket(), ticket()
    await within(5, end.admit(a))
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    failures.append("lost reply")
    end.leave(a)
    await within(5, waiting)
    assert not end.away
    assert (a.order, b.order) == ("redis", "redis")
    failures += ["closed", "closed"]
    end.poke()
    await until(lambda: end.away)


async def test_an_outage_costs_each_request_a_task_or_two(routers, monkeypatch):
    """Not one for each other request whose call fails, too."""
    routers.capacity = 0
    end = await routers.add()
    spawned: list[str] = []
    spawn = end._spawn
    monkeypatch.setattr(end, "_spawn", lambda work, name: spawned.append(name) or spawn(work, name))

    async def away(*_):
        raise RedisTimeoutError("Timeout reading from socket")

    monkeypatch.setattr(script_line, "_read_within", away)
    claims = [ticket() for _ in range(200)]
    waiting = [asyncio.create_task(end.admit(claim)) for claim in claims]
    await until(lambda: end._local.waiting("m") == len(claims))
    await until(lambda: not end._shared._script._calls)
    for task in waiting:
        task.cancel()
    for claim in claims:
        end.leave(claim)
    assert len(spawned) < 3 * len(claims)


async def test_what_redis_decides_during_an_outage_is_no_surprise(routers):
    """It was slow, and granted and recalled what only waits in this router's own order."""
    end = await routers.add()
    a, b = ticket(), ticket()
    await end.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    end._lose_redis(RedisTimeoutError("Timeout reading from socket"))
    end._local.enter(b, 1)
    end._follow("m", Reply(granted=[b.id], recalled=[b.id]))
    await within(5, waiting)
    assert b.recalled.done()
    assert not b.holds
    for one in (a, b):
        end.leave(one)
    await until(lambda: not end.away)
    await queued(end, 0, 0)


async def test_without_redis_each_router_keeps_to_its_share(make_routers, own_redis):
    """Each fills its share, less what it holds already: together they run no more than the slots
    and what one held above its share when Redis went."""
    routers = make_routers(own_redis.url, queue_timeout_s=20)
    routers.capacity = 4
    first, second = await routers.add(), await routers.add()
    held = [ticket() for _ in range(3)]
    for one in held:
        await first.admit(one)
    own_redis.stop()
    claims = {end: [ticket() for _ in range(4)] for end in (first, second)}
    waiting = [asyncio.create_task(end.admit(claim)) for end in claims for claim in claims[end]]
    await until(lambda: first.away and second.away)
    await until(lambda: sum(claim.holds for claim in claims[second]) == 2)
    await until(lambda: first._local.waiting("m") == 4)
    assert sum(claim.holds for claim in claims[first]) == 0
    assert second._local.waiting("m") == 2
    assert first._holding() + second._holding() == 5  # 4, and the one above the share of 2
    first.leave(held[0])
    assert sum(claim.holds for claim in claims[first]) == 0
    first.leave(held[1])
    assert sum(claim.holds for claim in claims[first]) == 1
    assert first._holding() + second._holding() == 4
    for task in waiting:
        task.cancel()


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
    await until(lambda: not len(end._news) or end.away)
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
        connection_pool = Mock()

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
    monkeypatch.setattr(news, "_KEPT", 2)
    monkeypatch.setattr(admission, "_RENEW_S", 1000.0)
    routers = make_routers(own_redis.url, slot_lease_s=3000.0)
    end = await routers.add()
    routers.capacity = 5
    tickets = [ticket() for _ in range(5)]
    for one in tickets:
        await end.admit(one)
    told: list[list[tuple[str, float]]] = []
    tell = end._shared.tell

    def spy(model, held, leavers):
        told.append(list(leavers))
        return tell(model, held, leavers)

    monkeypatch.setattr(end._shared, "tell", spy)
    own_redis.stop()
    for one in tickets:
        end.leave(one)
    await until(lambda: end.away)
    await until(lambda: not any(t.get_name() == "admission news" for t in end._tasks))
    told.clear()
    own_redis.start()
    end.poke()
    await until(lambda: not end.away and bool(told))
    assert [[id for id, _ in leavers] for leavers in told] == [[one.id for one in tickets[-2:]]]


@pytest.mark.parametrize(
    "junk", ["no JSON", "[]", '["renamed", "{m}", "id", "0"]', '["granted", 1, "id", "0"]', "7"]
)
async def test_a_word_that_cannot_be_read_ends_nobody(make_routers, redis_url, seldom, junk):
    """It may be of another version: all routers hear it at the same moment."""
    routers = make_routers(redis_url, **seldom)
    first, second = await routers.add(), await routers.add()
    await until(lambda: routers.listening(first))
    one = ticket()
    await second.admit(one)
    waiting = asyncio.create_task(first.admit(ticket()))
    await queued(first, 1, 1)
    channel = first._shared.channel(first._shared._router_id)
    await routers.clients[0].publish(channel, junk)
    second.leave(one)  # its word comes behind
    await within(5, waiting)
    first.check()
