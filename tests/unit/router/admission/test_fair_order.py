"""The order in one process, in what its test beside the script leaves out: time."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from services.router.admission.fair_order import Decided, FairOrder, Request

AGEING_S = 10.0


def order(patience_s: float = 0.0, recalls: int = 0) -> FairOrder:
    return FairOrder(AGEING_S, patience_s, recalls)


def request(id: str, tenant: str, at_s: float, lane: int = 2, work: float = 1.0) -> Request:
    return Request(id, tenant, lane, work, 1.0, at_s)


def enter(order: FairOrder, capacity: int, new: Request, at_s: float | None = None) -> Decided:
    decided = Decided()
    order.enter(new, 100, capacity, new.arrived_s if at_s is None else at_s, decided)
    return decided


def leave(order: FairOrder, capacity: int, id: str, at_s: float) -> list[str]:
    """What is granted then."""
    decided = Decided()
    order.leave(id, 0.0, at_s)
    order.look(capacity, at_s, decided)
    return decided.granted


@pytest.mark.parametrize(
    ("tenant", "lane", "waited_s", "others_lane", "first"),
    [
        ("a", 3, 9.9, 2, "other"),
        ("a", 3, 10.0, 2, "old"),
        ("a", 3, 19.9, 1, "other"),
        ("a", 3, 20.0, 1, "old"),
        ("a", 2, 9.9, 1, "other"),
        ("a", 2, 10.0, 1, "old"),
        ("z", 3, 15.0, 2, "other"),  # of equals, the first by name
        ("z", 3, 25.0, 2, "old"),
        ("z", 3, 1000.0, 1, "other"),  # above the high lane there is none
    ],
)
def test_a_tenant_without_a_slot_rises_a_lane_each_time(
    tenant: str, lane: int, waited_s: float, others_lane: int, first: str
) -> None:
    line = order()
    enter(line, 1, request("runs", "x", 0.0))
    enter(line, 1, request("old", tenant, 0.0, lane))
    enter(line, 1, request("other", "b", waited_s, others_lane))
    assert leave(line, 1, "runs", waited_s) == [first]


def test_a_tenants_age_is_as_long_as_it_waits_and_goes_with_its_last_request() -> None:
    line = order()
    enter(line, 1, request("runs", "x", 0.0))
    for at_s in (0.0, 8.0):
        enter(line, 1, request(f"low {at_s:.0f}", "a", at_s, 3))
    line.leave("low 0", 0.0, 9.0)
    enter(line, 1, request("normal", "b", 10.0))
    assert leave(line, 1, "runs", 10.0) == ["low 8"], "its tenant has waited for ten seconds"
    enter(line, 1, request("gone", "c", 11.0, 3))
    line.leave("gone", 0.0, 30.0)
    enter(line, 1, request("low again", "c", 30.0, 3))
    line.leave("normal", 0.0, 31.0)
    enter(line, 1, request("late", "d", 39.0))
    assert leave(line, 1, "low 8", 39.0) == ["late"], "nine seconds"


def test_who_holds_a_slot_does_not_age_and_begins_anew_with_its_end() -> None:
    line = order()
    enter(line, 2, request("mine", "a", 0.0))
    enter(line, 2, request("other's", "x", 0.0))
    enter(line, 2, request("low", "a", 0.0, 3))
    for n in range(2):
        enter(line, 2, request(f"high {n}", "h", 90.0, 1))
    assert leave(line, 2, "mine", 100.0) == ["high 0"], "it was served up to now"
    line.leave("high 1", 0.0, 100.0)
    enter(line, 2, request("normal", "z", 105.0))
    assert leave(line, 2, "other's", 109.0) == ["normal"], "nine seconds without a slot"
    enter(line, 2, request("normal too", "z", 109.0))
    assert leave(line, 2, "high 0", 110.0) == ["low"], "ten"


def test_who_keeps_only_a_slot_that_was_recalled_was_served_up_to_now() -> None:
    line = order(recalls=1)
    for id, tenant in (("f0", "flood"), ("f1", "flood"), ("x", "x")):
        enter(line, 3, request(id, tenant, 0.0))
    enter(line, 3, request("low", "flood", 0.0, 3))
    assert enter(line, 3, request("calm", "calm", 50.0)).recalled == ["f1"]
    enter(line, 3, request("calm too", "calm too", 50.0))
    assert leave(line, 3, "f0", 50.0) == ["calm"]
    assert leave(line, 3, "x", 59.0) == ["calm too"], "nine seconds without a slot"


def test_a_slots_end_beside_others_makes_nobody_younger() -> None:
    """Only the last one's does: what waits is as old as it was while the tenant was served."""
    line = order()
    for id, tenant in (("a0", "a"), ("a1", "a"), ("x", "x")):
        enter(line, 3, request(id, tenant, 0.0))
    for n in range(4):
        enter(line, 3, request(f"high {n}", "h", 0.0, 1))
    enter(line, 3, request("low", "a", 0.0, 3))
    assert leave(line, 3, "a0", 50.0) == ["high 0"]
    assert leave(line, 3, "a1", 60.0) == ["high 1"]
    enter(line, 3, request("normal", "b", 60.0))
    for n in (2, 3):
        line.leave(f"high {n}", 0.0, 60.0)
    assert leave(line, 3, "x", 69.0) == ["normal"]


