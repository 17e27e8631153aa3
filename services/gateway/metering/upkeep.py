"""What metering does off the requests' path: leases, settlements, and the ledger's length."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from services.common.config import MeteringSettings
from services.common.redis import RedisAway, RedisError
from services.gateway import metrics
from services.gateway.metering.ledger import Ledger
from services.gateway.metering.run import HANDED_OVER, RELEASED, UNCHARGED, Run, Used
from services.gateway.metering.shared_meter import SharedMeter
from services.gateway.metering.spool import Spool

log = logging.getLogger(__name__)

_RENEWALS = 5  # in the time of a lease
_RETRY_S = 1.0  # while Redis is away
_SWEPT = 100
_TRIM_EVERY_S = 60.0
_AT_ONCE = 256
_TOLD = 64  # leases renewed in one go: a request at the door waits behind no more
_GATHER_S = 0.02  # for others that are let in: nobody waits for it, first tokens stand behind it
_LAST_S = 2.0  # for what waits when the gateway ends


class Running(Protocol):
    """A request that is under way (meter.Metered)."""

    run: Run

    @property
    def used(self) -> Used: ...


class Upkeep:
    """Requests that run are told of to Redis, with what they used so far; those that have ended are
    settled, as often as it takes: what Redis does not take now waits here, so many of them."""

    def __init__(self, shared: SharedMeter, ledger: Ledger, settings: MeteringSettings) -> None:
        self._shared = shared
        self._ledger = ledger
        self._settings = settings
        self._running: dict[str, Running] = {}
        self._unsettled = Spool(settings.unsettled)  # Redis was away
        self._settling: dict[asyncio.Task[None], Run] = {}
        self._untold: list[Running] = []  # that were let in without a reservation
        self._telling: asyncio.Task[None] | None = None
        self._lost: list[Run] = []  # since the last line in the log
        self._trimmed_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_after(), name="metering")

    async def stop(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._settling:
            await asyncio.wait(self._settling, timeout=_LAST_S)
        if self._telling is not None:
            self._telling.cancel()
        for task, run in list(self._settling.items()):
            task.cancel()
            self._wait(run)
        await asyncio.gather(*self._settling, return_exceptions=True)
        with suppress(TimeoutError, *RedisAway):
            async with asyncio.timeout(_LAST_S):
                await self._settle_late()
        for run in self._unsettled:
            self._lose(run)
        self._say_lost()

    def begin(self, running: Running, *, reserved: bool) -> None:
        """`reserved`: Redis knows of it already."""
        self._running[running.run.id] = running
        if not reserved and not self._shared.away:  # else it is told with all that runs
            self._untold.append(running)
            if self._telling is None or self._telling.done():
                self._telling = asyncio.create_task(self._tell_new(), name="metering's news")

    def end(self, running: Running) -> asyncio.Future[None]:
        self._running.pop(running.run.id, None)
        return self.settle(running.run)

    def forget(self, running: Running) -> None:
        """It was refused, and holds nothing."""
        self._running.pop(running.run.id, None)
        self.release(running.run)

    def hand_over(self, running: Running) -> None:
        """What is held for it stays, for a lease from now."""
        running.run.status = HANDED_OVER
        self.end(running)

    def release(self, run: Run) -> None:
        """Whatever may be reserved for it is free soon, and nothing charged."""
        run.status, run.used = RELEASED, Used()
        self.settle(run)

    def settle(self, run: Run) -> asyncio.Future[None]:
        """Soon; it is done once the ledger has it, or it is known that it must wait."""
        if self._shared.away:
            self._wait(run)
            waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waits.set_result(None)
            return waits
        task = asyncio.create_task(self._settle(run))
        self._settling[task] = run
        task.add_done_callback(self._settling.pop)
        return task

    async def _settle(self, run: Run) -> None:
        try:
            await self._end(run)
        except RedisAway:
            self._wait(run)
        except RedisError:
            log.exception("request %s could not be settled", run.id)
            self._lose(run)

    async def _end(self, run: Run) -> None:
        if run.status == RELEASED:
            await self._shared.release(run)
        elif run.status == HANDED_OVER:
            await self._shared.hold(run)
        else:
            await self._shared.settle(run)

    def _wait(self, run: Run) -> None:
        if (lost := self._unsettled.put(run)) is not None:
            self._lose(lost)
        metrics.unsettled.set(len(self._unsettled))

    def _lose(self, run: Run) -> None:
        if run.status in UNCHARGED:
            return
        metrics.unledgered.inc()
        metrics.unledgered_cost.inc(run.used.cost / 1e9)
        self._lost.append(run)
        if len(self._lost) >= _AT_ONCE:
            self._say_lost()

    def _say_lost(self) -> None:
        """One line for many: a flood of them would fill the log as well."""
        if self._lost:
            cost = sum(run.used.cost for run in self._lost) / 1e9
            some = ", ".join(run.id for run in self._lost[:5])
            log.error(
                "%d requests are missing in the ledger, of cost %.9f: %s%s",
                len(self._lost), cost, some, " …" if len(self._lost) > 5 else "",
            )  # fmt: skip
            self._lost.clear()

    async def _look_after(self) -> None:
        """The first turn is at once: whether Redis is there is known before the first request."""
        every_s, turned_at = self._settings.lease_s / _RENEWALS, -math.inf
        while True:
            if self._shared.away or time.monotonic() - turned_at >= every_s:
                turned_at = time.monotonic()
                try:
                    await self._turn()
                except RedisAway as error:
                    log.warning("leases are not renewed: %s", type(error).__name__)
                except Exception:  # the next turn may fare better, and nobody else takes it
                    log.exception("metering's upkeep failed")
                self._say_lost()
            await asyncio.sleep(min(every_s, _RETRY_S))

    async def _turn(self) -> None:
        """Whoever was away has heard of everything before anybody asks it again."""
        await self._settle_late()
        await self._tell(list(self._running.values()))
        _, aside = await self._shared.sweep(_SWEPT)
        metrics.unledgered.inc(len(aside))
        if aside:
            ids = ", ".join(aside)
            log.error("reservations that cannot be read are set aside, uncharged: %s", ids)
        if self._shared.away:
            log.info("Redis is back")
            self._shared.away = False
        await self._settle_late()  # what ended meanwhile
        await self._trim()

    async def _settle_late(self) -> None:
        """Those that wait, while Redis takes them. Raises one of `RedisAway`."""
        while some := self._unsettled.some(_AT_ONCE):
            for run, error in zip(some, await _each(map(self._end, some)), strict=True):
                if isinstance(error, RedisAway):
                    raise error
                self._unsettled.take_out(run)
                if error is not None:
                    self._lose(run)
            metrics.unsettled.set(len(self._unsettled))

    async def _tell(self, running: Sequence[Running]) -> None:
        """Renews leases of those that have not ended meanwhile, or been handed over. Raises one of
        `RedisAway`."""
        for first in range(0, len(running), _TOLD):
            runs = []
            for one in running[first : first + _TOLD]:  # as it is now: its model may have changed
                if self._running.get(one.run.id) is one:
                    one.run.used = one.used
                    runs.append(one.run)
            await self._shared.hold_all(runs)

    async def _tell_new(self) -> None:
        while self._untold:
            await asyncio.sleep(_GATHER_S)
            some, self._untold = self._untold, []
            with suppress(*RedisAway):  # they are told with all that runs
                await self._tell(some)

    async def _trim(self) -> None:
        if time.monotonic() - self._trimmed_at < _TRIM_EVERY_S:
            return
        self._trimmed_at = time.monotonic()
        cut = await self._ledger.trim(
            self._settings.ledger_days * 86_400, self._settings.ledger_entries
        )
        if cut:
            metrics.ledger_cut.inc(cut)
            log.warning("the ledger was full: its %d oldest entries are gone", cut)


async def _each(calls: Iterable[Awaitable[None]]) -> list[BaseException | None]:
    """Makes all calls; what each raised."""
    return list(await asyncio.gather(*calls, return_exceptions=True))
