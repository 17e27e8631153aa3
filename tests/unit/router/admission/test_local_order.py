"""The order that a router keeps alone: its share of the slots, and what it begins with."""

import time
from typing import Any

import pytest

from services.common.config import RouterSettings
from services.common.errors import PenstockError
from services.router.admission import Ticket
from services.router.admission.local_order import LEAST_ADVICE_S, LocalOrder


class Alone:
    """A router's local order and its tickets."""

    def __init__(self, capacity: int = 4, routers: int = 1, **options: Any) -> None:
        self.tickets: dict[str, Ticket] = {}
        self.capacity, self.routers = capacity, routers
        self.order = LocalOrder(
            RouterSettings(**{"max_recalls": 0, **options}),
            lambda model: self.capacity,
            lambda: self.routers,
            self.tickets,
        )

    def ticket(
        self, tenant: str = "t", model: str = "m", age_s: float = 0.0, **facts: Any
    ) -> Ticket:
        facts = {"lane": 2, "cost": 10.0, "weight": 1.0, **facts}
        made = Ticket(
            f"{len(self.tickets)}", model, tenant, entered_s=time.monotonic() - age_s, **facts
        )
        self.tickets[made.id] = made
        return made

    def holding(self, *args: Any, **facts: Any) -> Ticket:
        made = self.ticket(*args, **facts)
        made.granted.set_result(None)
        return made

    def enter(self, *args: Any, **facts: Any) -> tuple[Ticket, str]:
        made = self.ticket(*args, **facts)
        state = self.order.enter(made, 100).first
        if state == "granted":
            made.granted.set_result(None)
        return made, state


@pytest.mark.parametrize(
    ("capacity", "routers", "share"),
    [(4, 1, 4), (4, 2, 2), (5, 2, 2), (1, 3, 1), (0, 1, 0), (0, 3, 0), (3, 0, 3)],
)
async def test_each_router_has_its_share(capacity: int, routers: int, share: int) -> None:
    """At the least one slot, while there is any: no router's requests wait for ever."""
    alone = Alone(capacity, routers)
    states = [alone.enter()[1] for _ in range(6)]
    assert states == ["granted"] * share + ["waiting"] * (6 - share)
    assert alone.order.waiting("m") == 6 - share


async def test_it_begins_with_the_slots_that_are_held_of_the_model() -> None:
    alone = Alone(capacity=3)
    for _ in range(2):
        alone.holding()
    alone.holding(model="another")
    alone.ticket()  # waits, and is entered by itself
    assert [alone.enter()[1] for _ in range(2)] == ["granted", "waiting"]
    assert alone.order.models == ["m"]
    assert [alone.enter(model="another")[1] for _ in range(3)] == ["granted", "granted", "waiting"]
    assert (alone.order.waiting("m"), alone.order.waiting("another")) == (1, 1)


async def test_what_is_held_from_now_on_counts_too() -> None:
    """A request that another router began goes on here, whatever the share."""
    alone = Alone(capacity=1)
    alone.order.hold(alone.holding())
    assert alone.order.models == [], "not begun: it will find the slot by itself"
    assert alone.order.leave(alone.ticket(), 0.0).granted == []
    assert alone.order.models == []
    waiting, state = alone.enter()
    assert state == "waiting"
    resumed = alone.holding()
    alone.order.hold(resumed)
    assert alone.order.leave(alone.tickets["0"], 0.0).granted == []
    assert alone.order.leave(resumed, 0.0).granted == [waiting.id]


async def test_who_is_known_is_not_entered_twice() -> None:
    alone = Alone(capacity=1)
    held, _ = alone.enter()
    waiting, _ = alone.enter()
    for one in (held, waiting):
        reply = alone.order.enter(one, 100)
        assert (reply.first, reply.granted, reply.advice_s) == ("known", [], LEAST_ADVICE_S)
    assert alone.order.waiting("m") == 1


async def test_forgotten_is_what_was_held() -> None:
    alone = Alone(capacity=1)
    alone.enter()
    alone.enter()
    alone.order.forget()
    assert alone.order.models == []
    alone.tickets.clear()
    assert alone.enter()[1] == "granted"


async def test_a_ticket_is_entered_as_what_it_is() -> None:
    """Its lane, its tenant, its work by weight, and how long it has waited."""
    alone = Alone(capacity=1, ageing_s=10.0)
    running, _ = alone.enter("first")
    heavy, _ = alone.enter("heavy", cost=100, weight=100.0)
    heavy_too, _ = alone.enter("heavy", cost=100, weight=100.0)
    light, _ = alone.enter("light", cost=50)
    light_too, _ = alone.enter("light", cost=50, age_s=5.0)  # it came before
    urgent, _ = alone.enter("urgent", lane=1)
    old, _ = alone.enter("old", lane=3, age_s=15.0)
    order = []
    while granted := alone.order.leave(running, 0.0).granted:
        (id,) = granted
        running = alone.tickets[id]
        order.append(running)
    # "old" has risen to the normal lane. Of equals the first by name.
    assert order == [urgent, heavy, light_too, old, heavy_too, light]


@pytest.mark.parametrize(("others_cost", "first"), [(29.0, "other"), (31.0, "flood")])
async def test_a_slot_given_back_is_charged_for_what_is_left(
    others_cost: float, first: str
) -> None:
    """The flood: 0.5 twice, and what is left, 60 by a weight of two, when it goes on."""
    alone = Alone(capacity=2, recall_after_s=0.0, max_recalls=1)
    flood = [alone.enter("flood", weight=2.0, cost=1.0)[0] for _ in range(2)]
    for one in flood:
        one.progress = lambda: (1.0, 60.0)
    calm = alone.ticket("calm", weight=2.0)
    assert alone.order.enter(calm, 100).recalled == [flood[1].id]
    reply = alone.order.give_back(flood[1], flood[1].left_over)
    assert (reply.first, reply.granted) == ("waiting", [calm.id])
    assert alone.order.leave(flood[0], 0.0).granted == [flood[1].id]
    other, _ = alone.enter("other", cost=others_cost)
    assert alone.order.leave(calm, 0.0).granted == [other.id]
    more = {tenant: alone.enter(tenant)[0].id for tenant in ("flood", "other")}
    alone.capacity = 1
    assert alone.order.leave(flood[1], 0.0).granted == []
    assert alone.order.leave(other, 0.0).granted == [more[first]]


@pytest.mark.parametrize(("recall_after_s", "recalled"), [(0.0, 1), (1000.0, 0)])
async def test_recalls_go_by_the_settings(recall_after_s: float, recalled: int) -> None:
    alone = Alone(capacity=2, recall_after_s=recall_after_s, max_recalls=1, ageing_s=500.0)
    for _ in range(2):
        alone.enter("flood")
    calm = alone.ticket("calm", age_s=1.0)
    assert len(alone.order.enter(calm, 100).recalled) == recalled


async def test_closed_without_redis_is_told_as_such() -> None:
    alone = Alone(admission_without_redis="closed")
    with pytest.raises(PenstockError) as told:
        alone.order.enter(alone.ticket(), 100)
    assert (told.value.stage, told.value.reason) == ("router", "admission_away")
    assert alone.order.waiting("m") == 0