def test_a_recall_waits_for_the_patience() -> None:
    line = order(patience_s=5.0, recalls=1)
    for id in ("f0", "f1"):
        enter(line, 2, request(id, "flood", 0.0))
    assert enter(line, 2, request("calm", "calm", 10.0)).recalled == []
    for at_s, recalled in ((14.9, []), (15.0, ["f1"]), (16.0, [])):
        decided = Decided()
        line.look(2, at_s, decided)
        assert (decided.granted, decided.recalled) == ([], recalled)


def test_the_low_lane_stands_aside_at_once_and_for_one_that_rose_out_of_it() -> None:
    line = order(patience_s=1000.0, recalls=1)
    for id in ("a0", "a1"):
        enter(line, 2, request(id, "a", 0.0, 3))
    for id in ("b0", "b1"):
        assert enter(line, 2, request(id, "b", 0.0, 3)).recalled == []
    decided = Decided()
    line.look(2, 10.0, decided)
    assert decided.recalled == ["a1"], "one: then it is served"
    assert line.give_back("a1", 0.0, 1.0, 2, 10.0, decided) == "waiting"
    assert decided.granted == ["b0"]
    assert enter(line, 2, request("chat", "c", 11.0)).recalled == ["b0"], "the youngest"
    assert enter(line, 2, request("chat too", "c", 11.0)).recalled == ["a0"]
    line.leave("chat", 0.0, 12.0)
    assert line.give_back("b0", 0.0, 1.0, 2, 12.0, decided) == "waiting"
    assert line.give_back("a0", 0.0, 1.0, 2, 12.0, decided) == "kept"


def test_what_runs_in_the_low_lane_and_was_recalled_so_often_keeps_its_slot() -> None:
    """By which it ends some day (decision 0006): who waits above it waits for an end then."""
    line = order(recalls=2)
    enter(line, 1, request("line", "batches", 0.0, 3))
    for n in range(2):
        decided = enter(line, 1, request(f"chat {n}", "c", 10.0 * n + 1))
        assert decided.recalled == ["line"]
        assert line.give_back("line", 0.0, 1.0, 1, 10.0 * n + 1, decided) == "waiting"
        assert decided.granted == [f"chat {n}"]
        assert leave(line, 1, f"chat {n}", 10.0 * n + 2) == ["line"]
    for at_s in (30.0, 40.0):
        assert enter(line, 1, request(f"late {at_s:.0f}", "c", at_s)).recalled == []
    decided = Decided()
    line.look(1, 1000.0, decided)
    assert (decided.granted, decided.recalled) == ([], []), "however long it waits"
    assert leave(line, 1, "line", 1001.0) == ["late 30"]


def test_a_recalled_request_has_its_first_arrival_but_ages_from_its_giving_back() -> None:
    line = order(recalls=1)
    for id in ("f0", "f1"):
        enter(line, 2, request(id, "flood", 0.0, 3))
    decided = enter(line, 2, request("calm", "calm", 50.0, 3))
    assert decided.recalled == ["f1"]
    assert line.give_back("f1", 0.0, 1.0, 2, 60.0, decided) == "waiting"
    assert decided.granted == ["calm"]
    enter(line, 2, request("f2", "flood", 61.0, 3))
    enter(line, 2, request("normal", "other", 62.0))
    assert leave(line, 2, "f0", 63.0) == ["normal"], "it has aged for three seconds, not for 63"
    assert leave(line, 2, "calm", 64.0) == ["f1"], "before the younger of its tenant"


def test_a_recall_is_kept_where_a_new_slot_serves() -> None:
    line = order(recalls=2)
    for id in ("f0", "f1"):
        enter(line, 2, request(id, "flood", 0.0))
    assert enter(line, 2, request("calm", "calm", 1.0)).recalled == ["f1"]
    decided = Decided()
    assert line.give_back("f1", 0.0, 1.0, 3, 2.0, decided) == "kept"
    assert (decided.granted, decided.recalled, len(line)) == (["calm"], [], 0)


