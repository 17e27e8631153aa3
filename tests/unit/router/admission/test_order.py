"""The order in Redis: the script against its model in Python, fairness, leases, lost keys."""

import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis as BlockingRedis

from services.router.admission.fair_order import Decided, FairOrder, Request
from services.router.admission.shared_order import SOURCE

NEVER = 1e6  # seconds
CLOCK = "call('TIME')"
LATER = "{CLOCK}; time[1] = time[1] + (call('GET', KEYS[1] .. '-later') or 0)".replace(
    "{CLOCK}", CLOCK
)
assert SOURCE.count(CLOCK) == 1


class Script:
    """Calls order.lua directly, as any router."""

    def __init__(
        self,
        url: str,
        ageing_s: float = NEVER,
        lease_s: float = NEVER,
        patience_s: float = 0.0,
        recalls: int = 0,
    ) -> None:
        self.redis = BlockingRedis.from_url(url, decode_responses=True)
        self._run = self.redis.register_script(SOURCE.replace(CLOCK, LATER))
        self.root = f"test-{uuid.uuid4().hex}:{{admission:m}}"
        self.options = [lease_s, ageing_s, patience_s, recalls]

    def call(self, capacity: int, op: str, *args: object, router: str = "r1"):
        """(granted, displaced, recalled, the op's first and second result)"""
        common = [op, router, f"{self.root}:word:", capacity, *self.options]
        granted, displaced, recalled, advice, *own = self._run([self.root], [*common, *args])
        self.advice_s = float(advice)
        return granted, displaced, recalled, *own

    def enter(
        self,
        capacity,
        id,
        tenant,
        lane=2,
        work=1.0,
        waited=0.0,
        limit=1000,
        weight=1.0,
        router="r1",
    ):
        """(state, how many waited, granted, displaced, recalled)"""
        facts = [id, tenant, lane, work, weight, 0, waited, limit]
        *lists, state, before = self.call(capacity, "enter", *facts, router=router)
        return state, before, *lists

    def leave(self, capacity, *ids, missed=0.0):
        """What was granted."""
        leavers = [part for id in ids for part in (id, missed)]
        return self.call(capacity, "leave", *leavers)[0]

    def give_back(self, capacity, id, missed=0.0, left=1.0, waited=0.0, router="r1"):
        """(state, granted, recalled)"""
        reply = self.call(capacity, "yield", id, missed, left, waited, router=router)
        return reply[3], reply[0], reply[2]

    def renew(self, capacity, held=(), waiting=(), router="r1"):
        """(granted, recalled, lost, unknown)"""
        reply = self.call(capacity, "renew", len(held), *held, *waiting, router=router)
        return reply[0], reply[2], reply[3] or [], reply[4] or []

    def status(self, capacity) -> list[int]:
        return list(self.call(capacity, "status")[3:])

    def pass_time(self, seconds: float) -> None:
        """From here on it is so much later."""
        self.redis.incrbyfloat(f"{self.root}-later", seconds)

    def lapse(self, id: str) -> None:
        """Its lease is over, as if its router had been silent for so long."""
        for key in ("held", "waiting"):
            self.redis.zadd(f"{self.root}:{key}", {id: 1}, xx=True)

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
def make_script(redis_url):
    made: list[Script] = []

    def make(**options: object) -> Script:
        made.append(Script(redis_url, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for script in made:
        script.close()


@pytest.fixture
def lua(make_script) -> Script:
    return make_script()


ENTER = st.tuples(
    st.just("enter"),
    st.sampled_from(["a", "a1", "a12", "b"]),  # one's name may begin with another's
    st.integers(1, 3),
    st.sampled_from([1.0, 2.5, 8.0, 100.0]),
)
LEAVE_HELD = st.tuples(
    st.just("leave held"), st.integers(0, 10), st.sampled_from([0.0, -0.5, -100.0, 4.0])
)
LEAVE_WAITING = st.tuples(st.just("leave waiting"), st.integers(0, 10))
GIVE_BACK = st.tuples(
    st.just("give back"), st.integers(0, 10), st.sampled_from([0.0, -2.5, 4.0]), st.just(1.5)
)
KEYS = [
    *("clock", "finish", "entries", "held", "slots", "shares", "asked", "waiting", "line"),
    *("tenants", "since", "lift", "lane:1", "lane:2", "lane:3", "lane:4", "lane:5", "lane:6"),
]
WEIGHTS = {"a": 1.0, "a1": 1.0, "a12": 2.0, "b": 0.3}


class Both:
    """The script and its model, called alike; every answer must be the same."""

    def __init__(self, lua: Script, order: FairOrder, capacity: int, limit: int) -> None:
        self.lua, self.order = lua, order
        self.capacity, self.limit = capacity, limit
        self.held: list[str] = []
        self.waiting: list[str] = []
        self.asked: list[str] = []
        self.requests: dict[str, Request] = {}
        self.gone: Counter[str] = Counter()  # how often each gave its slot back
        self.now = 0.0

    def enter(self, tenant: str, lane: int, work: float) -> None:
        self.now += 1
        id, decided = f"q{len(self.requests):03}", Decided()
        weight = WEIGHTS[tenant]
        self.requests[id] = new = Request(id, tenant, lane, work, weight, self.now)
        expected = self.order.enter(new, self.limit, self.capacity, self.now, decided)
        state, before, *lists = self.lua.enter(
            self.capacity, id, tenant, lane, work, limit=self.limit, weight=weight
        )
        assert (state, before) == expected
        assert before == len(self.waiting)
        if state != "full":
            (self.held if state == "granted" else self.waiting).append(id)
        self.follow(decided, lists)

    def leave(self, ids: list[str], place: int, missed: float) -> None:
        self.now += 1
        id, decided = ids.pop(place % len(ids)), Decided()
        self.asked = [one for one in self.asked if one != id]
        self.order.leave(id, missed, self.now)
        self.order.look(self.capacity, self.now, decided)
        self.follow(decided, self.lua.call(self.capacity, "leave", id, missed))

    def give_back(self, place: int, missed: float, left: float) -> None:
        self.now += 1
        id, decided = self.asked.pop(place % len(self.asked)), Decided()
        expected = self.order.give_back(id, missed, left, self.capacity, self.now, decided)
        *lists, state, _ = self.lua.call(self.capacity, "yield", id, missed, left, 0.0)
        assert state == expected
        if state == "waiting":
            self.held.remove(id)
            self.waiting.append(id)
            self.gone[id] += 1
        self.follow(decided, lists)

    def follow(self, decided: Decided, told: Iterable[object]) -> None:
        assert list(told)[:3] == [decided.granted, decided.displaced, decided.recalled]
        for id in decided.granted:
            self.waiting.remove(id)
            self.held.append(id)
        for id in decided.displaced:
            self.waiting.remove(id)
            assert not self.gone[id]  # nobody's answer ends in the middle
        for id in decided.recalled:
            assert id in self.held
            assert self.gone[id] < 2
            self.asked.append(id)

    def check(self) -> None:
        assert self.lua.status(self.capacity) == [len(self.held), len(self.waiting)]
        assert self.lua.tenants() == Counter(self.requests[id].tenant for id in self.waiting)
        assert len(self.held) == self.capacity or not self.waiting
        assert len(self.waiting) <= self.limit + sum(self.gone.values())
        assert set(self.lua.redis.zrange(f"{self.lua.root}:asked", 0, -1)) == set(self.asked)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flood=st.integers(0, 10),  # requests of one tenant that come first
    ops=st.lists(st.one_of(ENTER, ENTER, LEAVE_HELD, LEAVE_WAITING, GIVE_BACK), max_size=60),
    capacity=st.integers(0, 6),
    limit=st.integers(0, 8),
    recalls=st.integers(0, 2),
)
def test_the_script_is_the_order(redis_url, flood, ops, capacity, limit, recalls):
    """Whatever comes and goes, the Lua grants, displaces and recalls exactly what the Python order
    does, slots are never lost nor given twice, and nothing remains at the end."""
    lua = Script(redis_url, recalls=recalls)
    both = Both(lua, FairOrder(NEVER, 0.0, recalls), capacity, limit)
    try:
        for op, *args in [("enter", "a", 2, 1.0)] * flood + ops:
            if op == "enter":
                both.enter(*args)
            elif op == "leave held" and both.held:
                both.leave(both.held, *args)
            elif op == "leave waiting" and both.waiting:
                both.leave(both.waiting, *args, 0.0)
            elif op == "give back" and both.asked:
                both.give_back(*args)
            both.check()
        while both.held:
            both.leave(both.held, 0, 0.0)
        lua.leave(0, *both.waiting)
        assert lua.keys() <= {"clock", "finish"}
    finally:
        lua.close()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    ops=st.lists(st.one_of(ENTER, LEAVE_HELD, GIVE_BACK), min_size=5, max_size=25),
    losses=st.lists(
        st.sets(
            st.sampled_from(KEYS),
            min_size=1,
        ),
        max_size=4,
    ),
    data=st.data(),
)
def test_any_keys_may_be_lost(redis_url, ops, losses, data):
    """Whichever keys are evicted or deleted between calls, no call fails, and as soon as the router
    has renewed all is as it knows it: what it holds is held, what waits waits, and goes on."""
    lua = Script(redis_url, recalls=2)
    held, waiting = set[str](), set[str]()
    facts = {}
    try:
        for number, (op, *args) in enumerate(ops):
            if losses and data.draw(st.booleans()):
                lua.redis.delete(*(f"{lua.root}:{key}" for key in losses.pop()))
            granted: list[str] = []
            if op == "enter":
                tenant, lane, work = args
                facts[id := f"q{number:03}"] = (tenant, lane, work)
                state, _, granted, _, _ = lua.enter(2, id, tenant, lane, work)
                (held if state == "granted" else waiting).add(id)
            elif op == "leave held" and held:
                held.remove(id := sorted(held)[args[0] % len(held)])
                granted = lua.leave(2, id, missed=args[1])
            elif op == "give back" and held:
                id = sorted(held)[args[0] % len(held)]
                state, granted, _ = lua.give_back(2, id)
                if state == "waiting":
                    held.remove(id)
                    waiting.add(id)
            waiting.difference_update(granted)
            held.update(granted)

            granted, _, lost, unknown = lua.renew(2, sorted(held), sorted(waiting))
            waiting.difference_update(granted)
            held.update(granted)
            for id in lost:
                tenant, lane, work = facts[id]
                granted = lua.call(2, "hold", id, tenant, lane, work, 1.0, 0)[0]
                assert granted == []
            for id in unknown:
                state, _, granted, _, _ = lua.enter(2, id, *facts[id])
                if state == "granted":
                    waiting.remove(id)
                    held.add(id)
            assert lua.status(2) == [len(held), len(waiting)]
            assert lua.tenants() == Counter(facts[id][0] for id in waiting)
        while held:
            granted = lua.leave(2, held.pop())
            waiting.difference_update(granted)
            held.update(granted)
        assert not waiting  # all had their turn
        assert lua.keys() <= {"clock", "finish"}
    finally:
        lua.close()


