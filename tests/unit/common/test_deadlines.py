"""services.common.link.deadlines: many requests, one timer. Time is the test's own."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from services.common.link import deadlines as under_test
from services.common.link.deadlines import Deadlines


class Loop:
    """Calls what is due when it is told the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> "Timer":
        self.timers.append(Timer(self, when, callback))
        return self.timers[-1]

    def pass_to(self, now: float) -> None:
        while due := [timer for timer in self.timers if timer.when <= now]:
            first = min(due, key=lambda timer: timer.when)
            self.timers.remove(first)
            self.now = max(self.now, first.when)
            first.callback()
        self.now = now


class Timer:
    def __init__(self, loop: Loop, when: float, callback: Callable[[], None]) -> None:
        self.loop, self.when, self.callback = loop, when, callback

    def cancel(self) -> None:
        if self in self.loop.timers:
            self.loop.timers.remove(self)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    one = Loop()
    monkeypatch.setattr(under_test.asyncio, "get_running_loop", lambda: one)
    return one


def test_each_is_late_at_its_time_and_once(loop: Loop) -> None:
    told: list[tuple[int, float]] = []
    dues = Deadlines(lambda id: told.append((id, loop.now)))
    for id, when in ((1, 5.0), (2, 3.0), (3, 8.0), (4, 3.0)):
        dues.put(id, when)
    assert len(loop.timers) == 1
    loop.pass_to(10)
    assert sorted(told) == [(1, 5.0), (2, 3.0), (3, 8.0), (4, 3.0)]
    assert not loop.timers, "nothing is left to wait for"


def test_a_new_time_holds_in_place_of_the_old(loop: Loop) -> None:
    told: list[tuple[int, float]] = []
    dues = Deadlines(lambda id: told.append((id, loop.now)))
    dues.put(1, 600.0)
    dues.put(2, 4.0)
    dues.put(1, 2.0)  # sooner
    dues.put(2, 9.0)  # later
    loop.pass_to(700)
    assert told == [(1, 2.0), (2, 9.0)]


def test_what_was_dropped_is_never_late_and_leaves_no_timer(loop: Loop) -> None:
    told: list[int] = []
    dues = Deadlines(told.append)
    dues.put(1, 2.0)
    dues.put(2, 3.0)
    dues.drop(1)
    dues.drop(7)
    loop.pass_to(2.5)
    assert told == []
    dues.drop(2)
    assert not loop.timers
    dues.put(3, 4.0)
    loop.pass_to(5)
    assert told == [3]


def test_one_that_fails_keeps_no_other_waiting(loop: Loop) -> None:
    told: list[int] = []

    def late(id: int) -> None:
        told.append(id)
        if id == 1:
            raise RuntimeError

    dues = Deadlines(late)
    dues.put(1, 2.0)
    dues.put(2, 2.0)
    with pytest.raises(RuntimeError):
        loop.pass_to(3)
    loop.pass_to(3)
    assert told == [1, 2]


def test_who_is_told_may_put_and_drop(loop: Loop) -> None:
    told: list[int] = []

    def late(id: int) -> None:
        told.append(id)
        dues.drop(2)
        dues.put(9, 4.0)

    dues = Deadlines(late)
    dues.put(1, 2.0)
    dues.put(2, 2.0)
    loop.pass_to(3)
    dues.drop(9)
    loop.pass_to(9)
    assert told == [1]


def test_ended_requests_are_forgotten_before_their_time(loop: Loop) -> None:
    """Most end long before they are due: 500 a second for ten minutes would be 300,000 entries."""
    dues = Deadlines(lambda id: None)
    dues.put(0, 600.0)
    for id in range(1, 10_000):
        dues.put(id, 600.0)
        dues.drop(id)
    assert len(dues._order) < 100


def test_as_a_timer_for_each_would(loop: Loop) -> None:
    chance = random.Random(5)
    told: list[tuple[int, float]] = []
    dues = Deadlines(lambda id: told.append((id, loop.now)))
    wanted: dict[int, float] = {}
    expected: list[tuple[int, float]] = []
    for _ in range(3000):
        id = chance.randrange(200)
        if chance.random() < 0.3:
            dues.drop(id)
            wanted.pop(id, None)
        else:
            wanted[id] = loop.now + chance.randrange(1, 50)
            dues.put(id, wanted[id])
        now = loop.now + chance.randrange(3)
        late = sorted((when, id) for id, when in wanted.items() if when <= now)
        expected += [(id, when) for when, id in late]
        for _, id in late:
            del wanted[id]
        loop.pass_to(now)
    assert told == expected


async def test_on_a_real_loop() -> None:
    late: Any = asyncio.get_running_loop().create_future()
    dues = Deadlines(late.set_result)
    dues.put(4, asyncio.get_running_loop().time() + 0.01)
    async with asyncio.timeout(5):
        assert await late == 4