def test_no_recall_while_more_run_than_may() -> None:
    """A worker is lost: to give a slot back then would help nobody."""
    line = order(recalls=2)
    for n in range(8):
        enter(line, 8, request(f"f{n}", "flood", 0.0))
    assert enter(line, 4, request("calm", "calm", 1.0)).recalled == []
    assert enter(line, 8, request("calm too", "calm", 2.0)).recalled == ["f7", "f6"]
    decided = Decided()
    assert line.give_back("f7", 0.0, 1.0, 4, 3.0, decided) == "kept"
    assert decided.recalled == []


@pytest.mark.parametrize(("capacity", "state"), [(2, "waiting"), (3, "kept")])
def test_what_was_recalled_once_can_be_recalled_again(capacity: int, state: str) -> None:
    """Whether it gave its slot back or kept it: its recall is over then."""
    line = order(recalls=2)
    for id in ("f0", "f1"):
        enter(line, 2, request(id, "flood", 0.0))
    assert enter(line, 2, request("calm", "calm", 1.0)).recalled == ["f1"]
    assert line.give_back("f1", 0.0, 1.0, capacity, 2.0, Decided()) == state
    assert leave(line, 2, "calm", 3.0) == (["f1"] if state == "waiting" else [])
    assert enter(line, 2, request("calm again", "calm", 4.0)).recalled == ["f1"]


def test_what_runs_already_is_charged_and_what_is_unknown_is_ignored() -> None:
    line = order()
    line.hold(request("ran", "a", 0.0, work=50), 0.0)
    assert "ran" in line
    line.leave("unheard of", 0.0, 0.0)
    enter(line, 1, request("a", "a", 1.0))
    enter(line, 1, request("b", "b", 2.0))
    assert len(line) == 2
    assert leave(line, 1, "ran", 3.0) == ["b"]
    assert "ran" not in line
    decided = Decided()
    assert line.give_back("unheard of", 0.0, 0.0, 1, 3.0, decided) == "unknown"
    assert line.give_back("a", 0.0, 0.0, 1, 3.0, decided) == "waiting"


@pytest.mark.parametrize(
    ("missed", "first"), [(-100.0, "a2"), (-95.0, "a2"), (-50.0, "b2"), (0.0, "b2")]
)
def test_what_was_charged_and_not_used_is_given_back(missed: float, first: str) -> None:
    line = order()
    for id, tenant, work in (("a1", "a", 100.0), ("b1", "b", 10.0), ("x", "x", 1.0)):
        enter(line, 3, request(id, tenant, 0.0, work=work))
    line.leave("b1", 0.0, 1.0)
    line.leave("a1", missed, 1.0)
    for id in ("a2", "b2"):
        enter(line, 1, request(id, id[0], 2.0))
    assert leave(line, 1, "x", 3.0) == [first]


def test_a_slot_given_back_is_charged_for_what_it_used() -> None:
    line = order(recalls=1)
    for id in ("f0", "f1"):
        enter(line, 2, request(id, "a", 0.0, work=100.0))
    enter(line, 3, request("b0", "b", 0.0, work=20.0))
    line.leave("b0", 0.0, 1.0)
    assert enter(line, 2, request("calm", "calm", 1.0)).recalled == ["f1"]
    decided = Decided()
    assert line.give_back("f1", -95.0, 95.0, 2, 2.0, decided) == "waiting"
    line.leave("f0", -95.0, 3.0)
    enter(line, 1, request("b1", "b", 3.0))
    assert leave(line, 1, "calm", 4.0) == ["f1"], "ten were used, of the other's twenty"


def test_what_a_grant_costs_goes_by_tenants_and_not_by_requests() -> None:
    """Two thousand slots made it a tenth of a second, in which the router's links stood still."""

    def crowded(requests: int) -> FairOrder:
        line = order(patience_s=1000.0, recalls=2)
        for n in range(2 * requests):  # half of them wait
            enter(line, requests, request(f"{n}", f"t{n % 4}", float(n)))
        return line

    few, many = crowded(8), crowded(1024)
    assert steps(lambda: leave(many, 1024, "0", 3000.0)) <= 1.5 * steps(
        lambda: leave(few, 8, "0", 3000.0)
    )
    new = request("new", "t1", 3000.0)
    assert steps(lambda: enter(many, 1024, new)) <= 1.5 * steps(lambda: enter(few, 8, new))


def steps(work: Callable[[], object]) -> int:
    """Calls of Python functions, a generator's turns included."""
    made = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal made
        made += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return made