@pytest.mark.parametrize("key", KEYS)
def test_a_lost_key_changes_no_turn(make_script, key):
    """Tenants wait in every lane, with and without a slot; whatever goes, all come in order."""
    lua = make_script(recalls=1)
    facts = {f"held {t}": (t, 2) for t in "abc"}
    facts |= {f"{n}{t}": (t, n) for n, t in ((1, "a"), (2, "b"), (3, "c"))}
    facts |= {f"{n}{t}": (t, n) for n, t in ((1, "d"), (2, "e"), (3, "f"))}
    for id, (tenant, lane) in facts.items():
        lua.enter(3, id, tenant, lane)
    lua.redis.delete(f"{lua.root}:{key}")
    held, waiting = list(facts)[:3], list(facts)[3:]
    _, _, lost, unknown = lua.renew(3, held, waiting)
    for id in lost:
        lua.call(3, "hold", id, *facts[id], 1.0, 1.0, 0)
    for id in unknown:
        lua.enter(3, id, *facts[id])
    assert lua.status(3) == [3, 6]
    order = []
    for id in held:
        order += lua.leave(3, id)
    # Whoever ends holds no slot any more, so its next one is among the first of its lane.
    assert order == ["1d", "1a", "2e"]
    while order and (more := lua.leave(3, order[-3])):
        order += more
    assert sorted(order) == sorted(waiting)


