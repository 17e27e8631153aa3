"""The order in this process, as a router keeps it alone while Redis is away."""

import time
from collections.abc import Callable, Mapping

from services.common.config import RouterSettings
from services.common.errors import unavailable
from services.router.admission.fair_order import FairOrder, Request
from services.router.admission.shared_order import Reply
from services.router.admission.ticket import Ticket

LEAST_ADVICE_S = 1.0


class LocalOrder:
    """What `SharedOrder` does, without Redis and at once, up to this router's share of the slots.

    Of each model it begins, when it is first asked, with the slots that `tickets` hold then.
    """

    def __init__(
        self,
        settings: RouterSettings,
        capacity: Callable[[str], int],
        routers: Callable[[], int],
        tickets: Mapping[str, Ticket],
    ) -> None:
        self._settings = settings
        self._capacity = capacity
        self._routers = routers
        self._tickets = tickets
        self._orders: dict[str, FairOrder] = {}  # by model

    @property
    def models(self) -> list[str]:
        """Those that it has begun with."""
        return list(self._orders)

    def waiting(self, model: str) -> int:
        """How many wait."""
        return len(self._of(model))

    def enter(self, ticket: Ticket, limit: int) -> Reply:
        """As there; known ones are "known". Raises UNAVAILABLE when admission is closed without
        Redis."""
        order, reply = self._of(ticket.model), _reply()
        if ticket.id in order:
            reply.first, reply.second = "known", 0
            return reply
        if self._settings.admission_without_redis == "closed" and not ticket.recalls:
            raise unavailable(
                "admission is closed while Redis is away", stage="router", reason="admission_away"
            )
        share, now_s = self._share(ticket.model), time.monotonic()
        reply.first, reply.second = order.enter(_request(ticket), limit, share, now_s, reply)
        return reply

    def hold(self, ticket: Ticket) -> None:
        """As there, if it has begun: later it knows by itself."""
        if order := self._orders.get(ticket.model):
            order.hold(_request(ticket), time.monotonic())

    def give_back(self, ticket: Ticket, left_over: float) -> Reply:
        """As there."""
        order, reply = self._of(ticket.model), _reply()
        share, now_s = self._share(ticket.model), time.monotonic()
        left = left_over / ticket.weight
        reply.first = order.give_back(ticket.id, ticket.missed, left, share, now_s, reply)
        return reply

    def leave(self, ticket: Ticket, missed: float) -> Reply:
        """As there, if it has begun."""
        order = self._orders.get(ticket.model)
        if order is None:
            return _reply()
        order.leave(ticket.id, missed, time.monotonic())
        return self.look(ticket.model)

    def look(self, model: str) -> Reply:
        """Grants free slots in order and recalls what is owed."""
        reply = _reply()
        self._of(model).look(self._share(model), time.monotonic(), reply)
        return reply

    def forget(self) -> None:
        """Redis is back."""
        self._orders.clear()

    def _of(self, model: str) -> FairOrder:
        if model not in self._orders:
            settings = self._settings
            order = FairOrder(settings.ageing_s, settings.recall_after_s, settings.max_recalls)
            for ticket in self._tickets.values():
                if ticket.model == model and ticket.holds:
                    order.hold(_request(ticket), time.monotonic())
            self._orders[model] = order
        return self._orders[model]

    def _share(self, model: str) -> int:
        """Of the slots, as many as this router may fill by itself; what it holds counts."""
        capacity = self._capacity(model)
        return max(1, capacity // max(1, self._routers())) if capacity else 0


def _reply() -> Reply:
    return Reply(advice_s=LEAST_ADVICE_S)


def _request(ticket: Ticket) -> Request:
    return Request(
        ticket.id,
        ticket.tenant,
        ticket.lane,
        ticket.work,
        ticket.weight,
        ticket.entered_s,
        ticket.recalls,
    )
