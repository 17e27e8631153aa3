"""Admission against a real Redis: the Lua against its model, fairness, leases, outages."""

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis as BlockingRedis

from services.common.config import RouterSettings, Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError
from services.common.redis import Redis, connect
from services.router import metrics
from services.router.admission import _SOURCE, Admission, Ticket
from services.router.fair_order import FairOrder, Waiting
from tests.support.waiting import until

NEVER = 1e6  # seconds


class LuaAdmission:
    """Calls admission.lua directly, as one router."""

    def __init__(self, url: str, ageing_s: float = NEVER, lease_s: float = NEVER) -> None:
        self.redis = BlockingRedis.from_url(url, decode_responses=True)
        self._run = self.redis.register_script(_SOURCE)
        self.root = f"test-{uuid.uuid4().hex}:{{admission:m}}"
        self.ageing_s, self.lease_s = ageing_s, lease_s

    def call(self, capacity: int, op: str, *args: object, router: str = "r1"):
        keys = [self.root, f"{self.root}:grants:"]
        common = [op, router, capacity, self.lease_s, self.ageing_s]
        return self._run(keys=keys, args=[*common, *args])

    def enter(self, capacity, id, tenant, lane=2, work=1.0, waited=0.0, limit=1000, router="r1"):
        return self.call(capacity, "enter", id, tenant, lane, work, waited, limit, router=router)

    def leave(self, capacity, *ids, tenant="", missed=0.0):
        leavers = [part for id in ids for part in (id, tenant, missed)]
        return self.call(capacity, "leave", *leavers)

    def tenants(self) -> dict[str, int]:
        """How many requests of each wait, as the script counts them."""
        counts = self.redis.zrange(f"{self.root}:tenants", 0, -1, withscores=True)
        return {tenant: int(count) for tenant, count in counts}

    def keys(self) -> set[str]:
        return {key[len(self.root) + 1 :] for key in self.redis.keys(f"{self.root}:*")}

    def close(self) -> None:
        for key in self.redis.keys(f"{self.root}*"):
            self.redis.delete(key)
        self.redis.close()


@pytest.fixture
def lua(redis_url):
    made = LuaAdmission(redis_url)
    yield made
    made.close()


ENTER = st.tuples(
    st.just("enter"),
    st.sampled_from("abcd"),
    st.integers(1, 3),
    st.sampled_from([1.0, 2.5, 8.0, 100.0]),
)
LEAVE_HELD = st.tuples(
    st.just("leave held"), st.integers(0, 10), st.sampled_from([0.0, -0.5, -100.0, 4.0])
)
LEAVE_WAITING = st.tuples(st.just("leave waiting"), st.integers(0, 10))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flood=st.integers(0, 10),  # requests of one tenant that come first
    ops=st.lists(st.one_of(ENTER, LEAVE_HELD, LEAVE_WAITING), max_size=60),
    capacity=st.integers(0, 4),
    limit=st.integers(0, 8),
)
def test_the_script_is_the_order(redis_url, flood, ops, capacity, limit):
    """Whatever comes and goes, the Lua grants and displaces exactly what the Python order does,
    slots are never lost nor given twice, and nothing remains at the end."""
    lua = LuaAdmission(redis_url)
    order = FairOrder(NEVER)
    held: list[str] = []
    waiting: list[str] = []
    tenants: dict[str, str] = {}

    def pump() -> list[str]:
        now = []
        while len(held) < capacity and (id := order.pop(0.0)):
            waiting.remove(id)
            held.append(id)
            now.append(id)
        return now

    try:
        for number, (op, *args) in enumerate([("enter", "a", 2, 1.0)] * flood + ops):
            if op == "enter":
                tenant, lane, work = args
                id = f"q{number:03}"
                tenants[id] = tenant
                state, granted, before, _, displaced = lua.enter(
                    capacity, id, tenant, lane, work, limit=limit
                )
                assert (granted, before) == ([], len(waiting))
                place = None
                if len(held) < capacity:
                    expected = "granted"
                    order.charge(tenant, work)
                    held.append(id)
                elif len(waiting) >= limit and not (place := order.displace(tenant, limit)):
                    expected = "full"
                else:
                    expected = "waiting"
                    order.add(Waiting(id, tenant, lane, work, float(number)))
                    waiting.append(id)
                if place:
                    waiting.remove(place)
                assert (state, displaced) == (expected, [place] if place else [])
            elif op == "leave held" and held:
                number, missed = args
                id = held.pop(number % len(held))
                order.settle(tenants[id], missed)
                granted = lua.leave(capacity, id, tenant=tenants[id], missed=missed)
                assert granted == pump()
            elif op == "leave waiting" and waiting:
                id = waiting.pop(args[0] % len(waiting))
                order.remove(id)
                assert lua.leave(capacity, id) == []
            assert lua.call(capacity, "status") == [len(held), len(waiting)]
            assert lua.tenants() == Counter(tenants[id] for id in waiting)
            assert len(held) == capacity or not waiting
        while held:
            lua.leave(capacity, *held)
            held.clear()
            pump()
        lua.leave(0, *waiting)
        assert lua.keys() <= {"clock", "finish"}
    finally:
        lua.close()