# ---- the order ----------------------------------------------------------------------------------


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
    running = lua.leave(1, "first")[0]
    served = Counter[str]()
    for _ in range(40):
        served[running[0]] += 1
        running = lua.leave(1, running, missed=8 if running[0] == "a" else 0)[0]
    assert served["b"] / served["a"] == pytest.approx(9, rel=0.2)


def test_what_was_not_used_is_given_back_once(lua):
    lua.enter(1, "a0", "a", work=10)
    lua.enter(1, "a1", "a", work=1)
    lua.enter(1, "b0", "b", work=1)
    assert lua.leave(1, "a0", missed=-10) == ["a1"]  # equals, the first by name
    assert lua.leave(1, "a0", missed=-10) == []
    lua.enter(1, "a2", "a", work=1)
    assert lua.leave(1, "a1") == ["b0"]


def test_a_flood_does_not_delay_another_tenant(lua):
    lua.enter(1, "first", "flood")
    for n in range(100):
        lua.enter(1, f"f{n}", "flood")
    lua.enter(1, "other", "calm")
    assert lua.leave(1, "first") == ["other"]


def test_who_holds_no_slot_comes_first(lua):
    """Even if it is ahead in what it was served."""
    for n in range(3):
        lua.enter(2, f"a{n}", "a", work=1)
    lua.enter(2, "b0", "b", work=1)
    lua.leave(2, "a0")
    assert lua.status(2) == [2, 1]  # b0 runs beside a1
    lua.leave(2, "b0", missed=1000)
    lua.enter(2, "a3", "a")
    lua.enter(2, "b1", "b")
    assert lua.leave(2, "a1") == ["b1"]  # a2 runs


