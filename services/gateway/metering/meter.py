"""A request's way past its limits: reserved for at the door, settled however it ends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from protos.common_pb2 import Usage
from services.common.config import MeteringSettings, Settings
from services.common.errors import PenstockError
from services.common.redis import Redis, RedisAway
from services.common.telemetry.metrics import BoundedNames
from services.gateway import metrics
from services.gateway.api.rest.http import CLIENT_GONE, http_status
from services.gateway.identity.principal import Principal
from services.gateway.metering.ledger import Ledger
from services.gateway.metering.prices import NANO, Cost, Prices
from services.gateway.metering.refusals import away, headers, refused
from services.gateway.metering.run import Held, Room, Run, Used
from services.gateway.metering.shared_meter import SharedMeter
from services.gateway.metering.upkeep import Upkeep

_LEDGER_S = 0.05  # that an answer's end waits for its entry in the ledger


class Metered:
    """One request between the door and its entry in the ledger."""

    def __init__(self, run: Run, prices: Prices) -> None:
        self.run = run
        self.rooms: Sequence[Room] = ()
        self.usage: Callable[[], Usage] = Usage
        """What it has used so far."""
        self.shown: Callable[[], bool] = lambda: False
        """Whether any of the answer has left: one that fails before is not charged for."""
        self.ended = False
        self.beside: list[Metered] = []
        """What was done for it under lines of their own in the ledger."""
        self._prices = prices

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's, of what its limits leave."""
        return headers(self.rooms)

    @property
    def used(self) -> Used:
        if self.ended:
            return self.run.used
        who = self.run.who
        return self._prices.used(who["model"], who["tier"], self.usage())

    def close(self) -> None:
        """From here on it has used what it used, and it holds no answer any more."""
        self.run.used = self.used
        self.ended = True
        self.usage, self.shown = Usage, lambda: False

    @property
    def cost(self) -> Cost | None:
        """With what was done beside it. None: nothing of it has a price."""
        costs = [
            cost
            for one in (self, *self.beside)
            if (cost := self._prices.cost(one.run.who["model"], one.run.used)) is not None
        ]
        return Cost(sum(cost.nanos for cost in costs), costs[0].currency) if costs else None


