"""A router's end of admission against a real Redis: grants, recalls, leases, outages."""

import asyncio

import grpc
import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.common.config import RouterSettings
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError
from services.common.redis import connect
from services.router import metrics
from services.router.admission import Ticket
from services.router.admission.local_order import LocalOrder
from services.router.admission.shared_order import Reply
from tests.support.admission_ends import queued, ticket
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
    assert (await end._shared.leave("m", [(held.id, 0.0)])).granted == [old.id]
    await end._shared.leave("m", [(young.id, 0.0), (old.id, 0.0)])


async def refusal(waiting: "asyncio.Task[None]") -> tuple[str, float]:
    with pytest.raises(PenstockError) as refused:
        await within(5, waiting)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return refused.value.reason, refused.value.retry_after_s


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
    pipe = end._shared._script
    send, granted, go_on = pipe._round_trip, asyncio.Event(), asyncio.Event()

    async def slow(calls):
        replies = await send(calls)
        granted.set()
        await go_on.wait()
        return replies

    monkeypatch.setattr(pipe, "_round_trip", slow)
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


async def test_leases_outlive_their_time(make_routers, redis_url):
    routers = make_routers(redis_url, slot_lease_s=1.1)
    first, second = await routers.add(), await routers.add()
    a, b = ticket(), ticket()
    await first.admit(a)
    waiting = asyncio.create_task(second.admit(b))
    await queued(second, 1, 1)
    done, _ = await asyncio.wait([waiting], timeout=2.0)  # longer than a lease
    assert not done
    first.leave(a)
    await within(5, waiting)
    second.leave(b)


async def test_more_capacity_wakes_the_waiting(make_routers, redis_url, seldom):
    routers = make_routers(redis_url, **seldom)
    end = await routers.add()
    a, b = ticket(), ticket()
    await end.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    routers.capacity = 2
    end.poke()
    await within(10, waiting)
    end.leave(a)
    end.leave(b)


async def test_many_routers_never_exceed_the_slots(routers):
    routers.capacity = 3
    ends = [await routers.add() for _ in range(3)]
    running = most = served = 0

    async def one(n: int) -> None:
        nonlocal running, most, served
        claim = ticket(f"t{n % 5}", 1 + n % 3, cost=1 + n % 7)
        end = ends[n % 3]
        try:
            await end.admit(claim)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            served += 1
        finally:
            end.leave(claim)

    await asyncio.gather(*(one(n) for n in range(120)))
    assert served == 120
    assert most <= 3
    await queued(ends[0], 0, 0)


async def test_gauges_are_read_while_tickets_come_and_go(routers):
    """The metrics' thread reads them; here what another thread does happens between two looks."""
    end = await routers.add()

    class Moving(Ticket):
        @property
        def holds(self) -> bool:
            end._tickets.pop(self.id, None)
            return True

    for n in range(3):
        end._tickets[f"{n}"] = Moving(f"{n}", "m", "t", 2, 10, 1.0)
    assert [s.value for m in metrics.admitted.collect() for s in m.samples] == [3]


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


# ---- what goes on after its router ---------------------------------------------------------------


async def test_what_held_a_slot_at_a_lost_router_has_one_at_once(routers):
    """Also past the capacity, which the dead router's leases still fill, and past the waiting."""
    lost, end = await routers.add(), await routers.add()
    a, b = ticket(), ticket()
    await lost.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    again = ticket(cost=0)
    again.resumed = True
    await within(5, end.admit(again))
    assert again.holds
    await queued(end, 2, 1)
    lost.leave(a)  # the slots are full without it
    await queued(end, 1, 1)
    assert not waiting.done()
    end.leave(again)
    await within(5, waiting)
    end.leave(b)
    await queued(end, 0, 0)


async def test_what_goes_on_pays_when_it_leaves(routers):
    end = await routers.add()
    a = ticket("long", cost=0)
    a.resumed = True
    a.progress = lambda: (500, 0)  # tokens that it made here
    await end.admit(a)
    await queued(end, 1, 0)
    tasks = {}
    for name in ("long", "calm"):
        claim = ticket(name)
        tasks[name] = asyncio.create_task(end.admit(claim))
        await queued(end, 1, len(tasks))
    end.leave(a)
    await within(5, tasks["calm"])
    assert not tasks["long"].done()
    tasks["long"].cancel()