def test_a_fresh_request_does_not_overtake(lua):
    lua.enter(1, "a", "t")
    lua.enter(1, "b", "t")
    # A slot more, seen first by a newcomer: the waiting one gets it.
    assert lua.enter(2, "c", "t")[:3] == ("waiting", 0, ["b"])


def test_a_full_queue_advises_the_expected_wait(lua):
    lua.enter(2, "first", "t")
    assert lua.advice_s == 0, "nothing is known"
    lua.pass_time(20)  # that it holds its slot
    lua.leave(2, "first")
    assert 10 <= lua.advice_s < 20, "for the only one that would come, and one of two slots"
    for id in "abcd":
        lua.enter(2, id, "t")
    assert lua.enter(2, "e", "t", limit=2)[:2] == ("full", 2)
    assert 10 * 3 <= lua.advice_s < 60
    assert lua.status(2) == [2, 2]


def test_the_idle_time_before_a_burst_is_nobodys_wait(lua):
    lua.enter(1, "before", "t")
    lua.leave(1, "before")
    lua.pass_time(1000)  # nobody is there
    for id in "abcd":
        lua.enter(1, id, "t")
    lua.leave(1, "a")
    assert lua.enter(1, "e", "t", limit=2)[:2] == ("full", 2)
    assert lua.advice_s < 500


# ---- ageing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["leave", "yield"])
def test_how_long_a_slot_is_held_is_a_mean_and_then_a_moving_one(make_script, how):
    lua = make_script(recalls=1)

    def given_back(mean_s: float, of: int) -> float:
        """The new mean, after a slot that was held for no time."""
        lua.redis.hset(f"{lua.root}:clock", mapping={"service": mean_s, "served": of})
        lua.enter(1, "a", "t", waited=100)
        lua.enter(1, "b", "t", waited=100)
        if how == "leave":
            lua.leave(1, "a")
        else:
            lua.enter(2, "c", "u")  # two of one tenant, and one of another that waits
            lua.enter(2, "d", "u")
            assert lua.give_back(2, "b")[0] == "waiting"
        mean = float(lua.redis.hget(f"{lua.root}:clock", "service"))
        lua.leave(0, *"abcd")
        lua.redis.hset(f"{lua.root}:clock", "service", mean)
        lua.status(4)
        assert lua.advice_s == pytest.approx(mean / 4, abs=0.01), "of four slots"
        return mean

    assert given_back(0.0, 0) < 1
    assert given_back(10.0, 1) == pytest.approx(5, abs=0.5)
    assert given_back(10.0, 3) == pytest.approx(7.5, abs=0.5)
    assert given_back(10.0, 9) == pytest.approx(9, abs=0.5)
    assert given_back(10.0, 1000) == pytest.approx(9, abs=0.5)


def test_no_request_starves(make_script):
    """A low request behind an endless stream of high ones is served once it has aged."""
    lua = make_script(ageing_s=0.2)
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


def test_age_does_not_lift_a_tenant_over_its_own(make_script):
    """However long its low request has waited, the tenant's fresh high one comes first."""
    lua = make_script(ageing_s=10.0)
    lua.enter(1, "first", "t")
    lua.enter(1, "old low", "t", lane=3, waited=1000.0)
    lua.enter(1, "old normal", "t", lane=2, waited=500.0)
    lua.enter(1, "fresh high", "t", lane=1)
    assert lua.leave(1, "first") == ["fresh high"]
    assert lua.leave(1, "fresh high") == ["old normal"]
    assert lua.leave(1, "old normal") == ["old low"]


def test_who_is_served_does_not_age(make_script):
    """A flood's requests wait long, for each other: that lifts none of them over other tenants."""
    lua = make_script(ageing_s=10.0)
    for n in range(3):
        lua.enter(2, f"f{n}", "flood", work=1)
    lua.enter(2, "f3", "flood", waited=1000.0, work=1)
    assert lua.leave(2, "f0") == ["f3"]  # the flood is served: it starves no more
    lua.enter(2, "high", "other", lane=1)
    lua.enter(2, "high 2", "other", lane=1)
    assert lua.leave(2, "f1") == ["high"]
    assert lua.leave(2, "high") == ["high 2"]
    assert lua.leave(2, "high 2") == ["f2"]