class Meter:
    """One for a gateway. Generations, embeddings and searches go through `run` alike."""

    def __init__(
        self,
        shared: SharedMeter,
        upkeep: Upkeep,
        settings: MeteringSettings,
        tenants_told: BoundedNames,
    ) -> None:
        self._shared = shared
        self._upkeep = upkeep
        self._prices = Prices(settings)
        self._tenants_told = tenants_told
        self.open_output_tokens = settings.open_output_tokens

    @classmethod
    def of(cls, redis: Redis, settings: Settings, tenants_told: BoundedNames) -> "Meter":
        """With the meter and the ledger in this Redis."""
        own, namespace = settings.metering, settings.namespace
        shared = SharedMeter(redis, namespace, own.lease_s, own.redis_patience_s)
        upkeep = Upkeep(shared, Ledger(redis, namespace), own)
        return cls(shared, upkeep, own, tenants_told)

    def start(self) -> None:
        self._upkeep.start()

    async def stop(self) -> None:
        """Writes what is not in the ledger yet, if Redis takes it soon."""
        await self._upkeep.stop()

    async def admit(
        self, who: Principal, request_id: str, route: str, model: str, expected: tuple[int, int]
    ) -> Metered:
        """Lets in a request of so many prompt and output tokens at most, which `end` must follow.

        Raises RESOURCE_EXHAUSTED ("rate_limit_exceeded", "insufficient_quota"), INVALID_ARGUMENT
        ("request_too_large"), PERMISSION_DENIED ("limit_is_zero") or UNAVAILABLE
        ("limits_unavailable").
        """
        run = self._run_of(who, request_id, route, model, expected)
        metered = Metered(run, self._prices)
        reserved = await self._reserve(metered)
        self._upkeep.begin(metered, reserved=reserved)
        return metered

    async def change_model(
        self, metered: Metered, who: Principal, model: str, expected: tuple[int, int]
    ) -> None:
        """Another model answers than was let in: from here on its limits hold, and its price.
        Raises as `admit`; then the request has ended, and nothing of it counts."""
        before = metered.run.who
        attempt = metered.run.attempt
        metered.run = self._run_of(who, metered.run.id, before["route"], model, expected)
        metered.run.attempt = attempt
        try:
            reserved = await self._reserve(metered)
        except BaseException:
            metered.ended = True
            self._upkeep.forget(metered)
            raise
        self._upkeep.begin(metered, reserved=reserved)

    @asynccontextmanager
    async def run(
        self, who: Principal, request_id: str, route: str, model: str, expected: tuple[int, int]
    ) -> AsyncIterator[Metered]:
        """`admit`, and `end` however the block ends."""
        metered = await self.admit(who, request_id, route, model, expected)
        try:
            yield metered
        except BaseException as error:
            self.end(metered, error)
            raise
        self.end(metered)

    @asynccontextmanager
    async def beside(
        self,
        metered: Metered,
        who: Principal,
        route: str,
        model: str,
        expected: tuple[int, int],
        part: str = "",
    ) -> AsyncIterator[Metered]:
        """Another model's work for a request that is let in: its tokens and cost count, it is no
        further request but to limits of that model, and it has a line of its own in the ledger;
        `part`: of several of a route. Raises as `admit`."""
        run = self._run_of(who, f"{metered.run.id}:{route}{part}", route, model, expected)
        run.bounds = [b for b in run.bounds if b.limit.of in ("tokens", "cost") or b.limit.model]
        beside = Metered(run, self._prices)
        reserved = await self._reserve(beside)
        self._upkeep.begin(beside, reserved=reserved)
        metered.beside.append(beside)
        try:
            yield beside
        except BaseException as error:
            self.end(beside, error)
            raise
        await self.settle(beside)

    async def settle(self, metered: Metered) -> None:
        """Ends a request that has all of its answer, of which the end has not left yet.

        Waits a moment for the ledger: what a client is told as the cost is in there, whatever
        becomes of this gateway.
        """
        written = self.end(metered)
        if written is not None:
            await asyncio.wait([written], timeout=_LEDGER_S)

    def charge(self, who: Principal, request_id: str, route: str, model: str, usage: Usage) -> None:
        """For a request that was let in, failed, and is given up now: what it has used counts, but
        for what it was charged before."""
        metered = Metered(self._run_of(who, request_id, route, model, (0, 0)), self._prices)
        metered.usage = lambda: usage
        self.end(metered, asyncio.CancelledError())

    def end(
        self, metered: Metered, error: BaseException | None = None
    ) -> "asyncio.Future[None] | None":
        """Charges for what was used, unless it has ended before."""
        if metered.ended:
            return None
        run = metered.run
        run.status = status_of(error)
        shown = metered.shown()
        metered.close()
        if run.status == "failed" and not shown:
            run.used = Used()
        amount = run.used.cost / NANO
        metrics.cost.labels(run.who["model"]).inc(amount)
        metrics.tenant_cost.labels(self._tenants_told.of(run.who["tenant"])).inc(amount)
        return self._upkeep.end(metered)

    def hand_over(self, metered: Metered) -> None:
        """Another gateway goes on with it, admits it under the same id, and ends it: until then its
        place and its reservation stay as they are."""
        if not metered.ended:
            metered.close()
            self._upkeep.hand_over(metered)

    def _run_of(
        self, who: Principal, id: str, route: str, model: str, expected: tuple[int, int]
    ) -> Run:
        told = {"tenant": who.tenant, "user": who.user, "model": model, "route": route}
        cost = self._prices.most(model, who.priority, *expected)
        bounds = [bound for bound in who.limits if bound.limit.model in (None, model)]
        return Run(id, {**told, "tier": who.priority}, bounds, Held(sum(expected), cost))

    async def _reserve(self, metered: Metered) -> bool:
        """Whether something was reserved; without any limit there is nothing to ask."""
        run = metered.run
        if not run.bounds:
            return False
        asked = not self._shared.away
        try:
            if not asked:
                raise ConnectionError("Redis did not answer a moment ago")
            verdict = await self._shared.reserve(run)
        except RedisAway:
            closed = any(bound.limit.without_redis == "closed" for bound in run.bounds)
            metrics.unchecked.labels("refused" if closed else "let_through").inc()
            if closed:
                if asked:  # it may be reserved for, or be so when Redis has read it
                    self._upkeep.release(run)
                raise away() from None
            return False
        except asyncio.CancelledError:
            self._upkeep.release(run)
            raise
        metered.rooms = verdict.rooms
        if verdict.blocked_by is not None:
            raise refused(verdict, run.held, self._prices.currency)
        return True


def status_of(error: BaseException | None) -> str:
    """How a request ended: ok; refused, for what was asked; limited, for how much; failed, the
    platform's fault; cancelled by the client."""
    if error is None:
        return "ok"
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    if not isinstance(error, PenstockError):
        return "failed"
    status = http_status(error)
    told = {429: "limited", CLIENT_GONE: "cancelled"}
    return told.get(status, "failed" if status >= 500 else "refused")
