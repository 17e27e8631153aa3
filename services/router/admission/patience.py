"""How long requests wait for a model that has no slot at all."""

import asyncio
import time
from collections.abc import Callable, Iterable

from services.common.errors import PenstockError, unavailable
from services.router.admission.ticket import Ticket

_NEW_TURN_S = 0.001  # timers may fire this much early


class Patience:
    """Each waits as long as the patience, counted anew in each outage."""

    def __init__(
        self,
        patience_s: float,
        capacity: Callable[[str], int],
        tickets: Callable[[], Iterable[Ticket]],
        refuse: Callable[[Ticket, PenstockError], None],
    ) -> None:
        self._patience_s = patience_s
        self._capacity = capacity
        self._tickets = tickets
        self._refuse = refuse
        self._since: dict[str, float] = {}  # models without a slot at all → since when

    def look(self, model: str) -> None:
        """To call when a request begins to wait, and while any does, when its model's number of
        slots may have changed."""
        if self._capacity(model):
            self._since.pop(model, None)
            return
        self._since.setdefault(model, time.monotonic())
        asyncio.get_running_loop().call_later(self._patience_s, self._end, model)

    def _end(self, model: str) -> None:
        """Refuses, with UNAVAILABLE and reason "no_worker", what has waited so long for nothing."""
        if self._capacity(model) or model not in self._since:
            return
        until = time.monotonic() - self._patience_s + _NEW_TURN_S
        for ticket in list(self._tickets()):
            if ticket.model == model and max(ticket.entered_s, self._since[model]) <= until:
                self._refuse(
                    ticket,
                    unavailable(
                        f"no worker for {model!r} is available", stage="router", reason="no_worker"
                    ),
                )
