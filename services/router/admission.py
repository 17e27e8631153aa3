"""Admission: a request waits in one order over all routers until a slot of its model is free.

The order and the slots live in Redis (admission.lua). A grant comes back with the call that caused
it, is pushed to the router that holds the stream, and, should that push be lost, is found by the
next renewal. Slots and places are leases: a dead router's return by themselves.

While Redis is away: "closed" refuses; "open" admits in the same order within this router, up to its
share of the slots. When Redis is back, the slots held are entered again, and so are the waiting
requests, with the time they have waited. docs/decisions/0002-admission.md.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import grpc

from services.common.config import Settings
from services.common.errors import PenstockError, unavailable
from services.common.redis import Redis, RedisAway, RedisError
from services.router import metrics
from services.router.fair_order import FairOrder, Waiting
from services.router.script_pipe import ScriptPipe

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("admission.lua").read_text()
_RENEW_S = 1.0  # also how long a lost grant message can delay a request
_LEAST_ADVICE_S = 1.0
_LEAVING_KEPT = 10_000  # ids, of each model, while Redis is away
Leaver = tuple[str, str, float]  # id, tenant, work that was missed when it was charged
LANE_NAMES = {1: "high", 2: "normal", 3: "low"}


@dataclass(eq=False)
class Ticket:
    """One request's claim to a slot."""

    id: str  # unique among all requests of all routers
    model: str
    tenant: str
    lane: int  # 1 high, 2 normal, 3 low
    cost: float  # tokens, as expected
    weight: float  # the tenant's share, > 0
    resumed: bool = False  # it held a slot at a router that was lost, and has it still
    entered_s: float = field(default_factory=time.monotonic)
    before: int = 0  # requests that waited already when it came
    queued: bool = False  # it was not admitted at once
    order: str = "redis"  # or "local": which order granted it; "before": it was resumed
    left: bool = False
    used: float | None = None  # tokens, known once it leaves
    granted: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def work(self) -> float:
        return self.cost / self.weight

    @property
    def missed(self) -> float:
        """Work that the expected cost missed; less than 0: too much was charged."""
        return 0.0 if self.used is None else (self.used - self.cost) / self.weight

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.entered_s

    @property
    def holds(self) -> bool:
        """Whether it has its slot."""
        return self.granted.done() and not self.granted.cancelled() and not self.granted.exception()


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
        self._redis = redis
        self._script = ScriptPipe(redis, _SOURCE)
        self._namespace = settings.namespace
        self._root = f"{settings.namespace}:{{admission:"
        self._settings = settings.router
        self._router_id = router_id
        self._capacity = capacity
        self._routers = routers
        self._tickets: dict[str, Ticket] = {}  # waiting or holding a slot
        self._orders: dict[str, FairOrder] = {}  # by model; used while Redis is away
        self._leaving: dict[str, list[Leaver]] = defaultdict(list)  # by model, to tell Redis of
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._poked = asyncio.Event()
        self.away = False  # whether Redis is taken for away

    async def start(self) -> None:
        metrics.admitted.set_function(self._holding)
        metrics.queued.set_function(lambda: len(self._tickets) - self._holding())
        self._loops = [
            self._spawn(self._renew_forever(), "admission renewal"),
            self._spawn(self._listen(), "admission grants"),
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
        reason "admission_away" when Redis is away and admission is closed without it.
        """
        self._tickets[ticket.id] = ticket
        lane = LANE_NAMES[ticket.lane]
        if ticket.resumed:
            self._grant(ticket, "before")
            self.poke()  # the renewal tells Redis of it, as of any slot that it has lost
        else:
            await self._wait(ticket)
        metrics.wait.observe(ticket.waited_s)
        metrics.grants.labels(lane, ticket.order).inc()

    def leave(self, ticket: Ticket) -> None:
        """Gives up the ticket's slot or place, whichever it has. Idempotent, never waits."""
        if self._tickets.pop(ticket.id, None) is None:
            return
        ticket.left = True
        self._order(ticket.model).remove(ticket.id)
        if not ticket.granted.done():
            ticket.granted.cancel()
        self._leave_later(ticket.model, ticket.id, ticket)
        if self.away:
            if ticket.holds and ticket.order == "local":
                self._order(ticket.model).settle(ticket.tenant, ticket.missed)
            self._pump(ticket.model)

    def check(self) -> None:
        """Raises RuntimeError when a background task has ended."""
        for task in self._loops:
            if task.done():
                raise RuntimeError(f"{task.get_name()} has ended")

    def poke(self) -> None:
        """The number of slots may have changed: look at once."""
        self._poked.set()

    async def status(self, models: Iterable[str]) -> tuple[int, int]:
        """Over all routers, or this one alone while Redis is away: (holding a slot, waiting)."""
        held = waiting = 0
        try:
            for model in models:
                counts = await self._call(model, "status")
                held, waiting = held + counts[0], waiting + counts[1]
        except RedisAway:
            held = self._holding()
            waiting = len(self._tickets) - held
        return held, waiting

    def _holding(self) -> int:
        tickets = list(self._tickets.values())  # a copy at once: the metrics' thread calls this too
        return sum(ticket.holds for ticket in tickets)

    # ---- one ticket -------------------------------------------------------------------------

    async def _wait(self, ticket: Ticket) -> None:
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

    async def _enter(self, ticket: Ticket) -> None:
        """Asks for the ticket's place, in Redis or without it; a refusal fails the ticket."""
        if ticket.left or ticket.granted.done():
            return
        try:
            if not self.away:
                with self._watching_redis():
                    await self._enter_redis(ticket)
                    return
            self._enter_local(ticket)
        except PenstockError as refusal:
            self._refuse(ticket, refusal)
        finally:
            if ticket.left:
                self._leave_later(ticket.model, ticket.id, ticket)

    async def _enter_redis(self, ticket: Ticket) -> None:
        limit = self._settings.queue_limit
        place = [ticket.id, ticket.tenant, ticket.lane, ticket.work, ticket.waited_s, limit]
        state, granted, before, advice, displaced = await self._call(ticket.model, "enter", *place)
        self._take_grants(ticket.model, granted)
        for id in displaced:
            self._displace(id, float(advice))
        ticket.before = before
        if state == "granted":
            self._grant(ticket, "redis")
        elif state == "full":
            raise self._full(float(advice))
        else:
            ticket.queued = True

    def _enter_local(self, ticket: Ticket) -> None:
        if ticket.granted.done() or ticket.left or ticket.id in self._order(ticket.model):
            return
        if self._settings.admission_without_redis == "closed":
            raise unavailable(
                "admission is closed while Redis is away", stage="router", reason="admission_away"
            )
        order = self._order(ticket.model)
        ticket.before = len(order)
        self._pump(ticket.model)
        if self._free(ticket.model) > 0:
            order.charge(ticket.tenant, ticket.work)
            self._grant(ticket, "local")
            return
        limit = self._settings.queue_limit
        if len(order) >= limit:
            displaced = order.displace(ticket.tenant, limit)
            if displaced is None:
                raise self._full(_LEAST_ADVICE_S)
            self._displace(displaced, _LEAST_ADVICE_S)
        ticket.queued = True
        order.add(Waiting(ticket.id, ticket.tenant, ticket.lane, ticket.work, ticket.entered_s))

    def _displace(self, id: str, advice_s: float) -> None:
        """The request lost its place to a tenant that had fewer."""
        if ticket := self._tickets.get(id):
            self._refuse(ticket, self._full(advice_s))

    def _refuse(self, ticket: Ticket, refusal: PenstockError) -> None:
        if not ticket.granted.done():
            metrics.refusals.labels(refusal.reason).inc()
            ticket.granted.set_exception(refusal)
            ticket.granted.exception()  # read even if nobody waits any more

    def _full(self, advice_s: float) -> PenstockError:
        """`advice_s`: when a request that came now would have its turn."""
        return PenstockError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too many requests are waiting",
            stage="router",
            reason="queue_full",
            retry_after_s=min(max(advice_s, _LEAST_ADVICE_S), self._settings.queue_timeout_s),
        )

    def _grant(self, ticket: Ticket, order: str) -> None:
        if not ticket.granted.done():
            ticket.order = order
            ticket.granted.set_result(None)
            self._order(ticket.model).remove(ticket.id)

    # ---- Redis ------------------------------------------------------------------------------

    async def _call(self, model: str, op: str, *args: object) -> list[Any]:
        keys = [self._root + model + "}", self._channel("")]
        settings = self._settings
        common = [self._capacity(model), settings.slot_lease_s, settings.ageing_s]
        reply: list[Any] = await self._script(keys, [op, self._router_id, *common, *args])
        return reply

    def _channel(self, router_id: str) -> str:
        return f"{self._namespace}:admission-grants:{router_id}"

    @contextlib.contextmanager
    def _watching_redis(self) -> Iterator[None]:
        """Around a call: when Redis turns out to be away, admission goes on without it."""
        try:
            yield
        except (*RedisAway, RedisError) as error:
            self._lose_redis(error)

    def _take_grants(self, model: str, ids: Iterable[str]) -> None:
        for id in ids:
            ticket = self._tickets.get(id)
            if ticket is None:  # it left while the grant was under way
                self._leave_later(model, id)
            else:
                self._grant(ticket, "redis")

    def _leave_later(self, model: str, id: str, ticket: Ticket | None = None) -> None:
        """Tells Redis in the background; all that leave in one turn of the loop go together."""
        if not self._leaving:
            self._spawn(self._tell_leaving(), "admission leave")
        # Redis settles what it charged, and what nobody has charged yet.
        if ticket and ticket.order != "local":
            self._leaving[model].append((id, ticket.tenant, ticket.missed))
        else:
            self._leaving[model].append((id, "", 0.0))

    async def _tell_leaving(self) -> None:
        """What cannot be told now is told when Redis is back; should it be too much, leases end."""
        leaving, self._leaving = self._leaving, defaultdict(list)
        if not self.away:
            with self._watching_redis():
                for model in list(leaving):
                    granted = await self._call(model, "leave", *chain(*leaving[model]))
                    del leaving[model]
                    self._take_grants(model, granted)
        for model, ids in leaving.items():
            self._leaving[model] = (ids + self._leaving[model])[-_LEAVING_KEPT:]

    async def _listen(self) -> None:
        """Takes what other routers' calls decided about requests of this one."""
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self._channel(self._router_id))
                    while True:
                        message = await channel.get_message(timeout=_RENEW_S)
                        if message:
                            what, root, id, *advice = json.loads(message["data"])
                            if what == "granted":
                                self._take_grants(root[len(self._root) : -1], [id])
                            else:
                                self._displace(id, float(*advice))
            except (*RedisAway, RedisError):
                await asyncio.sleep(_RENEW_S)

    async def _renew_forever(self) -> None:
        """Keeps leases, finds grants whose message was lost, and looks whether Redis is back."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_RENEW_S, self._settings.slot_lease_s / 3)):
                    await self._poked.wait()
            self._poked.clear()
            with self._watching_redis():
                await self._renew()
            if self.away:
                for model in self._orders:
                    self._pump(model)

    async def _renew(self) -> None:
        by_model: dict[str, list[Ticket]] = defaultdict(list)
        for ticket in self._tickets.values():
            by_model[ticket.model].append(ticket)
        if self.away and not by_model:
            await self._redis.ping()
        for model, tickets in by_model.items():
            held = [t.id for t in tickets if t.holds]
            waiting = [t.id for t in tickets if not t.granted.done()]
            granted, unknown = await self._call(model, "renew", len(held), *held, *waiting)
            self._take_grants(model, granted)
            for id in held:
                if id not in self._tickets:  # it ended meanwhile, and the call entered it again
                    self._leave_later(model, id)
            lost = [self._tickets[id] for id in unknown if id in self._tickets]
            self._enter_again(t for t in lost if t.id not in self._order(model))
        self._regain_redis()

    def _enter_again(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._spawn(self._enter(ticket), f"enter {ticket.id}")

    def _lose_redis(self, error: Exception) -> None:
        if not self.away:
            log.warning("admission goes on without Redis: %s", error)
        self.away = True
        metrics.redis_away.set(1)
        self._enter_again(t for t in self._tickets.values() if not t.granted.done())

    def _regain_redis(self) -> None:
        if not self.away:
            return
        log.info("admission is back in Redis")
        self.away = False
        metrics.redis_away.set(0)
        self._orders.clear()
        self._spawn(self._tell_leaving(), "admission leave")
        self._enter_again(t for t in self._tickets.values() if not t.granted.done())

    # ---- without Redis ----------------------------------------------------------------------

    def _order(self, model: str) -> FairOrder:
        if model not in self._orders:
            self._orders[model] = FairOrder(self._settings.ageing_s)
        return self._orders[model]

    def _free(self, model: str) -> int:
        """Slots of this router's share that nobody holds."""
        capacity = self._capacity(model)
        share = max(1, capacity // max(1, self._routers())) if capacity else 0
        return share - sum(t.holds for t in self._tickets.values() if t.model == model)

    def _pump(self, model: str) -> None:
        order = self._order(model)
        for _ in range(self._free(model)):
            id = order.pop(time.monotonic())
            if id is None:
                return
            self._grant(self._tickets[id], "local")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
