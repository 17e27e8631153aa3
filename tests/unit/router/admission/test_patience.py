"""Who is refused when a model has had no slot for so long, on a clock of the test's own."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from services.common.errors import PenstockError
from services.router.admission import Ticket, patience
from services.router.admission.patience import Patience

PATIENCE_S = 10.0


class World:
    """Models' slots, tickets and a clock; timers fire when the clock gets there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.slots: dict[str, int] = {}
        self.tickets: list[Ticket] = []
        self.refused: list[tuple[str, float]] = []
        self._timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: self.now))
        loop = SimpleNamespace(call_later=self._later)
        monkeypatch.setattr(patience, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
        self.patience = Patience(
            PATIENCE_S, lambda model: self.slots.get(model, 0), lambda: self.tickets, self._refuse
        )

    def _later(self, delay_s: float, call: Callable[..., None], *given: Any) -> None:
        self._timers.append((self.now + delay_s, call, given))

    def _refuse(self, ticket: Ticket, error: PenstockError) -> None:
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "no_worker")
        assert ticket.model in error.message
        self.refused.append((ticket.id, self.now))
        self.tickets.remove(ticket)

    def comes(self, id: str, model: str = "m") -> None:
        self.tickets.append(Ticket(id, model, "t", 2, 1.0, 1.0, entered_s=self.now))
        self.patience.look(model)

    def have(self, slots: int, model: str = "m") -> None:
        self.slots[model] = slots
        self.patience.look(model)

    def until(self, now: float) -> list[tuple[str, float]]:
        """Who was refused up to then, and when."""
        while due := [timer for timer in self._timers if timer[0] <= now]:
            first = min(due, key=lambda timer: timer[0])
            self._timers.remove(first)
            self.now, call, given = first
            call(*given)
        self.now = now
        return self.refused


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_each_is_refused_when_it_has_waited_so_long_for_nothing(world: World) -> None:
    world.comes("a")
    world.until(4.0)
    world.comes("b")
    assert world.until(9.9) == []
    assert world.until(10.0) == [("a", 10.0)]
    assert world.until(20.0) == [("a", 10.0), ("b", 14.0)]


async def test_the_patience_begins_with_the_outage(world: World) -> None:
    world.have(1)
    world.comes("waits for its turn")
    assert world.until(100.0) == []
    world.have(0)
    assert world.until(109.9) == []
    assert world.until(110.0) == [("waits for its turn", 110.0)]


@pytest.mark.parametrize("looked", [True, False])
async def test_who_has_a_worker_again_is_not_refused(world: World, looked: bool) -> None:
    """Be it that nobody has looked since it came."""
    world.comes("a")
    world.until(9.0)
    world.slots["m"] = 1
    if looked:
        world.patience.look("m")
    assert world.until(30.0) == []


async def test_an_outage_that_ended_does_not_count_in_the_next(world: World) -> None:
    world.comes("a")
    for now, slots in ((8.0, 1), (9.0, 0)):
        world.until(now)
        world.have(slots)
    assert world.until(18.9) == []
    assert world.until(19.0) == [("a", 19.0)]


async def test_models_have_outages_of_their_own(world: World) -> None:
    world.have(1, "other")
    world.comes("a")
    world.comes("b", "other")
    world.until(5.0)
    world.have(0, "other")
    assert world.until(14.9) == [("a", 10.0)]
    assert world.until(15.0) == [("a", 10.0), ("b", 15.0)]


async def test_one_timer_is_for_all_that_wait(world: World) -> None:
    """One for each, and each looking at all, held the loop for as long as they are many squared."""
    for n in range(100):
        world.until(n / 100)
        world.comes(f"{n}")
    assert len(world._timers) == 1
    assert [at for _, at in world.until(100.0)] == pytest.approx([10 + n / 100 for n in range(100)])
    assert not world._timers, "nobody waits any more"
    world.comes("late")
    assert world.until(200.0)[-1] == ("late", 110.0)
