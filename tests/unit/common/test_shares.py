"""A pool in which a newcomer always finds room: one alone gets half, two get a third each."""

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.fairness.shares import Shares


def taken_in_turn(shares: Shares, holders: str, units: int = 1) -> list[int]:
    """What each has when all have taken, by turns, as often as they may."""
    for holder in islice(cycle(holders), shares.total * len(holders) + 1):
        shares.take(holder, units)
    return [shares.held(holder) for holder in holders]


@pytest.mark.parametrize(
    ("total", "holders", "held"),
    [
        (8, "a", [4]),
        (9, "a", [5]),
        (1, "a", [1]),
        (9, "ab", [3, 3]),
        (12, "abc", [3, 3, 3]),
        (0, "a", [0]),
    ],
)
def test_so_much_is_everybodys_at_the_most(total: int, holders: str, held: list[int]) -> None:
    shares = Shares(total)
    assert taken_in_turn(shares, holders) == held
    assert shares.taken == sum(held)


def test_it_gets_all_that_it_asked_for_or_none() -> None:
    shares = Shares(10)
    assert not shares.take("a", 11)
    assert (shares.held("a"), shares.taken) == (0, 0)
    assert shares.take("a", 10), "who has nothing may take all that is free"
    assert not shares.take("b")
    assert shares.take("b", 0), "nothing is there for everybody"
    assert (shares.held("b"), shares.taken) == (0, 10)


def test_who_has_as_much_as_is_free_takes_no_more() -> None:
    shares = Shares(10)
    assert shares.take("a", 5)
    assert not shares.take("a")
    assert shares.take("b", 2)
    assert not shares.take("b", 4), "three are left"
    shares.give_back("a", 1)
    assert (shares.held("a"), shares.taken) == (4, 6)
    assert not shares.take("a"), "four are free, and four it has"
    shares.give_back("a", 1)
    assert shares.take("a", 2)


calls = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-6, 6)), max_size=60)


@given(total=st.integers(0, 12), calls=calls)
def test_no_unit_is_lost_or_given_twice(total: int, calls: list[tuple[str, int]]) -> None:
    shares = Shares(total)
    held = dict.fromkeys("abc", 0)
    for holder, units in calls:
        if units >= 0 and shares.take(holder, units):
            held[holder] += units
        elif units < 0 and held[holder] >= -units:
            shares.give_back(holder, -units)
            held[holder] += units
        assert {name: shares.held(name) for name in held} == held
        assert shares.taken == sum(held.values()) <= total