def test_a_lift_keeps_the_count(make_script):
    lua = make_script(ageing_s=10.0)
    lua.enter(1, "first", "a")
    lua.enter(1, "second", "a", waited=99.0)  # one of its own runs
    lua.enter(1, "low", "b", lane=3, waited=15.0)
    lua.enter(1, "low too", "b", lane=3)
    lua.enter(1, "c", "c", waited=15.0)
    of = {n: lua.redis.zrange(f"{lua.root}:lane:{n}", 0, -1) for n in range(1, 7)}
    assert of == {1: ["c"], 2: [], 3: ["b"], 4: ["a"], 5: [], 6: []}
    assert lua.tenants() == {"a": 1, "b": 2, "c": 1}


def test_age_begins_anew_with_the_last_slots_end(make_script):
    """A tenant whose long request just ended has not starved meanwhile."""
    lua = make_script(ageing_s=30)
    lua.enter(1, "first", "a")
    lua.enter(1, "second", "a", lane=3)
    lua.enter(1, "b", "b")
    lua.pass_time(70)  # of a's request
    lua.enter(1, "c", "c")
    assert lua.leave(1, "first") == ["b"]
    assert lua.redis.zrange(f"{lua.root}:lane:5", 0, -1) == ["a"]


def test_who_keeps_only_a_slot_that_was_recalled_was_served_up_to_now(make_script):
    """However long its low request has waited beside those that it held."""
    lua = make_script(ageing_s=10.0, recalls=1)
    for id, tenant in (("f0", "flood"), ("f1", "flood"), ("x", "x")):
        lua.enter(3, id, tenant)
    lua.enter(3, "low", "flood", lane=3, waited=50.0)
    assert lua.enter(3, "calm", "calm")[4] == ["f1"]
    lua.enter(3, "calm too", "calm too")
    assert lua.leave(3, "f0") == ["calm"]


# ---- the queue's places -------------------------------------------------------------------------


def test_a_flood_leaves_the_queue_open_to_others(lua):
    """Each newcomer takes the flood's last place until all have an equal part; then it is full."""
    lua.enter(1, "first", "flood")
    for n in range(6):
        lua.enter(1, f"f{n}", "flood", lane=1 + n % 2, limit=6)
    assert lua.enter(1, "f6", "flood", limit=6)[0] == "full"
    gave = []
    for n in range(2):
        for tenant in "ab":
            state, before, _, displaced, _ = lua.enter(1, f"{tenant}{n}", tenant, limit=6)
            assert (state, before) == ("waiting", 6)
            gave += displaced
    assert gave == ["f5", "f3", "f1", "f4"]  # the normal lane first, in each the newest
    assert lua.tenants() == {"flood": 2, "a": 2, "b": 2}
    for tenant in ("flood", "a", "b", "flood"):  # nobody's place is taken back and forth
        assert lua.enter(1, f"{tenant}-more", tenant, limit=6)[0] == "full"
    state, _, _, displaced, _ = lua.enter(1, "c0", "c", lane=3, limit=6)
    assert (state, displaced) == ("waiting", ["f2"])  # of equals, the last by name
    assert lua.status(1) == [1, 6]


def test_a_tenants_own_low_request_gives_its_place(lua):
    """A full queue refuses its tenant's high lane only when all that waits is as high."""
    lua.enter(1, "first", "t")
    for id, lane in (("low", 3), ("normal", 2), ("newer low", 3)):
        lua.enter(1, id, "t", lane=lane, limit=3)
    assert lua.enter(1, "low 3", "t", lane=3, limit=3)[0] == "full"
    high = [lua.enter(1, f"high {n}", "t", lane=1, limit=3) for n in range(4)]
    assert [state for state, *_ in high] == ["waiting", "waiting", "waiting", "full"]
    assert [displaced for _, _, _, displaced, _ in high] == [["newer low"], ["low"], ["normal"], []]


# ---- recalls ------------------------------------------------------------------------------------


def test_a_flood_gives_back_the_slot_of_its_youngest(make_script):
    lua = make_script(recalls=2)
    for n in range(6):
        lua.enter(4, f"f{n}", "flood", waited=10 - n)
    *_, recalled = lua.enter(4, "calm", "calm")
    assert recalled == ["f3"]  # of those that run: f4 and f5 wait
    assert lua.renew(4, ["f0", "f1", "f2", "f3"], ["f4", "f5", "calm"])[1] == ["f3"]  # told again
    assert lua.give_back(4, "f3", waited=7.0) == ("waiting", ["calm"], [])
    assert lua.leave(4, "calm") == ["f3"]  # before f4 and f5: it has its old turn
    assert lua.status(4) == [4, 2]


