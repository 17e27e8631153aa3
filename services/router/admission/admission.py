"""A router's end of admission: its tickets, and which of the two orders they stand in.

A grant comes back with the call that caused it, is pushed to the router that holds the stream, and,
should that push be lost, is found by the next renewal. Slots and places are leases.

While Redis is away: "closed" refuses; "open" admits in the same order within this router, up to its
share of the slots. When Redis is back, the slots held are entered again, and so are the waiting
requests, with the time they have waited.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import grpc

from services.common.config import Settings
from services.common.errors import PenstockError, unavailable
from services.common.redis import Redis, RedisAway, RedisError
from services.router import metrics
from services.router.admission.fair_order import Decided, FairOrder, Request
from services.router.admission.shared_order import SharedOrder
from services.router.admission.ticket import LANE_NAMES, Ticket

log = logging.getLogger(__name__)

_RENEW_S = 1.0  # also how long a lost word from another router can delay a request
_LEAST_ADVICE_S = 1.0
_LEAVING_KEPT = 10_000  # ids, of each model, while Redis is away
_NO_LIMIT = 2**53  # a recalled request goes on: it is never refused a place
_NEW_TURN_S = 0.001  # timers may fire this much early
Leaver = tuple[str, float]  # id, work that was missed when it was charged


class Admission:
    """This router's end of admission, for all models."""

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        router_id: str,
        capacity: Callable[[str], int],
        routers: Callable[[], int],
    ) -> None:
        """`capacity(model)` is the number of slots, `routers()` how many routers share them."""
        self._settings = settings.router
        self._shared = SharedOrder(redis, settings, router_id, capacity)
        self._capacity = capacity
        self._routers = routers
        self._tickets: dict[str, Ticket] = {}  # waiting or holding a slot
        self._local: dict[str, FairOrder] = {}  # by model; used while Redis is away
        self._leaving: dict[str, list[Leaver]] = defaultdict(list)  # by model, to tell Redis of
        self._giving_back: set[str] = set()
        self._unserved: dict[str, float] = {}  # models without a slot at all → since when
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._poked = asyncio.Event()
        self.away = False  # whether Redis is taken for away

    async def start(self) -> None:
        metrics.admitted.set_function(self._holding)
        metrics.queued.set_function(lambda: len(self._tickets) - self._holding())
        self._loops = [
            self._spawn(self._renew_forever(), "admission renewal"),
            self._spawn(self._shared.listen(self._follow), "admission grants"),
        ]

    async def stop(self) -> None:
        """Gives back what is still held."""
        for ticket in list(self._tickets.values()):
            self.leave(ticket)
        await self._tell_leaving()
        for task in self._loops:
            task.cancel()
        if self._tasks:  # those that just tell Redis of a leaving
            await asyncio.wait(self._tasks, timeout=_RENEW_S)
        for task in self._tasks:
            task.cancel()

    async def admit(self, ticket: Ticket) -> None:
        """Returns when the ticket holds a slot. To be followed by `leave`, however it ends.

        Raises RESOURCE_EXHAUSTED with reason "queue_full" or "queue_timeout", and UNAVAILABLE with
        reason "no_worker" when there has been no slot at all for the patience, or "admission_away"
        when Redis is away and admission is closed without it.
        """
        self._tickets[ticket.id] = ticket
        if ticket.resumed:
            self._resume(ticket)
        else:
            await self._wait(ticket)
        metrics.wait.observe(ticket.waited_s)
        metrics.grants.labels(LANE_NAMES[ticket.lane], ticket.order).inc()

    def _resume(self, ticket: Ticket) -> None:
        self._grant(ticket, "before")
        if order := self._local.get(ticket.model):
            order.hold(self._request(ticket), time.monotonic())
        self.poke()  # the renewal tells Redis of it, as of any slot that it has lost

    async def _wait(self, ticket: Ticket) -> None:
        self._expect_workers(ticket.model)
        asking = self._spawn(self._enter(ticket), f"enter {ticket.id}")
        try:
            async with asyncio.timeout(self._settings.queue_timeout_s):
                # Not cancelled with the waiting: what Redis was asked must be known to be undone.
                await asyncio.shield(asking)
                await asyncio.shield(ticket.granted)
        except TimeoutError:
            metrics.refusals.labels("queue_timeout").inc()
            raise PenstockError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"no capacity within {self._settings.queue_timeout_s:g} s",
                stage="router",
                reason="queue_timeout",
                retry_after_s=self._settings.queue_timeout_s / 2,
            ) from None

    async def admit_again(self, ticket: Ticket) -> None:
        """Returns when a ticket that was recalled holds a slot again; as long as its caller waits.

        Raises UNAVAILABLE with reason "no_worker".
        """
        ticket.heard()
        self._expect_workers(ticket.model)
        await asyncio.shield(ticket.granted)

    def leave(self, ticket: Ticket) -> None:
        """Gives up the ticket's slot or place, whichever it has. Idempotent, never waits."""
        if self._tickets.pop(ticket.id, None) is None:
            return
        ticket.left = True
        # A place is free of charge; should it be granted just now, it has used nothing.
        missed = ticket.missed if ticket.holds else -ticket.work
        if not ticket.granted.done():
            ticket.granted.cancel()
        self._leave_later(ticket.model, ticket.id, missed)
        if order := self._local.get(ticket.model):
            order.leave(ticket.id, missed, time.monotonic())
            self._look_local(ticket.model)

    def check(self) -> None:
        """Raises RuntimeError when a background task has ended."""
        for task in self._loops:
            if task.done():
                raise RuntimeError(f"{task.get_name()} has ended")

    def poke(self) -> None:
        """The number of slots may have changed: look at once."""
        self._poked.set()
        for model in {ticket.model for ticket in self._tickets.values() if ticket.waits}:
            self._expect_workers(model)

    async def status(self, models: Iterable[str]) -> tuple[int, int]:
        """Over all routers, or this one alone while Redis is away: (holding a slot, waiting)."""
        held = waiting = 0
        try:
            for model in models:
                reply = await self._shared.look(model)
                self._follow(model, reply, reply.advice_s)
                held, waiting = held + reply.first, waiting + reply.second
        except (*RedisAway, RedisError):
            held = self._holding()
            waiting = len(self._tickets) - held
        return held, waiting

    def _holding(self) -> int:
        tickets = list(self._tickets.values())  # a copy at once: the metrics' thread calls this too
        return sum(ticket.holds for ticket in tickets)

    # ---- one ticket -------------------------------------------------------------------------

    async def _enter(self, ticket: Ticket) -> None:
        """Asks for the ticket's place, in Redis or without it; a refusal fails the ticket."""
        if ticket.left or not ticket.waits:
            return
        try:
            if not self.away:
                with self._watching_redis():
                    await self._enter_shared(ticket)
                    return
            self._enter_local(ticket)
        except PenstockError as refusal:
            self._refuse(ticket, refusal)
        finally:
            if ticket.left:
                self._leave_later(ticket.model, ticket.id, -ticket.work)

    async def _enter_shared(self, ticket: Ticket) -> None:
        reply = await self._shared.enter(ticket, self._limit(ticket))
        self._follow(ticket.model, reply, reply.advice_s)
        self._entered(ticket, reply.first, reply.second, reply.advice_s, "redis")

    def _enter_local(self, ticket: Ticket) -> None:
        order = self._local_order(ticket.model)
        if not ticket.waits or ticket.left or ticket.id in order:
            return
        if self._settings.admission_without_redis == "closed" and not ticket.recalls:
            raise unavailable(
                "admission is closed while Redis is away", stage="router", reason="admission_away"
            )
        decided, limit = Decided(), self._limit(ticket)
        share, now_s = self._share(ticket.model), time.monotonic()
        state, before = order.enter(self._request(ticket), limit, share, now_s, decided)
        self._follow(ticket.model, decided, _LEAST_ADVICE_S)
        self._entered(ticket, state, before, _LEAST_ADVICE_S, "local")

    def _entered(
        self, ticket: Ticket, state: str, before: int, advice_s: float, order: str
    ) -> None:
        if not ticket.recalls:
            ticket.before = before
        if state == "granted":
            self._grant(ticket, order)
        elif state == "full":
            raise self._full(advice_s)
        else:
            ticket.queued = True
            loop = asyncio.get_running_loop()
            loop.call_later(self._settings.recall_after_s, self._may_recall, ticket)

    def _may_recall(self, ticket: Ticket) -> None:
        """It has waited long enough for a slot that its tenant is owed: the order is to look."""
        if self.away:
            self._look_local(ticket.model)
        elif ticket.waits and not ticket.left:
            self._spawn(self._look_shared(ticket.model), "admission look")

    async def _look_shared(self, model: str) -> None:
        with self._watching_redis():
            reply = await self._shared.look(model)
            self._follow(model, reply, reply.advice_s)

    def _follow(self, model: str, decided: Decided, advice_s: float) -> None:
        """Does with this router's requests as the order has decided."""
        for id in decided.granted:
            if ticket := self._tickets.get(id):
                self._grant(ticket, "local" if self.away else "redis")
            else:  # it left while the grant was under way
                self._leave_later(model, id, 0.0)
        for id in decided.displaced:
            if ticket := self._tickets.get(id):
                self._refuse(ticket, self._full(advice_s))
        for id in decided.recalled:
            if ticket := self._tickets.get(id):
                self._give_back(ticket)

    def _grant(self, ticket: Ticket, order: str) -> None:
        if ticket.waits:
            ticket.order = order
            ticket.granted.set_result(None)

    def _refuse(self, ticket: Ticket, refusal: PenstockError) -> None:
        if ticket.waits:
            metrics.refusals.labels(refusal.reason).inc()
            ticket.granted.set_exception(refusal)
            ticket.granted.exception()  # read even if nobody waits any more

    def _limit(self, ticket: Ticket) -> int:
        return _NO_LIMIT if ticket.recalls else self._settings.queue_limit

    def _full(self, advice_s: float) -> PenstockError:
        """`advice_s`: when a request that came now would have its turn."""
        return PenstockError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too many requests are waiting",
            stage="router",
            reason="queue_full",
            retry_after_s=min(max(advice_s, _LEAST_ADVICE_S), self._settings.queue_timeout_s),
        )

    # ---- recalls ----------------------------------------------------------------------------

    def _give_back(self, ticket: Ticket) -> None:
        if not ticket.holds or ticket.recalled.done() or ticket.id in self._giving_back:
            return  # told twice
        if self.away:
            self._give_back_local(ticket)
        else:
            self._giving_back.add(ticket.id)
            self._spawn(self._give_back_shared(ticket), f"give back {ticket.id}")

    async def _give_back_shared(self, ticket: Ticket) -> None:
        try:
            with self._watching_redis():
                left_over = ticket.left_over
                reply = await self._shared.give_back(ticket, left_over)
                if reply.first == "waiting" and not ticket.left:
                    ticket.wait_again(left_over)
                    metrics.recalls.inc()
                self._follow(ticket.model, reply, reply.advice_s)
        finally:
            self._giving_back.discard(ticket.id)

    def _give_back_local(self, ticket: Ticket) -> None:
        order, decided, left_over = self._local_order(ticket.model), Decided(), ticket.left_over
        share, now_s = self._share(ticket.model), time.monotonic()
        left = left_over / ticket.weight
        if order.give_back(ticket.id, ticket.missed, left, share, now_s, decided) == "waiting":
            ticket.wait_again(left_over)
            metrics.recalls.inc()
        self._follow(ticket.model, decided, _LEAST_ADVICE_S)

    # ---- no worker at all -------------------------------------------------------------------

    def _expect_workers(self, model: str) -> None:
        """While a model has no slot at all, its requests wait for one as long as the patience."""
        if self._capacity(model):
            self._unserved.pop(model, None)
            return
        self._unserved.setdefault(model, time.monotonic())
        patience_s = self._settings.worker_patience_s
        asyncio.get_running_loop().call_later(patience_s, self._refuse_unserved, model)

    def _refuse_unserved(self, model: str) -> None:
        if self._capacity(model) or model not in self._unserved:
            return
        until = time.monotonic() - self._settings.worker_patience_s + _NEW_TURN_S
        for ticket in list(self._tickets.values()):
            if ticket.model == model and max(ticket.entered_s, self._unserved[model]) <= until:
                self._refuse(
                    ticket,
                    unavailable(
                        f"no worker for {model!r} is available", stage="router", reason="no_worker"
                    ),
                )

    # ---- Redis ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watching_redis(self) -> Iterator[None]:
        """Around a call: when Redis turns out to be away, admission goes on without it."""
        try:
            yield
        except (*RedisAway, RedisError) as error:
            self._lose_redis(error)

    def _leave_later(self, model: str, id: str, missed: float) -> None:
        """Tells Redis in the background; all that leave in one turn of the loop go together."""
        if not self._leaving:
            self._spawn(self._tell_leaving(), "admission leave")
        self._leaving[model].append((id, missed))

    async def _tell_leaving(self) -> None:
        """What cannot be told now is told when Redis is back; should it be too much, leases end."""
        leaving, self._leaving = self._leaving, defaultdict(list)
        if not self.away:
            with self._watching_redis():
                for model in list(leaving):
                    reply = await self._shared.leave(model, leaving[model])
                    del leaving[model]
                    self._follow(model, reply, reply.advice_s)
        for model, leavers in leaving.items():
            self._leaving[model] = (leavers + self._leaving[model])[-_LEAVING_KEPT:]

    async def _renew_forever(self) -> None:
        """Keeps leases, finds words that were lost, and looks whether Redis is back."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_RENEW_S, self._settings.slot_lease_s / 3)):
                    await self._poked.wait()
            self._poked.clear()
            with self._watching_redis():
                await self._renew()
            for model in list(self._local):
                self._look_local(model)

    async def _renew(self) -> None:
        by_model: dict[str, list[Ticket]] = defaultdict(list)
        for ticket in self._tickets.values():
            by_model[ticket.model].append(ticket)
        if self.away and not by_model:
            await self._shared.probe()
        for model, tickets in by_model.items():
            held = [t.id for t in tickets if t.holds]
            waiting = [t.id for t in tickets if t.waits]
            reply = await self._shared.renew(model, held, waiting)
            self._follow(model, reply, reply.advice_s)
            await asyncio.gather(*(self._hold_again(id) for id in reply.first))
            if not self.away:
                self._enter_again(self._tickets[id] for id in reply.second if id in self._tickets)
        self._regain_redis()

    async def _hold_again(self, id: str) -> None:
        ticket = self._tickets.get(id)
        if ticket and ticket.holds and id not in self._giving_back:
            reply = await self._shared.hold(ticket)
            self._follow(ticket.model, reply, reply.advice_s)

    def _enter_again(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._spawn(self._enter(ticket), f"enter {ticket.id}")

    def _lose_redis(self, error: Exception) -> None:
        if self.away:
            return
        log.warning("admission goes on without Redis: %s", error)
        self.away = True
        metrics.redis_away.set(1)
        self._enter_again([t for t in self._tickets.values() if t.waits])

    def _regain_redis(self) -> None:
        if not self.away:
            return
        log.info("admission is back in Redis")
        self.away = False
        metrics.redis_away.set(0)
        self._local.clear()
        self._spawn(self._tell_leaving(), "admission leave")
        self._enter_again([t for t in self._tickets.values() if t.waits])

    # ---- without Redis ----------------------------------------------------------------------

    def _local_order(self, model: str) -> FairOrder:
        """It begins with the slots that this router's requests hold already."""
        if model not in self._local:
            settings = self._settings
            order = FairOrder(settings.ageing_s, settings.recall_after_s, settings.max_recalls)
            for ticket in self._tickets.values():
                if ticket.model == model and ticket.holds:
                    order.hold(self._request(ticket), time.monotonic())
            self._local[model] = order
        return self._local[model]

    def _request(self, ticket: Ticket) -> Request:
        return Request(
            ticket.id,
            ticket.tenant,
            ticket.lane,
            ticket.work,
            ticket.weight,
            ticket.entered_s,
            ticket.recalls,
        )

    def _share(self, model: str) -> int:
        """Of the slots, as many as this router may fill by itself; what it holds counts."""
        capacity = self._capacity(model)
        return max(1, capacity // max(1, self._routers())) if capacity else 0

    def _look_local(self, model: str) -> None:
        decided = Decided()
        self._local_order(model).look(self._share(model), time.monotonic(), decided)
        self._follow(model, decided, _LEAST_ADVICE_S)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