# ---- recalls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_another", [False, True])
async def test_a_recalled_ticket_waits_again(make_routers, redis_url, of_another):
    """Its slot goes to the other tenant at once, and it has its old turn afterwards."""
    routers = make_routers(redis_url, recall_after_s=0.05)
    routers.capacity = 2
    first, second = await routers.add(), await routers.add()
    await until(lambda: routers.listening(first))
    flood = [ticket("flood") for _ in range(3)]
    for one in flood[:2]:
        await first.admit(one)
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
    reply = await end._shared.leave("m", [(calm.id, 0.0)])
    assert reply.granted == [flood[1].id]
    finish = f"{routers.namespace}:{{admission:m}}:finish"
    assert await routers.clients[0].zscore(finish, "flood") == 2 + 2 + 25
    await end._shared.leave("m", [(one.id, 0.0) for one in flood])


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


# ---- no workers ---------------------------------------------------------------------------------


async def test_without_workers_requests_wait_in_their_order(make_routers, redis_url, seldom):
    routers = make_routers(redis_url, **seldom)
    routers.capacity = 0
    end = await routers.add()
    claims = [ticket("t", lane) for lane in (3, 2, 1)]
    waiting = [asyncio.create_task(end.admit(claim)) for claim in claims]
    await queued(end, 0, 3)
    routers.capacity = 1
    end.poke()
    await within(10, waiting[2])
    assert not waiting[0].done()
    assert not waiting[1].done()
    end.leave(claims[2])
    await within(5, waiting[1])
    end.leave(claims[1])
    await within(5, waiting[0])


async def test_without_workers_the_patience_ends(make_routers, redis_url):
    """It begins when the last worker went or the request came, whichever was later."""
    routers = make_routers(redis_url, worker_patience_s=0.3)
    end = await routers.add()
    a, b = ticket(), ticket()
    await end.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    done, _ = await asyncio.wait([waiting], timeout=0.4)
    assert not done  # there is a worker
    began = asyncio.get_running_loop().time()
    routers.capacity = 0
    end.poke()
    for claim, least_s in ((b, 0.29), (ticket(), 0.59)):
        with pytest.raises(PenstockError) as refused:
            await within(5, waiting if claim is b else end.admit(claim))
        assert refused.value.reason == "no_worker"
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        assert asyncio.get_running_loop().time() - began >= least_s
        end.leave(claim)
    waiting = asyncio.create_task(end.admit(ticket()))
    await queued(end, 1, 1)
    routers.capacity = 2
    end.poke()
    await within(5, waiting)


# ---- Redis is slow, or away ---------------------------------------------------------------------


async def test_one_slow_call_is_no_outage(routers, monkeypatch):
    """The call is made again, whether or not it was carried out; two in a row are an outage."""
    end = await routers.add()
    pipe = end._shared._script
    send = pipe._round_trip
    failures = ["lost reply"]

    async def slow(calls):
        if not failures:
            return await send(calls)
        if failures.pop() == "lost reply":
            await send(calls)
        raise RedisTimeoutError("Timeout reading from socket")

    monkeypatch.setattr(pipe, "_round_trip", slow)
    a, b = ticket(), ticket()
    await within(5, end.admit(a))
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    failures.append("lost reply")
    end.leave(a)
    await within(5, waiting)
    assert not end.away
    assert (a.order, b.order) == ("redis", "redis")
    failures += ["timeout", "timeout"]
    end.poke()
    await until(lambda: end.away)


async def test_a_slot_whose_giving_back_was_told_twice_is_given_back(
    make_routers, redis_url, monkeypatch
):
    routers = make_routers(redis_url, recall_after_s=0.0)
    routers.capacity = 2
    end = await routers.add()
    pipe = end._shared._script
    send, lost = pipe._round_trip, []

    async def losing(calls):
        replies = await send(calls)
        if not lost and any(call[2] == "yield" for call in calls):
            lost.append(replies)
            raise RedisTimeoutError("Timeout reading from socket")
        return replies

    monkeypatch.setattr(pipe, "_round_trip", losing)
    flood = [ticket("flood") for _ in range(2)]
    for one in flood:
        await end.admit(one)
    calm = ticket("calm")
    await within(5, end.admit(calm))
    await until(lambda: bool(lost) and not end._giving_back)
    assert [one.holds for one in (*flood, calm)] == [True, False, True]
    assert await end.status(["m"]) == (2, 1)


async def test_an_outage_costs_each_request_a_task_or_two(routers, monkeypatch):
    """Not one for each other request whose call fails, too."""
    routers.capacity = 0
    end = await routers.add()
    spawned: list[str] = []
    spawn = end._spawn
    monkeypatch.setattr(end, "_spawn", lambda work, name: spawned.append(name) or spawn(work, name))

    async def away(calls):
        raise RedisTimeoutError("Timeout reading from socket")

    monkeypatch.setattr(end._shared._script, "_round_trip", away)
    claims = [ticket() for _ in range(200)]
    waiting = [asyncio.create_task(end.admit(claim)) for claim in claims]
    await until(lambda: end._local.waiting("m") == len(claims))
    await until(lambda: not end._shared._script._waiting)
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
