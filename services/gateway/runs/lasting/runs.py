"""The runs that outlive their connections: this gateway's own, and everybody's to follow."""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

from protos.runs_pb2 import RunEvent, RunEvents, StoredRun
from services.common.config import RunsSettings
from services.common.errors import PenstockError
from services.common.redis import Redis, RedisAway, RedisError
from services.gateway import metrics
from services.gateway.api.rest.http import internal
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST
from services.gateway.intake import Place
from services.gateway.metering.meter import Metered
from services.gateway.parts import Gateway
from services.gateway.runs.front import LastingFront
from services.gateway.runs.lasting.failures import (
    MAX_KILLED,
    MOVED,
    away,
    cancelled,
    gave_up,
    key_reused,
    lost,
    too_large,
)
from services.gateway.runs.lasting.run import Run
from services.gateway.runs.lasting.store import RunStore
from services.gateway.runs.lasting.stored import (
    caller_of,
    stored_caller,
    stored_prompt,
    text_of,
)
from services.gateway.runs.lasting.takeover import taken_over
from services.gateway.runs.pipeline import generate
from services.gateway.runs.prompt import Prompt
from services.gateway.runs.recorded import recorded
from services.gateway.runs.records import Journal

log = logging.getLogger(__name__)

_LOOKS = 5  # at its leases, in the time of one
_FAR_S = 0.1  # between two looks at a run of another gateway
_PATIENCE_S = 30.0  # with Redis, while somebody follows a run
_AGAIN_S = 1.0  # before a run that nobody had a place for is offered again
_NO_ROOM = frozenset({"too_many_requests", "too_many_bytes"})
_ELSEWHERE = frozenset({"draining", *_NO_ROOM})  # why another gateway is to have it
_CLAIMED = 8  # at one look