def test_tenants_share_by_weight(lua):
    """Three tenants with a backlog: served work is in the ratio of the weights."""
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    lua.enter(1, "first", "x")
    rng = random.Random(1)
    costs = {}
    for n in range(80):
        for tenant, weight in weights.items():
            costs[f"{tenant}{n}"] = cost = rng.choice([50, 100, 400])
            lua.enter(1, f"{tenant}{n}", tenant, work=cost / weight)
    served = dict.fromkeys(weights, 0.0)
    running = ["first"]
    for _ in range(100):
        running = lua.leave(1, *running)
        served[running[0][0]] += costs[running[0]]
    assert served["b"] / served["a"] == pytest.approx(2, rel=0.25)
    assert served["c"] / served["a"] == pytest.approx(4, rel=0.25)


def test_what_the_cost_missed_is_settled(lua):
    """By expectation all requests cost the same; one tenant's turn out nine times as long."""
    lua.enter(1, "first", "x")
    for n in range(40):
        lua.enter(1, f"a{n}", "a", work=1)
        lua.enter(1, f"b{n}", "b", work=1)
    running = lua.leave(1, "first", tenant="x")[0]
    served = Counter[str]()
    for _ in range(40):
        served[running[0]] += 1
        missed = 8 if running[0] == "a" else 0
        running = lua.leave(1, running, tenant=running[0], missed=missed)[0]
    assert served["b"] / served["a"] == pytest.approx(9, rel=0.2)


def test_what_was_not_used_is_given_back_once(lua):
    lua.enter(1, "a0", "a", work=10)
    lua.enter(1, "a1", "a", work=1)
    lua.enter(1, "b0", "b", work=1)
    assert lua.leave(1, "a0", tenant="a", missed=-10) == ["a1"]  # equals, the first by name
    assert lua.leave(1, "a0", tenant="a", missed=-10) == []
    lua.enter(1, "a2", "a", work=1)
    assert lua.leave(1, "a1", tenant="a") == ["b0"]


def test_a_flood_does_not_delay_another_tenant(lua):
    lua.enter(1, "first", "flood")
    for n in range(100):
        lua.enter(1, f"f{n}", "flood")
    lua.enter(1, "other", "calm")
    assert lua.leave(1, "first") == ["other"]


def test_a_flood_leaves_the_queue_open_to_others(lua):
    """Each newcomer takes the flood's last place until all have an equal part; then it is full."""
    lua.enter(1, "first", "flood")
    for n in range(6):
        lua.enter(1, f"f{n}", "flood", lane=1 + n % 2, limit=6)
    assert lua.enter(1, "f6", "flood", limit=6)[0] == "full"
    gave = []
    for n in range(2):
        for tenant in "ab":
            state, _, before, _, displaced = lua.enter(1, f"{tenant}{n}", tenant, limit=6)
            assert (state, before) == ("waiting", 6)
            gave += displaced
    assert gave == ["f5", "f3", "f1", "f4"]  # the normal lane first, in each the newest
    assert lua.tenants() == {"flood": 2, "a": 2, "b": 2}
    for tenant in ("flood", "a", "b", "flood"):  # nobody's place is taken back and forth
        assert lua.enter(1, f"{tenant}-more", tenant, limit=6)[0] == "full"
    state, *_, displaced = lua.enter(1, "c0", "c", lane=3, limit=6)
    assert (state, displaced) == ("waiting", ["f2"])  # of equals, the last by name
    assert lua.call(1, "status") == [1, 6]


def test_a_lift_keeps_the_count(redis_url):
    lua = LuaAdmission(redis_url, ageing_s=0.01)
    try:
        lua.enter(1, "first", "a")
        lua.enter(1, "low", "a", lane=3, waited=1.0)
        lua.enter(1, "other", "a")
        assert lua.redis.zcard(f"{lua.root}:line:1:a") == 1  # the low one has been lifted
        assert lua.tenants() == {"a": 2}
    finally:
        lua.close()


