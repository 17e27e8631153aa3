"""The order in Redis: leases, routers that are away, and what others are told."""

import json
import time

import pytest


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
    lua.call(2, "tell", 1, "told", "t", 2, 1, 1.0, 0)
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
    lua.call(1, "tell", 1, "its", "b", 2, 10, 1.0, 0, router="paused")
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
    lua.call(1, "tell", 1, "granted locally", "t", 2, 1, 1.0, 0)
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