class Runs:
    """Of one gateway."""

    def __init__(self, redis: Redis, namespace: str, owner: str, settings: RunsSettings) -> None:
        self.store = RunStore(redis, namespace, owner, settings)
        self._lease_s = settings.lease_s
        self._own: dict[str, Run] = {}
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
        tasks = [run.task for run in self._own.values() if run.task is not None]
        for run in list(self._own.values()):
            run.stop("leaving")
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- what can be asked --------------------------------------------------------------------

    async def begin(
        self, front: LastingFront, principal: Principal, prompts: Sequence[Prompt]
    ) -> str:
        """The run's id: a new one's once it is past its limits, or of the one that was begun under
        the same idempotency key. Raises what refuses it."""
        assert self._gateway is not None
        self._gateway.files.room.check()
        stored = StoredRun(
            request_id=front.request_id,
            route=front.route,
            endpoint=front.endpoint,
            created=time.time(),
            caller=stored_caller(principal),
            prompts=[stored_prompt(prompt) for prompt in prompts],
            told=front.told,
            digest=front.digest,
        )
        place = (principal.tenant, front.request_id)
        name = hashlib.sha256(front.key.encode()).hexdigest() if front.key else ""
        try:
            what, *id = await self.store.begin(place, text_of(stored), name, front.digest)
        except RedisAway:
            raise away() from None
        if what == "other":
            raise key_reused()
        if what == "full":
            raise too_large()
        if what == "same":
            metrics.runs.labels("retried").inc()
            return id[0]
        metrics.runs.labels("begun").inc()
        run = Run(self.store, stored, list(prompts), keeps_ids=self._keeps_ids)
        self._run(run, principal)
        await run.admitted_or_over.wait()
        if not run.was_admitted and run.task is not None:
            await asyncio.shield(run.task)  # which raises why
        return front.request_id

    async def find(self, tenant: str, id: str) -> StoredRun | None:
        """Raises UNAVAILABLE while Redis is away."""
        if not REQUEST.fits(id):
            return None
        try:
            return await self.store.find((tenant, id))
        except RedisAway:
            raise away() from None

    async def events(
        self, tenant: str, id: str, *, wait: bool = True
    ) -> AsyncGenerator[RunEvent, None]:
        """All from the first, up to its end; without `wait` to what there is now. Ends early when
        the run is deleted. Raises UNAVAILABLE while Redis is away for long."""
        after, since = "-", time.monotonic()
        while True:
            own = self._own.get(id)
            news = own.news if own is not None else None
            try:
                page = await self.store.read((tenant, id), after)
            except RedisAway:
                if not wait or time.monotonic() - since > _PATIENCE_S:
                    raise away() from None
                await asyncio.sleep(_FAR_S)
                continue
            after, since = page.after, time.monotonic()
            for event in page.events:
                yield event
                if event.HasField("finished") or event.HasField("failed"):
                    return
            if page.events:
                continue
            if not page.exists or not wait:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAR_S if news is None else self._lease_s):
                    await (news.wait() if news is not None else asyncio.sleep(_PATIENCE_S))

    async def keep(self, stored: StoredRun, events: RunEvents) -> bool:
        """An answer that is whole; whether it was taken."""
        assert self._gateway is not None
        place = (stored.caller.tenant, stored.request_id)
        if self._gateway.files.room.full:
            return False
        try:
            return await self.store.keep(place, text_of(stored), text_of(events)) == "ok"
        except (*RedisAway, RedisError) as error:
            log.warning("an answer is not stored: %s", type(error).__name__)
            return False

    async def cancel(self, tenant: str, id: str) -> str:
        """none, ended, or cancelled. Its owner hears of it within a look."""
        try:
            what = await self.store.cancel((tenant, id))
        except RedisAway:
            raise away() from None
        own = self._own.get(id)
        if what == "cancelled" and own is not None:
            own.stop("cancelled")
        return what

    async def drop(self, tenant: str, id: str) -> bool:
        try:
            await self.cancel(tenant, id)
            return await self.store.drop((tenant, id))
        except RedisAway:
            raise away() from None

    # ---- running ------------------------------------------------------------------------------

    @property
    def _keeps_ids(self) -> bool:
        """Tokens say what the policy redacts or holds back: they are stored only where it looks at
        no answer."""
        assert self._gateway is not None
        policy = self._gateway.policy.current
        return policy.output is None and policy.tool_arguments is None

    def _run(self, run: Run, principal: Principal, *, elsewhere: bool = False) -> None:
        """`elsewhere`: without a place here it is for another gateway."""
        self._own[run.request_id] = run
        run.task = asyncio.create_task(
            self._carry(run, principal, elsewhere), name=f"run {run.request_id}"
        )
        run.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _carry(self, run: Run, principal: Principal, elsewhere: bool) -> None:
        """Raises for a run that was not let in; of others it is told in their events."""
        assert self._gateway is not None
        gateway = self._gateway

        async def work(principal: Principal, place: Place, journal: Journal) -> None:
            await generate(gateway, run, principal, place, journal)

        def settle(metered: Metered, error: PenstockError | None) -> None:
            if error is not None and (_is_anothers(run, error) or _leaves(run, error, elsewhere)):
                gateway.meter.hand_over(metered)
            else:
                gateway.meter.end(metered, error)

        error: PenstockError | None = None
        try:
            await recorded(gateway, run, work, principal, settle)
        except PenstockError as failed:
            error = failed
        except asyncio.CancelledError:
            if run.over is None:
                raise
            error = {"cancelled": cancelled, "full": too_large}.get(run.over, lost)()
        except Exception:
            log.exception("run %s failed", run.request_id)
            error = internal()
        finally:
            self._own.pop(run.request_id, None)
            if error is None:
                run.close()
        if error is not None:
            try:
                await self._ended(run, error, elsewhere)
            finally:
                run.close()

    async def _ended(self, run: Run, error: PenstockError, elsewhere: bool) -> None:
        with suppress(*RedisAway):
            if _is_anothers(run, error):
                return
            if _leaves(run, error, elsewhere):
                await self.store.release(run.place, _AGAIN_S if error.reason in _NO_ROOM else 0.0)
                return
            if not run.was_admitted:
                await self.store.drop(run.place)
            else:
                await run.fail(error)
                return
        raise error

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
        runs = list(self._own.values())
        verdicts: list[Any] = await asyncio.gather(
            *(self.store.renew(run.place) for run in runs), return_exceptions=True
        )
        for run, verdict in zip(runs, verdicts, strict=True):
            if verdict in ("lost", "cancelled") and not run.finishing:
                run.stop(verdict)

    async def _claim(self) -> None:
        assert self._gateway is not None
        for _ in range(_CLAIMED):
            if self._gateway.intake.draining or (due := await self.store.claim()) is None:
                return
            (tenant, id), killed = due
            if id in self._own:
                continue  # it was ours, and is again
            stored = await self.store.find((tenant, id))
            if stored is None:
                continue
            metrics.runs.labels("taken_over").inc()
            log.warning("run %s is taken over", id)
            run = await taken_over(self.store, stored, keeps_ids=self._keeps_ids)
            if killed > MAX_KILLED:
                await run.fail(gave_up())
                continue
            self._run(run, caller_of(stored.caller), elsewhere=True)


def _is_anothers(run: Run, error: PenstockError) -> bool:
    """Another gateway has it already."""
    return run.over == "lost" or error.reason == MOVED


def _leaves(run: Run, error: PenstockError, elsewhere: bool) -> bool:
    """It ends here so that another gateway goes on with it."""
    taken_in = run.was_admitted or elsewhere
    return run.over == "leaving" or (error.reason in _ELSEWHERE and taken_in)