def test_a_recalled_request_keeps_its_arrival_however_long_its_giving_back_took(make_script):
    """Also if Redis had lost it, and was told of it again by `hold`."""
    lua = make_script(recalls=2)
    for id in ("f0", "f1", "f2"):
        lua.enter(2, id, "flood")
    assert lua.enter(2, "calm", "calm")[4] == ["f1"]
    assert lua.give_back(2, "f1", waited=-5.0)[:2] == ("waiting", ["calm"])
    assert lua.leave(2, "calm") == ["f1"], "before f2"
    lua.redis.delete(*(f"{lua.root}:{key}" for key in KEYS))
    for id in ("f0", "f1"):
        lua.call(2, "hold", id, "flood", 2, 1, 1.0, 0)
    lua.enter(2, "f2", "flood", waited=3.0)
    assert lua.enter(2, "calm", "calm", waited=1.0)[4] == ["f1"]
    assert lua.give_back(2, "f1", waited=5.0)[:2] == ("waiting", ["calm"])
    assert lua.leave(2, "calm") == ["f1"]


def test_only_who_has_twice_as_many_gives_slots(make_script):
    lua = make_script(recalls=2)
    for n in range(8):
        lua.enter(8, f"a{n}", "a")
    taken = []
    for n in range(6):
        *_, recalled = lua.enter(8, f"b{n}", "b", work=0.1)
        taken += recalled
        for id in recalled:
            assert lua.give_back(8, id)[:2] == ("waiting", [f"b{n}"])
    assert taken == ["a7", "a6", "a5"]  # a has 5, b 3: they are not twice as many as 4
    held = lua.redis.zrange(f"{lua.root}:held", 0, -1)
    assert Counter(id[0] for id in held) == {"a": 5, "b": 3}


def test_weights_count_in_slots_too(make_script):
    """Who has the fourfold weight gets slots until the other's are not twice its by weight."""
    lua = make_script(recalls=2)
    for n in range(6):
        lua.enter(6, f"a{n}", "a", weight=1.0)
    taken = []
    for n in range(6):
        *_, recalled = lua.enter(6, f"b{n}", "b", work=0.1, weight=4.0)
        taken += recalled
        for id in recalled:
            lua.give_back(6, id)
    assert taken == ["a5", "a4", "a3", "a2"]  # 2 of weight 1 are as many as 8 of weight 4


def test_nobody_loses_the_only_slot(make_script):
    lua = make_script(recalls=2)
    lua.enter(3, "a0", "a", weight=0.1)
    lua.enter(3, "b0", "b")
    lua.enter(3, "b1", "b")
    assert lua.enter(3, "c", "c", weight=100.0)[4] == ["b1"]
    lua.give_back(3, "b1")
    assert lua.enter(3, "d", "d", weight=100.0)[4] == []


def test_a_recall_waits_a_moment(make_script):
    lua = make_script(recalls=2, patience_s=0.2)
    for id in ("f0", "f1"):
        lua.enter(2, id, "flood")
    began = time.monotonic()
    assert lua.enter(2, "calm", "calm")[4] == []
    recalled: list[str] = []
    while not recalled:
        recalled = lua.call(2, "status")[2]
        assert time.monotonic() - began < 5
    assert recalled == ["f1"]
    assert time.monotonic() - began >= 0.19


def test_a_request_is_recalled_so_often_and_no_more(make_script):
    lua = make_script(recalls=2)
    for id in ("f0", "f1"):
        lua.enter(2, id, "flood")
    for n, expected in enumerate([["f1"], ["f1"], ["f0"], ["f0"], []]):
        *_, recalled = lua.enter(2, f"c{n}", "calm")
        assert recalled == expected
        for id in recalled:
            assert lua.give_back(2, id)[:2] == ("waiting", [f"c{n}"])
            assert lua.leave(2, f"c{n}") == [id]


def test_what_runs_and_was_lost_is_not_recalled_more_often(make_script):
    lua = make_script(recalls=2)
    facts = {f"f{n}": ["flood", 2, 1, 1.0, recalls] for n, recalls in enumerate((0, 1, 2))}
    for id, known in facts.items():
        lua.call(3, "hold", id, *known)
    for n, expected in enumerate([["f1"], ["f0"]]):
        *_, recalled = lua.enter(3, f"c{n}", f"calm {n}")
        assert recalled == expected
        for id in recalled:
            assert lua.give_back(3, id)[0] == "waiting"


def test_no_recall_for_a_lower_lane(make_script):
    lua = make_script(recalls=2)
    for n in range(4):
        lua.enter(4, f"f{n}", "flood", lane=2)
    assert lua.enter(4, "low", "calm", lane=3)[4] == []
    assert lua.enter(4, "normal", "calm", lane=2)[4] == ["f3"]


