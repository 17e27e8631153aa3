"""The order in Redis: whose turn it is, and who has a place in the queue."""

import random
import time
from collections import Counter

import pytest


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
