"""The order in Redis: the script against its model in Python, and lost keys."""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router.admission.fair_order import Decided, FairOrder, Request
from tests.support.order_script import KEYS, Script

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


AGEING_S = 4.3  # so that nobody rises just when a second ends: the script's are a little longer
WEIGHTS = {"a": 1.0, "a1": 1.0, "a12": 2.0, "b": 0.3}


class Both:
    """The script and its model, called alike; every answer must be the same."""

    def __init__(self, lua: Script, recalls: int, capacity: int, limit: int) -> None:
        self.lua, self.order = lua, FairOrder(AGEING_S, 0.0, recalls)
        self.recalls, self.capacity, self.limit = recalls, capacity, limit
        self.held: list[str] = []
        self.waiting: list[str] = []
        self.asked: list[str] = []
        self.requests: dict[str, Request] = {}
        self.gone: Counter[str] = Counter()  # how often each gave its slot back
        self.now = 0.0

    def pass_a_second(self) -> None:
        self.now += 1
        self.lua.pass_time(1)

    def enter(self, tenant: str, lane: int, work: float) -> None:
        self.pass_a_second()
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
        self.pass_a_second()
        id, decided = ids.pop(place % len(ids)), Decided()
        self.asked = [one for one in self.asked if one != id]
        self.order.leave(id, missed, self.now)
        self.order.look(self.capacity, self.now, decided)
        self.follow(decided, self.lua.call(self.capacity, "tell", 0, id, missed))

    def give_back(self, place: int, missed: float, left: float) -> None:
        self.pass_a_second()
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
        self.check_the_low_lane_stands_aside()
        assert self.lua.status(self.capacity) == [len(self.held), len(self.waiting)]
        assert self.lua.tenants() == Counter(self.requests[id].tenant for id in self.waiting)
        assert len(self.held) == self.capacity or not self.waiting
        assert len(self.waiting) <= self.limit + sum(self.gone.values())
        assert set(self.lua.redis.zrange(f"{self.lua.root}:asked", 0, -1)) == set(self.asked)

    def check_the_low_lane_stands_aside(self) -> None:
        """Nobody above it waits for one of its requests to end by itself."""
        above = [id for id in self.waiting if self.requests[id].lane < 3]
        may = {
            id for id in self.held if self.requests[id].lane == 3 and self.gone[id] < self.recalls
        }
        if self.recalls and len(self.held) == self.capacity:
            assert may <= set(self.asked) or len(self.asked) >= len(above)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flood=st.integers(0, 10),  # requests of one tenant that come first
    lane=st.integers(2, 3),  # theirs
    ops=st.lists(st.one_of(ENTER, ENTER, LEAVE_HELD, LEAVE_WAITING, GIVE_BACK), max_size=60),
    capacity=st.integers(0, 6),
    limit=st.integers(0, 8),
    recalls=st.integers(0, 2),
)
def test_the_script_is_the_order(redis_url, flood, lane, ops, capacity, limit, recalls):
    """Whatever comes and goes, the Lua grants, displaces and recalls exactly what the Python order
    does, slots are never lost nor given twice, and nothing remains at the end."""
    lua = Script(redis_url, AGEING_S, recalls=recalls)
    both = Both(lua, recalls, capacity, limit)
    try:
        for op, *args in [("enter", "a", lane, 1.0)] * flood + ops:
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
                granted = lua.call(2, "tell", 1, id, tenant, lane, work, 1.0, 0)[0]
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
        lua.call(3, "tell", 1, id, *facts[id], 1.0, 1.0, 0)
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