def test_no_request_starves(redis_url):
    """A low request behind an endless stream of high ones is served once it has aged."""
    lua = LuaAdmission(redis_url, ageing_s=0.2)
    try:
        lua.enter(1, "first", "high", lane=1)
        lua.enter(1, "low", "low", lane=3)
        running, began, n = ["first"], time.monotonic(), 0
        while running != ["low"]:
            lua.enter(1, f"h{n}", "high", lane=1)
            running = lua.leave(1, *running)
            n += 1
            assert time.monotonic() - began < 5
        assert time.monotonic() - began > 0.35  # it did wait for two lifts
        assert n > 2
    finally:
        lua.close()


def test_a_fresh_request_does_not_overtake(lua):
    lua.enter(1, "a", "t")
    lua.enter(1, "b", "t")
    # A slot more, seen first by a newcomer: the waiting one gets it.
    state, granted, before, *_ = lua.enter(2, "c", "t")
    assert (state, granted, before) == ("waiting", ["b"], 0)


def test_full_queue_advises_from_the_drain_rate(lua):
    lua.enter(1, "a", "t")
    for id in "bcd":
        lua.enter(1, id, "t")
    lua.leave(1, "a")
    time.sleep(0.2)  # the interval that is measured
    lua.leave(1, "b")
    lua.enter(1, "e", "t")
    state, _, before, advice, _ = lua.enter(1, "f", "t", limit=2)
    assert (state, before) == ("full", 2)
    assert 0.2 * 3 <= float(advice) < 5
    assert lua.call(1, "status") == [1, 2]


def test_a_dead_routers_slots_and_places_return(redis_url):
    lua = LuaAdmission(redis_url, lease_s=0.3)
    try:
        lua.enter(1, "dead-held", "t", router="dead")
        lua.enter(1, "dead-waiting", "t", router="dead")
        lua.enter(1, "mine", "t")
        began = time.monotonic()
        granted: list[str] = []
        while not granted and time.monotonic() - began < 5:
            granted, unknown = lua.call(1, "renew", 0, "mine")
            assert unknown == []
        assert granted == ["mine"]
        assert lua.tenants() == {}
        assert lua.call(1, "status") == [1, 0]
    finally:
        lua.close()


def test_grants_of_other_routers_are_published(lua):
    listener = lua.redis.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(f"{lua.root}:grants:r2")
    listener.get_message(timeout=5)
    lua.enter(1, "a", "t")
    lua.enter(1, "b", "t", router="r2")
    assert lua.leave(1, "a") == []
    deadline = time.monotonic() + 5
    message = None
    while message is None and time.monotonic() < deadline:
        message = listener.get_message(timeout=0.1)
    assert json.loads(message["data"]) == ["granted", lua.root, "b"]
    listener.close()
    # And should that message be lost, renewing tells.
    assert lua.call(1, "renew", 0, "b", router="r2") == [["b"], []]


# ---- the router's end -------------------------------------------------------------------------


class Routers:
    """Admission ends of several routers, with a capacity that tests set."""

    def __init__(self, url: str, namespace: str, **options: object) -> None:
        self.capacity = 1
        self.url, self.namespace = url, namespace
        self.options = options
        self.ends: list[Admission] = []
        self.clients: list[Redis] = []

    async def add(self) -> Admission:
        client = connect(self.url)
        self.clients.append(client)
        options = RouterSettings(**self.options)  # type: ignore[arg-type]
        end = Admission(
            client,
            Settings(redis_url=self.url, namespace=self.namespace, router=options),
            f"router-{len(self.ends)}",
            lambda model: self.capacity,
            lambda: len(self.ends),
        )
        await end.start()
        self.ends.append(end)
        return end

    async def close(self) -> None:
        for end in self.ends:
            await end.stop()
        for client in self.clients:
            await client.aclose()


def ticket(tenant: str = "t", lane: int = 2, cost: float = 10) -> Ticket:
    return Ticket(uuid.uuid4().hex, "m", tenant, lane, cost, 1.0)


@pytest.fixture
async def make_routers(namespace) -> AsyncIterator[Callable[..., Routers]]:
    made: list[Routers] = []

    def make(url: str, **options: object) -> Routers:
        made.append(Routers(url, namespace, **options))
        return made[-1]

    yield make
    for routers in made:
        await routers.close()


@pytest.fixture
def routers(make_routers, redis_url) -> Routers:
    return make_routers(redis_url)


async def queued(end: Admission, held: int, waiting: int) -> None:
    async def reached() -> bool:
        return await end.status(["m"]) == (held, waiting)

    await until(reached, what=f"{held} held, {waiting} waiting")


