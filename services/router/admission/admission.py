"""A router's end of admission: its tickets, and which of the two orders they stand in.

Where there is room enough (room.py) a request goes ahead while Redis hears of it; else it waits for
its grant. That comes back with the call that caused it, is pushed to the router that holds the
stream, and, should that push be lost, is found by the next renewal. Slots and places are leases.

While Redis is away: "closed" refuses; "open" admits in the same order within this router, up to its
share of the slots. When Redis is back, the slots held are entered again, and so are the waiting
requests, with the time they have waited.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import grpc

from services.common.config import Settings
from services.common.errors import PenstockError
from services.common.redis import Redis, RedisAway, RedisError
from services.router import metrics
from services.router.admission.local_order import LEAST_ADVICE_S, LocalOrder
from services.router.admission.news import Leaver, News, Told
from services.router.admission.patience import Patience
from services.router.admission.room import Room
from services.router.admission.shared_order import Reply, SharedOrder
from services.router.admission.ticket import LANE_NAMES, Ticket, not_served

log = logging.getLogger(__name__)

_RENEW_S = 1.0  # also how long a lost word from another router can delay a request
_NO_LIMIT = 2**53  # a recalled request goes on: it is never refused a place


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
        self._capacity = capacity
        self._room = Room(capacity, routers)
        self._news = News(self._room, self._tell)
        self._shared = SharedOrder(
            redis, settings, router_id, capacity, self._room.hear, self._tell
        )
        self._tickets: dict[str, Ticket] = {}  # waiting or holding a slot
        self._local = LocalOrder(settings.router, capacity, routers, self._tickets)
        self._patience = Patience(
            settings.router.worker_patience_s, capacity, self._tickets.values, self._refuse
        )
        self._giving_back: set[str] = set()
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
        self._tell()
        for task in self._loops:
            task.cancel()
        if self._tasks:  # those that just tell Redis of a leaving
            await asyncio.wait(self._tasks, timeout=_RENEW_S)
        for task in self._tasks:
            task.cancel()

    async def admit(self, ticket: Ticket) -> None:
        """Returns when the ticket holds a slot. To be followed by `leave`, however it ends.

        Raises RESOURCE_EXHAUSTED with reason "queue_full" or "queue_timeout", UNAVAILABLE with
        reason "no_worker" when there has been no slot at all for the patience, or "admission_away"
        when Redis is away and admission is closed without it, and NOT_FOUND when its model is
        removed meanwhile.
        """
        self._tickets[ticket.id] = ticket
        if ticket.resumed:
            self._resume(ticket)
        elif not self.away and self._room.take(ticket.model):
            self._go_ahead(ticket)
        else:
            await self._wait(ticket)
        metrics.wait.observe(ticket.waited_s)
        metrics.grants.labels(LANE_NAMES[ticket.lane], ticket.order).inc()

    def _resume(self, ticket: Ticket) -> None:
        self._grant(ticket, "before")
        self._local.hold(ticket)
        self.poke()  # the renewal tells Redis of it, as of any slot that it has lost

    def _go_ahead(self, ticket: Ticket) -> None:
        """Nobody waits, and there is room: the order hears of it in a moment, before any later
        request of this router enters."""
        self._grant(ticket, "ahead")
        self._news.held(ticket)

    async def _wait(self, ticket: Ticket) -> None:
        self._patience.look(ticket.model)
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

        Raises UNAVAILABLE with reason "no_worker", and NOT_FOUND.
        """
        ticket.heard()
        self._patience.look(ticket.model)
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
        self._follow(ticket.model, self._local.leave(ticket, missed))

    def check(self) -> None:
        """Raises RuntimeError when a background task has ended."""
        for task in self._loops:
            if task.done():
                raise RuntimeError(f"{task.get_name()} has ended")

    def poke(self) -> None:
        """The number of slots may have changed: look at once."""
        self._poked.set()
        for model in {ticket.model for ticket in self._tickets.values() if ticket.waits}:
            self._patience.look(model)

    def refuse_what_nobody_serves(self, served: set[str]) -> None:
        """What waits for a model that is none of the `served` and has no slot: it was removed."""
        for ticket in self._tickets.values():
            if ticket.waits and ticket.model not in served and not self._capacity(ticket.model):
                self._refuse(ticket, not_served(ticket.model))

    def waiting(self, model: str) -> bool:
        """Whether one of the model's requests waits at this router."""
        return any(ticket.model == model and ticket.waits for ticket in self._tickets.values())

    async def status(self, models: Iterable[str]) -> tuple[int, int]:
        """Over all routers, or this one alone while Redis is away: (holding a slot, waiting)."""
        held = waiting = 0
        try:
            for model in models:
                reply = await self._shared.look(model)
                self._follow(model, reply)
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
                    with self._room.asking(ticket.model):
                        reply = await self._shared.enter(ticket, self._limit(ticket))
                    self._entered(ticket, reply, "redis")
                    return
            if ticket.waits and not ticket.left:
                self._entered(ticket, self._local.enter(ticket, self._limit(ticket)), "local")
        except PenstockError as refusal:
            self._refuse(ticket, refusal)
        finally:
            if ticket.left:
                self._leave_later(ticket.model, ticket.id, -ticket.work)

    def _entered(self, ticket: Ticket, reply: Reply, order: str) -> None:
        self._follow(ticket.model, reply)
        state, before = reply.first, reply.second
        if state == "known":
            return
        if not ticket.recalls:
            ticket.before = before
        if state == "granted":
            self._grant(ticket, order)
        elif state == "full":
            raise self._full(reply.advice_s)
        else:
            ticket.queued = True
            loop = asyncio.get_running_loop()
            loop.call_later(self._settings.recall_after_s, self._may_recall, ticket)

    def _may_recall(self, ticket: Ticket) -> None:
        """It has waited long enough for a slot that its tenant is owed: the order is to look."""
        if self.away:
            self._follow(ticket.model, self._local.look(ticket.model))
        elif ticket.waits and not ticket.left:
            self._spawn(self._look_shared(ticket.model), "admission look")

    async def _look_shared(self, model: str) -> None:
        with self._watching_redis():
            reply = await self._shared.look(model)
            self._follow(model, reply)

    def _follow(self, model: str, decided: Reply) -> None:
        """Does with this router's requests as the order has decided."""
        for id in decided.granted:
            if ticket := self._tickets.get(id):
                self._grant(ticket, "local" if self.away else "redis")
            else:  # it left while the grant was under way
                self._leave_later(model, id, 0.0)
        for id in decided.displaced:
            if ticket := self._tickets.get(id):
                self._refuse(ticket, self._full(decided.advice_s))
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
            retry_after_s=min(max(advice_s, LEAST_ADVICE_S), self._settings.queue_timeout_s),
        )

    # ---- recalls ----------------------------------------------------------------------------

    def _give_back(self, ticket: Ticket) -> None:
        if not ticket.holds or ticket.recalled.done() or ticket.id in self._giving_back:
            return  # told twice
        if self.away:
            left_over = ticket.left_over
            self._gave_back(ticket, left_over, self._local.give_back(ticket, left_over))
        else:
            self._giving_back.add(ticket.id)
            self._spawn(self._give_back_shared(ticket), f"give back {ticket.id}")

    async def _give_back_shared(self, ticket: Ticket) -> None:
        try:
            with self._watching_redis():
                left_over = ticket.left_over
                reply = await self._shared.give_back(ticket, left_over)
                self._gave_back(ticket, left_over, reply)
        finally:
            self._giving_back.discard(ticket.id)

    def _gave_back(self, ticket: Ticket, left_over: float, reply: Reply) -> None:
        if reply.first == "waiting" and not ticket.left:
            ticket.wait_again(left_over)
            metrics.recalls.inc()
        self._follow(ticket.model, reply)

    # ---- Redis ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watching_redis(self) -> Iterator[None]:
        """Around a call: when Redis turns out to be away, admission goes on without it."""
        try:
            yield
        except (*RedisAway, RedisError) as error:
            self._lose_redis(error)

    def _leave_later(self, model: str, id: str, missed: float) -> None:
        """Tells Redis in the background."""
        self._news.left(model, Leaver(id, missed))

    def _tell(self) -> None:
        """Tells Redis what has gathered, before whatever else it is asked. While it is away that
        waits: of what has left the latest."""
        if self.away:
            return
        for model, told in self._news.take().items():
            called = self._shared.tell(model, told.held, told.left)
            self._spawn(self._told(model, told, called), "admission news")

    async def _told(self, model: str, told: Told, called: Coroutine[Any, Any, Reply]) -> None:
        try:
            with self._watching_redis():
                self._follow(model, await called)
                return
        finally:
            for ticket in told.held:
                self._room.entered(ticket.model)
        self._news.keep(model, told.left)

    async def _renew_forever(self) -> None:
        """Keeps leases, finds words that were lost, and looks whether Redis is back."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_RENEW_S, self._settings.slot_lease_s / 3)):
                    await self._poked.wait()
            self._poked.clear()
            with self._watching_redis():
                await self._renew()
            for model in self._local.models:
                self._follow(model, self._local.look(model))

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
            self._follow(model, reply)
            await asyncio.gather(*(self._hold(id) for id in reply.first))
            if not self.away:
                self._enter_again(self._tickets[id] for id in reply.second if id in self._tickets)
        self._regain_redis()

    async def _hold(self, id: str) -> None:
        """Tells Redis of a slot that it does not know."""
        ticket = self._tickets.get(id)
        if ticket and ticket.holds and id not in self._giving_back:
            reply = await self._shared.tell(ticket.model, [ticket], [])
            self._follow(ticket.model, reply)

    def _enter_again(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._spawn(self._enter(ticket), f"enter {ticket.id}")

    def _lose_redis(self, error: Exception) -> None:
        if self.away:
            return
        log.warning("admission goes on without Redis: %s", error)
        self.away = True
        self._room.forget()
        self._news.drop_held()
        metrics.redis_away.set(1)
        self._enter_again([t for t in self._tickets.values() if t.waits])

    def _regain_redis(self) -> None:
        if not self.away:
            return
        log.info("admission is back in Redis")
        self.away = False
        metrics.redis_away.set(0)
        self._local.forget()
        self._tell()
        self._enter_again([t for t in self._tickets.values() if t.waits])

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
