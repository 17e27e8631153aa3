"""How long requests wait for a model that has no slot at all."""

import asyncio
import math
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
        self._timed: set[str] = set()  # of these, those whose next end is waited for

    def look(self, model: str) -> None:
        """To call when a request begins to wait, and while any does, when its model's number of
        slots may have changed."""
        if self._capacity(model):
            self._since.pop(model, None)
            return
        self._since.setdefault(model, time.monotonic())
        self._wait(model, self._patience_s)

    def _wait(self, model: str, seconds: float) -> None:
        """One timer for all of a model: each looks at all that wait."""
        if model not in self._timed:
            self._timed.add(model)
            asyncio.get_running_loop().call_later(seconds, self._end, model)

    def _end(self, model: str) -> None:
        """Refuses, with UNAVAILABLE and reason "no_worker", what has waited so long for nothing."""
        self._timed.discard(model)
        if self._capacity(model) or model not in self._since:
            return
        until = time.monotonic() - self._patience_s + _NEW_TURN_S
        next_s = math.inf
        for ticket in list(self._tickets()):
            if ticket.model != model or not ticket.waits:
                continue
            since = max(ticket.entered_s, self._since[model])
            if since > until:
                next_s = min(next_s, since)
                continue
            self._refuse(
                ticket,
                unavailable(
                    f"no worker for {model!r} is available", stage="router", reason="no_worker"
                ),
            )
        if next_s < math.inf:
            self._wait(model, next_s - until + _NEW_TURN_S)
