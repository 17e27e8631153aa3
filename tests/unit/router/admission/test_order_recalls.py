"""The order in Redis: who gives back a slot that he has."""

import time
from collections import Counter

from tests.support.order_script import KEYS, NEVER


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
        lua.call(2, "tell", 1, id, "flood", 2, 1, 1.0, 0)
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
        lua.call(3, "tell", 1, id, *known)
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


def test_the_low_lane_stands_aside_at_once_whoever_has_it(make_script):
    """The youngest of all, also a tenant's only one, and for its own tenant."""
    lua = make_script(recalls=2, patience_s=NEVER)
    for id, tenant, lane in (("a0", "a", 3), ("b0", "b", 3), ("c0", "c", 2), ("a1", "a", 3)):
        lua.enter(4, id, tenant, lane)
    lua.enter(4, "a2", "a", 3)
    assert lua.enter(4, "chat a", "a")[4] == ["a1"]
    assert lua.status(4) == [4, 2], "one recall for one chat, however many of its lines wait"
    assert lua.give_back(4, "a1") == ("waiting", ["chat a"], [])
    assert lua.enter(4, "chat d", "d", lane=1)[4] == ["b0"]
    assert lua.enter(4, "chat e", "e")[4] == ["a0"]
    assert lua.enter(4, "chat f", "f")[4] == [], "none of the low lane is left"
    lua.leave(4, "chat e", "chat f")
    assert lua.give_back(4, "b0") == ("waiting", ["chat d"], [])
    lua.leave(4, "b0")
    assert lua.give_back(4, "a0") == ("kept", [], [])
    assert lua.leave(4, "chat d", "c0") == ["a1", "a2"], "the older goes on first"


def test_who_rose_out_of_the_low_lane_takes_a_slot_of_it(make_script):
    """Else those behind it would wait with it."""
    lua = make_script(recalls=1, patience_s=NEVER, ageing_s=10.0)
    for id in ("a0", "a1"):
        lua.enter(2, id, "a", 3)
    for id in ("b0", "b1"):
        assert lua.enter(2, id, "b", 3)[4] == []
    lua.pass_time(11.0)
    assert lua.call(2, "status")[2] == ["a1"], "one: then it is served"
    assert lua.give_back(2, "a1") == ("waiting", ["b0"], [])
    lua.pass_time(11.0)
    assert lua.enter(2, "chat", "c")[4] == ["b0"]