async def test_a_grant_reaches_the_other_router(routers):
    first, second = await routers.add(), await routers.add()
    a, b = ticket(), ticket()
    await first.admit(a)
    waiting = asyncio.create_task(second.admit(b))
    await queued(first, 1, 1)
    first.leave(a)
    await asyncio.wait_for(waiting, 5)
    assert b.order == "redis"
    second.leave(b)
    await queued(first, 0, 0)


async def refusal(waiting: "asyncio.Task[None]") -> tuple[str, float]:
    with pytest.raises(PenstockError) as refused:
        await asyncio.wait_for(waiting, 5)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return refused.value.reason, refused.value.retry_after_s


@pytest.mark.parametrize("of_another", [False, True])
async def test_the_displaced_is_told(make_routers, redis_url, of_another):
    routers = make_routers(redis_url, queue_limit=2)
    first, second = await routers.add(), await routers.add()
    await until(lambda: listening(routers, first))
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
    await asyncio.wait_for(other, 5)
    end.leave(calm)
    await asyncio.wait_for(waiting[0], 5)


async def listening(routers: "Routers", end: Admission) -> bool:
    channel = end._channel(end._router_id)
    return (await routers.clients[0].pubsub_numsub(channel))[0][1] == 1


async def test_a_lost_word_of_displacement_is_found_by_the_renewal(make_routers, redis_url):
    routers = make_routers(redis_url, queue_limit=2)
    end = await routers.add()
    end._displace = lambda id, advice_s: None  # type: ignore[method-assign]
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
    await asyncio.wait_for(waiting, 5)
    second.leave(b)


async def test_more_capacity_wakes_the_waiting(routers):
    end = await routers.add()
    a, b = ticket(), ticket()
    await end.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    routers.capacity = 2
    end.poke()
    await asyncio.wait_for(waiting, 0.9)  # sooner than the next renewal
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


@pytest.fixture
def own_redis():
    with EmbeddedRedis() as server:
        yield server


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
    await asyncio.wait_for(waiting["c"], 5)
    assert c.order == "local"
    assert not waiting["b"].done()
    own_redis.start()
    await until(lambda: not end.away)
    await queued(end, 1, 2)  # c's slot was entered again, and the two places
    end.leave(c)
    await asyncio.wait_for(waiting["b"], 5)
    assert b.order == "redis"
    end.leave(b)
    await asyncio.wait_for(waiting["low"], 5)
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
        await until(lambda n=n: len(end._order("m")) == n + 1)
    with pytest.raises(PenstockError, match="too many"):
        await end.admit(ticket("flood"))
    calm = asyncio.create_task(end.admit(ticket("calm")))
    assert (await refusal(flood[1]))[0] == "queue_full"
    end.leave(a)
    await asyncio.wait_for(calm, 5)
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
        await asyncio.wait_for(waiting, 5)
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert refused.value.reason == "admission_away"
    assert refused.value.retry_after_s > 0
    assert a.holds  # what runs goes on
    end.leave(a)
    end.leave(b)


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
    await asyncio.wait_for(waiting, 5)
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
        await asyncio.wait_for(end.admit(b), 5)  # sooner than a lease
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


async def test_what_held_a_slot_at_a_lost_router_has_one_at_once(routers):
    """Also past the capacity, which the dead router's leases still fill, and past the waiting."""
    lost, end = await routers.add(), await routers.add()
    a, b = ticket(), ticket()
    await lost.admit(a)
    waiting = asyncio.create_task(end.admit(b))
    await queued(end, 1, 1)
    again = ticket(cost=0)
    again.resumed = True
    await asyncio.wait_for(end.admit(again), 5)
    assert again.holds
    await queued(end, 2, 1)
    lost.leave(a)  # the slots are full without it
    await queued(end, 1, 1)
    assert not waiting.done()
    end.leave(again)
    await asyncio.wait_for(waiting, 5)
    end.leave(b)
    await queued(end, 0, 0)


async def test_what_goes_on_pays_when_it_leaves(routers):
    end = await routers.add()
    a = ticket("long", cost=0)
    a.resumed = True
    await end.admit(a)
    await queued(end, 1, 0)
    tasks = {}
    for name in ("long", "calm"):
        claim = ticket(name)
        tasks[name] = asyncio.create_task(end.admit(claim))
        await queued(end, 1, len(tasks))
    a.used = 500  # tokens that it made here
    end.leave(a)
    await asyncio.wait_for(tasks["calm"], 5)
    assert not tasks["long"].done()
    tasks["long"].cancel()
