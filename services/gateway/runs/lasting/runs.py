"""The runs that outlive their connections: this gateway's own, and everybody's to follow."""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, NamedTuple

from protos.runs_pb2 import RunEvent, RunEvents, StoredRun
from services.common.config import RunsSettings
from services.common.errors import PenstockError
from services.common.redis import Redis, RedisAway, RedisError
from services.common.shares import Shares
from services.gateway import metrics
from services.gateway.api.rest.http import internal
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST
from services.gateway.intake import Place, refused
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
from services.gateway.runs.lasting.feeds import Feeds
from services.gateway.runs.lasting.run import Run
from services.gateway.runs.lasting.store import Hold, RunStore
from services.gateway.runs.lasting.stored import (
    caller_of,
    failed,
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
_PATIENCE_S = 30.0  # with Redis, while somebody follows a run
_AGAIN_S = 1.0  # before a run that nobody had a place for is offered again
_LAST_S = 2.0  # for runs that are given away when the gateway ends
_NO_ROOM = frozenset({"too_many_requests", "too_many_bytes"})
_ELSEWHERE = frozenset({"draining", *_NO_ROOM})  # why another gateway is to have it
_CLAIMED = 8  # at one look
_WHY = {"cancelled": cancelled, "full": too_large, "away": away}  # an end that is not `lost`


class Begun(NamedTuple):
    """A run that answers a request: its own, to be started, or the one that it is a retry of."""

    id: str
    own: Run | None


class Runs:
    """Of one gateway."""

    def __init__(self, redis: Redis, namespace: str, owner: str, settings: RunsSettings) -> None:
        self.store = RunStore(redis, namespace, owner, settings)
        self._feeds = Feeds(redis, self.store, settings.lease_s)
        self._followers = Shares(settings.max_followers)
        self._lease_s = settings.lease_s
        self._own: dict[str, Run] = {}
        self._gateway: Gateway | None = None
        self._upkeep: asyncio.Task[None] | None = None

    def start(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._feeds.start()
        self._upkeep = asyncio.create_task(self._look_after(), name="runs")

    async def stop(self) -> None:
        """What still runs is another gateway's at once."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        tasks = [run.task for run in self._own.values() if run.task is not None]
        for run in list(self._own.values()):
            run.stop("leaving")
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_S)
        for task in tasks:  # Redis is away: they are found by their leases
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._feeds.stop()

    # ---- what can be asked --------------------------------------------------------------------

    async def begin(
        self, front: LastingFront, principal: Principal, prompts: Sequence[Prompt]
    ) -> Begun:
        """The run that answers: a new one, which nobody sees until it was let in, or the one that
        was begun under the same idempotency key by the same caller. Raises what refuses it."""
        assert self._gateway is not None
        self._gateway.files.room.check()
        model = prompts[0].request.model
        stored = StoredRun(
            request_id=front.request_id,
            route=front.route,
            endpoint=front.endpoint,
            created=time.time(),
            caller=stored_caller(principal),
            prompts=[stored_prompt(prompt) for prompt in prompts],
            told=front.told,
            digest=front.digest,
            model=model,
        )
        hold, name = Hold(principal.tenant, front.request_id), ""
        if front.key:
            name = hashlib.sha256(f"{principal.user}\0{front.key}".encode()).hexdigest()
        try:
            what, *id = await self.store.begin(hold.place, text_of(stored), name, front.digest)
        except RedisAway:
            raise away() from None
        if what == "other":
            raise key_reused()
        if what == "full":
            raise too_large()
        if what == "same":
            principal.authorize(model)  # what it may use may have changed since
            metrics.runs.labels("retried").inc()
            return Begun(id[0], None)
        run = Run(
            self.store,
            hold,
            stored,
            list(prompts),
            keeps_ids=self._keeps_ids,
            traceparent=front.traceparent,
        )
        return Begun(front.request_id, run)

    async def let_in(self, run: Run, principal: Principal, *, asked_to_last: bool) -> None:
        """Starts a run that was begun. Returns once it is past its limits, and that is written:
        now its client may be told of it. Raises what refuses it."""
        metrics.runs.labels("begun").inc()
        self._run(run, principal)
        try:
            why = await asyncio.shield(run.let_in)
        except asyncio.CancelledError:
            if not asked_to_last:
                run.stop("cancelled")
            raise
        if why is not None:
            raise why

    async def find(self, principal: Principal, id: str) -> StoredRun | None:
        """The tenant's, for callers who may use its model. Raises PERMISSION_DENIED; UNAVAILABLE
        while Redis is away."""
        if not REQUEST.fits(id):
            return None
        try:
            stored = await self.store.find((principal.tenant, id))
        except RedisAway:
            raise away() from None
        if stored is not None:
            principal.authorize(stored.model)
        return stored

    @contextmanager
    def follower(self, tenant: str) -> Iterator[None]:
        """A place among those who follow runs here. Raises RESOURCE_EXHAUSTED
        ("too_many_followers")."""
        if not self._followers.take(tenant):
            raise refused(
                "too_many_followers",
                f"{self._followers.held(tenant)} of your streams follow runs here, "
                "and no more fit in now",
            )
        try:
            yield
        finally:
            self._followers.give_back(tenant)

    async def events(self, principal: Principal, id: str) -> AsyncGenerator[RunEvent, None]:
        """All from the first, up to its end. Ends early when the run is deleted. Raises
        PERMISSION_DENIED to who may not use the model that answers, UNAVAILABLE while Redis is away
        for long."""
        place = (principal.tenant, id)
        try:
            async with aclosing(self._feeds.follow(place, _PATIENCE_S)) as events:
                async for event in events:
                    if event.HasField("begun"):
                        principal.authorize(event.begun.model)
                    yield event
                    if event.HasField("finished") or event.HasField("failed"):
                        return
        except RedisAway:
            raise away() from None

    async def so_far(self, principal: Principal, id: str) -> AsyncGenerator[RunEvent, None]:
        """What there is now. Raises as `events`, and at once."""
        after, more = 0, True
        while more:
            try:
                page = await self.store.read((principal.tenant, id), after)
            except RedisAway:
                raise away() from None
            for event in page.events:
                if event.HasField("begun"):
                    principal.authorize(event.begun.model)
                yield event
            after, more = page.entries[-1].seq if page.entries else after, page.more

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

    async def cancel(self, tenant: str, id: str) -> None:
        """It has ended when this returns, whoever runs it: its owner stops at its next write or
        look. What has ended before stays as it is."""
        last = text_of(RunEvents(events=[failed(cancelled())]))
        try:
            what = await self.store.cancel((tenant, id), last)
        except RedisAway:
            raise away() from None
        own = self._own.get(id)
        if what == "cancelled" and own is not None:
            own.stop("cancelled")

    async def drop(self, tenant: str, id: str) -> bool:
        await self.cancel(tenant, id)
        try:
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

    def _run(self, run: Run, principal: Principal) -> None:
        self._own[run.request_id] = run
        run.task = asyncio.create_task(self._carry(run, principal), name=f"run {run.request_id}")
        run.task.add_done_callback(lambda task: task.cancelled() or task.exception())

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
            del self._own[run.request_id]

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
        runs = list(self._own.values())
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
            if (own := self._own.get(hold.id)) is None:
                await self._take_over(hold, killed)
            elif own.hold != hold:  # another had it while this gateway slept
                own.stop("lost")
                await self.store.release(hold, _AGAIN_S)

    async def _take_over(self, hold: Hold, killed: int) -> None:
        """Raises one of `RedisAway`."""
        if killed > MAX_KILLED:  # before anything of it is looked at
            return await self._end(hold, gave_up())
        metrics.runs.labels("taken_over").inc()
        log.warning("run %s is taken over", hold.id)
        try:
            stored = await self.store.find(hold.place)
            if stored is None:
                return
            run = await taken_over(self.store, hold, stored, keeps_ids=self._keeps_ids)
            principal = caller_of(stored.caller)
        except RedisAway:
            raise
        except Exception:  # nobody else would fare better
            log.exception("run %s cannot be gone on with", hold.id)
            return await self._end(hold, internal())
        self._run(run, principal)

    async def _end(self, hold: Hold, error: PenstockError) -> None:
        await self.store.fail(hold, text_of(RunEvents(events=[failed(error)])))


def _is_anothers(run: Run, error: PenstockError) -> bool:
    """Another gateway has it already."""
    return run.over == "lost" or error.reason == MOVED


def _leaves(run: Run, error: PenstockError) -> bool:
    """It ends here so that another gateway goes on with it."""
    return run.is_let_in and (run.over == "leaving" or error.reason in _ELSEWHERE)