def test_a_recall_that_nobody_needs_is_kept(make_script):
    lua = make_script(recalls=2)
    for n in range(4):
        lua.enter(4, f"f{n}", "flood")
    assert lua.enter(4, "calm", "calm")[4] == ["f3"]
    lua.leave(4, "calm")  # it went away
    assert lua.give_back(4, "f3") == ("kept", [], [])
    assert lua.status(4) == [4, 0]
    assert lua.renew(4, ["f3"])[1] == []
    assert lua.enter(4, "calm again", "calm")[4] == ["f3"]  # it may be asked anew
    assert lua.give_back(4, "f3") == ("waiting", ["calm again"], [])
    assert lua.give_back(4, "f3") == ("waiting", [], [])  # the first answer was lost
    assert lua.give_back(4, "unheard of")[0] == "unknown"


def test_a_recall_is_kept_where_a_new_slot_serves(make_script):
    lua = make_script(recalls=2)
    for n in range(2):
        lua.enter(2, f"f{n}", "flood")
    assert lua.enter(2, "calm", "calm")[4] == ["f1"]
    assert lua.give_back(3, "f1") == ("kept", ["calm"], [])
    assert lua.status(3) == [3, 0]


def test_no_recall_while_more_run_than_may(make_script):
    """A worker is lost: to give a slot back then would help nobody."""
    lua = make_script(recalls=2)
    for n in range(8):
        lua.enter(8, f"f{n}", "flood")
    assert lua.enter(4, "calm", "calm")[4] == []
    assert lua.enter(8, "calm too", "calm")[4] == ["f7", "f6"]
    assert lua.give_back(4, "f7")[0] == "kept"


def test_what_was_recalled_is_not_displaced(make_script):
    """Its answer is under way: others of its tenant give their places."""
    lua = make_script(recalls=2)
    for n in range(4):
        lua.enter(4, f"f{n}", "flood", lane=3)
    lua.enter(4, "calm", "calm")
    lua.give_back(4, "f3")
    assert lua.enter(4, "g0", "flood", limit=1)[0] == "full"
    lua.enter(4, "g1", "flood", limit=2)
    state, _, _, displaced, _ = lua.enter(4, "more", "other", limit=2)
    assert (state, displaced) == ("waiting", ["g1"])
    assert lua.enter(4, "high", "flood", lane=1, limit=2)[0] == "full"


def test_each_stint_is_settled(make_script):
    """What a recalled request was charged and has not used is charged when it goes on."""
    lua = make_script(recalls=2)
    for n in range(2):
        lua.enter(2, f"f{n}", "flood", work=100)
    lua.enter(2, "calm", "calm", work=1)
    lua.give_back(2, "f1", missed=-90, left=50)
    finish = lua.redis.zscore(f"{lua.root}:finish", "flood")
    assert finish == 110
    lua.leave(2, "calm")
    assert lua.redis.zscore(f"{lua.root}:finish", "flood") == 160


# ---- leases -------------------------------------------------------------------------------------


def leases(lua) -> dict[str, float]:
    """In how many seconds each ends."""
    seconds, micros = lua.redis.time()
    ends = dict(
        pair
        for key in ("held", "waiting")
        for pair in lua.redis.zrange(f"{lua.root}:{key}", 0, -1, withscores=True)
    )
    return {id: end - seconds - micros / 1e6 for id, end in ends.items()}


def test_leases_last_as_long_as_they_are_told_and_anew_with_each_renewal(make_script):
    lua = make_script(lease_s=1000.0)
    lua.enter(1, "held", "t")
    lua.enter(1, "waits", "t")
    assert leases(lua) == pytest.approx({"held": 1000, "waits": 1000}, abs=60)
    lua.options[0] = 5000.0
    lua.status(1)
    assert max(leases(lua).values()) < 1060, "only a renewal makes them longer"
    lua.renew(1, ["held"], ["waits"])
    assert leases(lua) == pytest.approx({"held": 5000, "waits": 5000}, abs=60)
    lua.call(2, "hold", "told", "t", 2, 1, 1.0, 0)
    assert leases(lua)["told"] == pytest.approx(5000, abs=60)


def test_a_dead_routers_slots_and_places_return(lua):
    for id in ("dead-held", "dead-waiting"):
        lua.enter(1, id, "t", router="dead")
    lua.enter(1, "mine", "t")
    for id in ("dead-held", "dead-waiting"):
        lua.lapse(id)
    assert lua.renew(1, waiting=["mine"]) == (["mine"], [], [], [])
    assert lua.tenants() == {}
    assert lua.status(1) == [1, 0]


