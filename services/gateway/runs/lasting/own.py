"""A gateway's own runs: carried to their ends, kept by leases; and those that others have left."""

import asyncio
import logging
from contextlib import suppress
from typing import Any

from protos.runs_pb2 import RunEvents
from services.common.errors import PenstockError
from services.common.redis import RedisAway
from services.gateway import metrics
from services.gateway.api.rest.http import internal
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.metering.meter import Metered
from services.gateway.parts import Gateway
from services.gateway.runs.lasting.failures import (
    MAX_KILLED,
    MOVED,
    away,
    cancelled,
    gave_up,
    lost,
    too_large,
)
from services.gateway.runs.lasting.run import EndingOf, Run
from services.gateway.runs.lasting.store import Hold, RunStore
from services.gateway.runs.lasting.stored import caller_of, failed, text_of
from services.gateway.runs.lasting.takeover import taken_over
from services.gateway.runs.pipeline import generate
from services.gateway.runs.recorded import recorded
from services.gateway.runs.records import Journal

log = logging.getLogger(__name__)

_LOOKS = 5  # at its leases, in the time of one
_AGAIN_S = 1.0  # before a run that nobody had a place for is offered again
_LAST_S = 2.0  # for runs that are given away when the gateway ends
_NO_ROOM = frozenset({"too_many_requests", "too_many_bytes"})
_ELSEWHERE = frozenset({"draining", *_NO_ROOM})  # why another gateway is to have it
_CLAIMED = 8  # at one look
_WHY = {"cancelled": cancelled, "full": too_large, "away": away}  # an end that is not `lost`


class OwnRuns:
    def __init__(self, store: RunStore, lease_s: float, ending_of: EndingOf) -> None:
        self.store = store
        self._ending_of = ending_of
        self._lease_s = lease_s
        self._runs: dict[str, Run] = {}
        self._gateway: Gateway | None = None
        self._upkeep: asyncio.Task[None] | None = None

    def start(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._upkeep = asyncio.create_task(self._look_after(), name="runs")

    async def stop(self) -> None:
        """What still runs is another gateway's at once."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for run in list(self._runs.values()):
            run.stop("leaving")
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_S)
        for task in tasks:  # Redis is away: they are found by their leases
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._runs)

    def run(self, run: Run, principal: Principal) -> None:
        assert self._gateway is not None
        self._runs[run.request_id] = run
        run.task = asyncio.create_task(self._carry(run, principal), name=f"run {run.request_id}")
        run.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def cancel(self, id: str) -> None:
        """One that was cancelled, if it is this gateway's."""
        if (run := self._runs.get(id)) is not None:
            run.stop("cancelled")

    @property
    def keeps_ids(self) -> bool:
        """Tokens say what the policy redacts or holds back: they are stored only where it looks at
        no answer."""
        assert self._gateway is not None
        policy = self._gateway.policy.current
        return policy.output is None and policy.tool_arguments is None

    async def _carry(self, run: Run, principal: Principal) -> None:
        """What it ends with is told in its events, or to who waits for it to be let in."""
        assert self._gateway is not None
        gateway = self._gateway

        async def work(principal: Principal, place: Place, journal: Journal) -> None:
            await generate(gateway, run, principal, place, journal)

        def settle(metered: Metered, error: PenstockError | None) -> None:
            if error is not None and (_is_anothers(run, error) or _leaves(run, error)):
                gateway.meter.hand_over(metered)
            else:
                gateway.meter.end(metered, error)

        try:
            await recorded(gateway, run, work, principal, settle)
        except PenstockError as error:
            await self._ended(run, error)
        except asyncio.CancelledError:
            if run.over is None:
                raise
            await self._ended(run, _WHY.get(run.over, lost)())
        except Exception:
            log.exception("run %s failed", run.request_id)
            await self._ended(run, internal())
        finally:
            run.not_let_in(lost())
            run.close()
            del self._runs[run.request_id]

    async def _ended(self, run: Run, error: PenstockError) -> None:
        if _is_anothers(run, error):
            return
        early = run.over is not None or error.reason in _ELSEWHERE
        if _leaves(run, error):
            with suppress(*RedisAway):
                await self.store.release(run.hold, _AGAIN_S if error.reason in _NO_ROOM else 0.0)
        elif not run.is_let_in and (early or not run.was_admitted):
            run.not_let_in(error)
            await run.refuse(None if early else error)
        else:
            await run.fail(error)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _LOOKS)
            try:
                await self._renew()
                await self._claim()
            except RedisAway as error:
                log.debug("runs are not looked after: %s", type(error).__name__)
            except Exception:  # the next turn may fare better, and nobody else takes it
                log.exception("looking after runs failed")

    async def _renew(self) -> None:
        runs = list(self._runs.values())
        verdicts: list[Any] = await asyncio.gather(
            *(self.store.renew(run.hold) for run in runs), return_exceptions=True
        )
        for run, verdict in zip(runs, verdicts, strict=True):
            if verdict in ("lost", "cancelled") and not run.finishing:
                run.stop(verdict)

    async def _claim(self) -> None:
        assert self._gateway is not None
        for _ in range(_CLAIMED):
            if self._gateway.intake.draining or (due := await self.store.claim()) is None:
                return
            hold, killed = due
            if (own := self._runs.get(hold.id)) is None:
                await self._take_over(hold, killed)
            elif own.hold != hold:  # another had it while this gateway slept
                own.stop("lost")
                await self.store.release(hold, _AGAIN_S)

    async def _take_over(self, hold: Hold, killed: int) -> None:
        """Raises one of `RedisAway`."""
        assert self._gateway is not None
        if killed > MAX_KILLED:  # before anything of it is looked at
            return await self._end(hold, gave_up())
        metrics.runs.labels("taken_over").inc()
        log.warning("run %s is taken over", hold.id)
        try:
            stored = await self.store.find(hold.place)
            if stored is None:
                return
            ending = await self._ending_of(self._gateway, stored)
            run = await taken_over(
                self.store, hold, stored, ending=ending, keeps_ids=self.keeps_ids
            )
            principal = caller_of(stored.caller)
        except RedisAway:
            raise
        except Exception:  # nobody else would fare better
            log.exception("run %s cannot be gone on with", hold.id)
            return await self._end(hold, internal())
        self.run(run, principal)

    async def _end(self, hold: Hold, error: PenstockError) -> None:
        await self.store.fail(hold, text_of(RunEvents(events=[failed(error)])))


def _is_anothers(run: Run, error: PenstockError) -> bool:
    """Another gateway has it already."""
    return run.over == "lost" or error.reason == MOVED


def _leaves(run: Run, error: PenstockError) -> bool:
    """It ends here so that another gateway goes on with it."""
    return run.is_let_in and (run.over == "leaving" or error.reason in _ELSEWHERE)