def test_a_dead_routers_place_returns(lua):
    """While another's request holds the slot all the time."""
    lua.enter(1, "mine", "t")
    lua.enter(1, "its", "t", router="dead")
    lua.lapse("its")
    assert lua.status(1) == [1, 0]
    assert lua.leave(1, "mine") == []


def test_a_recalled_slot_of_a_dead_router_is_no_slot_on_its_way(make_script):
    lua = make_script(recalls=1)
    for n in range(4):
        lua.enter(4, f"f{n}", "flood", router="dead" if n == 3 else "r1")
    for id in ("c0", "c1"):
        lua.enter(4, id, "calm")
    assert lua.redis.zrange(f"{lua.root}:asked", 0, -1) == ["f3"]
    lua.lapse("f3")
    assert lua.renew(4, ["f0", "f1", "f2"], ["c0", "c1"])[0] == ["c0"]
    assert lua.redis.zrange(f"{lua.root}:asked", 0, -1) == []


def test_a_grant_to_a_dead_router_lasts_no_longer_than_its_place(make_script):
    """Its lease is the one that the place had, until its router renews it."""
    lua = make_script(lease_s=100.0)
    lua.enter(1, "mine", "t")
    lua.enter(1, "its", "t", router="dead")
    place = lua.redis.zscore(f"{lua.root}:waiting", "its")
    lua.options[0] = 1000.0  # whatever the others' leases are now
    lua.renew(1, held=["mine"])
    assert lua.leave(1, "mine") == []  # granted to the dead one
    assert lua.redis.zscore(f"{lua.root}:held", "its") == place
    lua.renew(1, held=["its"], router="dead")  # it lives
    assert lua.redis.zscore(f"{lua.root}:held", "its") >= place + 900


def test_what_a_dead_router_was_charged_is_given_back(lua):
    lua.enter(1, "mine", "a", work=1)
    lua.enter(1, "its", "b", work=1000, router="dead")
    lua.leave(1, "mine")
    assert lua.redis.zscore(f"{lua.root}:finish", "b") == 1000
    lua.lapse("its")
    assert lua.status(1) == [0, 0]
    assert lua.redis.zscore(f"{lua.root}:finish", "b") is None


def test_a_router_that_was_away_for_a_while_holds_again(make_script):
    """Its slots went to others meanwhile. What it runs counts again, and nobody is granted a slot
    until no more run than may; its charge stands as if it had never been away."""
    lua = make_script()
    lua.enter(1, "its", "b", work=10, router="paused")
    lua.enter(1, "mine", "a", work=1)
    lua.enter(1, "next", "a", work=1)
    lua.lapse("its")
    assert lua.renew(1, waiting=["mine", "next"])[0] == ["mine"]
    assert lua.renew(1, held=["its"], router="paused")[2] == ["its"]
    lua.call(1, "hold", "its", "b", 2, 10, 1.0, 0, router="paused")
    assert lua.status(1) == [2, 1]
    assert lua.redis.zscore(f"{lua.root}:finish", "b") == 10
    assert lua.leave(1, "mine") == []
    assert lua.leave(1, "its") == ["next"]


def test_what_runs_is_held_even_if_it_waited(make_script):
    """Granted without Redis, which came back with its place."""
    lua = make_script()
    lua.enter(1, "other", "t")
    lua.enter(1, "granted locally", "t")
    assert lua.renew(1, held=["granted locally"])[2] == ["granted locally"]
    lua.call(1, "hold", "granted locally", "t", 2, 1, 1.0, 0)
    assert lua.status(1) == [2, 0]
    assert lua.tenants() == {}


def test_other_routers_are_told(make_script):
    lua = make_script(recalls=1)
    listener = lua.redis.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(f"{lua.root}:word:r2")
    listener.get_message(timeout=5)

    def heard() -> list[object]:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if message := listener.get_message(timeout=0.1):
                return json.loads(message["data"])
        return []

    lua.enter(2, "a", "t")
    lua.enter(2, "a2", "t")
    lua.enter(2, "b", "t", router="r2")
    assert lua.leave(2, "a") == []
    assert heard()[:3] == ["granted", lua.root, "b"]
    # And should that word be lost, renewing tells.
    assert lua.renew(2, waiting=["b"], router="r2")[0] == ["b"]
    lua.enter(2, "c", "other")
    assert heard()[:3] == ["recalled", lua.root, "b"]
    assert lua.give_back(2, "b", router="r2")[0] == "waiting"
    lua.enter(2, "d", "t", lane=3, limit=9, router="r2")
    lua.enter(2, "e", "third", limit=2)
    what, _, id, advice = heard()
    assert (what, id, float(advice) >= 0) == ("displaced", "d", True)
    listener.close()
