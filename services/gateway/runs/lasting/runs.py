"""Runs that outlive their connections, as a gateway's requests ask for them."""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import NamedTuple

from protos.runs_pb2 import RunEvent, RunEvents, StoredRun
from services.common.config import RunsSettings
from services.common.fairness.shares import Shares
from services.common.redis import Redis, RedisAway, RedisError
from services.gateway import metrics
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST
from services.gateway.intake import Holding, refused
from services.gateway.parts import Gateway
from services.gateway.runs.front import LastingFront
from services.gateway.runs.lasting.failures import (
    away,
    cancelled,
    key_reused,
    nothing_to_resume,
    too_large,
)
from services.gateway.runs.lasting.feeds import Feeds
from services.gateway.runs.lasting.own import OwnRuns
from services.gateway.runs.lasting.run import EndingOf, Run
from services.gateway.runs.lasting.store import Hold, Place, RunStore
from services.gateway.runs.lasting.stored import (
    failed,
    stored_caller,
    stored_prompt,
    text_of,
)
from services.gateway.runs.prompt import Prompt

log = logging.getLogger(__name__)

_PATIENCE_S = 30.0  # with Redis, while somebody follows a run


class Begun(NamedTuple):
    """A run that answers a request: its own, to be started, or the one that it is a retry of."""

    id: str
    own: Run | None


class Runs:
    """Of one gateway."""

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        owner: str,
        settings: RunsSettings,
        ending_of: EndingOf,
    ) -> None:
        """`ending_of`: what is done with a run's answer before its end is told, if there is
        anything."""
        self.store = RunStore(redis, namespace, owner, settings)
        self._feeds = Feeds(redis, self.store, settings.lease_s)
        self._followers = Shares(settings.max_followers)
        self._ending_of = ending_of
        self._own = OwnRuns(self.store, settings.lease_s, ending_of)
        self._gateway: Gateway | None = None

    def start(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._feeds.start()
        self._own.start(gateway)

    async def stop(self) -> None:
        """What still runs is another gateway's at once."""
        await self._own.stop()
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
        hold = Hold(principal.tenant, front.request_id)
        name = _name(principal, front.key) if front.key else ""
        try:
            what, *id = await self.store.begin(
                hold.place,
                text_of(stored),
                name,
                front.digest,
                resumes=front.resumes,
                about=front.about,
            )
        except RedisAway:
            raise away() from None
        if what == "other":
            raise key_reused()
        if what == "none":
            raise nothing_to_resume()
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
            ending=await self._ending_of(self._gateway, stored),
            keeps_ids=self._own.keeps_ids,
            traceparent=front.traceparent,
        )
        return Begun(front.request_id, run)

    async def named(self, principal: Principal, key: str) -> str:
        """The id of the run that was begun under this idempotency key; empty: there is none."""
        try:
            return await self.store.named(principal.tenant, _name(principal, key))
        except RedisAway:
            raise away() from None

    async def let_in(self, run: Run, principal: Principal, *, asked_to_last: bool) -> None:
        """Starts a run that was begun. Returns once it is past its limits, and that is written:
        now its client may be told of it. Raises what refuses it."""
        metrics.runs.labels("begun").inc()
        self._own.run(run, principal)
        try:
            why = await asyncio.shield(run.let_in)
        except asyncio.CancelledError:
            if not asked_to_last:
                run.stop("cancelled")
            raise
        if why is not None:
            raise why

    async def find(self, principal: Principal, id: str, hold: Holding) -> StoredRun | None:
        """The tenant's, for callers who may use its model; `hold`: of all that is kept of it.
        Raises PERMISSION_DENIED; UNAVAILABLE while Redis is away; what `hold` does."""
        if not REQUEST.fits(id):
            return None
        place = (principal.tenant, id)
        try:
            hold(await self.store.size(place))
            stored = await self.store.find(place)
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
        try:
            async with aclosing(self.store.written((principal.tenant, id))) as events:
                async for event in events:
                    if event.HasField("begun"):
                        principal.authorize(event.begun.model)
                    yield event
        except RedisAway:
            raise away() from None

    async def keep(self, stored: StoredRun, events: RunEvents, about: str = "") -> bool:
        """An answer that is whole; whether it was taken. `about`: of one that is in lists."""
        assert self._gateway is not None
        place = (stored.caller.tenant, stored.request_id)
        if self._gateway.files.room.full:
            return False
        try:
            told = text_of(stored), text_of(events), about
            return await self.store.keep(place, *told) == "ok"
        except (*RedisAway, RedisError) as error:
            log.warning("an answer is not stored: %s", type(error).__name__)
            return False

    async def ids(self, tenant: str) -> list[str]:
        """First to last; some may be gone."""
        try:
            return await self.store.ids(tenant)
        except RedisAway:
            raise away() from None

    async def about(self, tenant: str, ids: Sequence[str]) -> list[str | None]:
        """What was told about those that are in lists, and of the others None."""
        try:
            return await self.store.about(tenant, ids)
        except RedisAway:
            raise away() from None

    async def listed(self, tenant: str, ids: Sequence[str]) -> list[tuple[str | None, int]]:
        """As `about`, and bytes that are kept of its answers."""
        try:
            return await self.store.listed(tenant, ids)
        except RedisAway:
            raise away() from None

    async def describe(self, tenant: str, id: str, change: Callable[[str], str]) -> bool:
        """Tells something else about one that is in lists; False: it is gone."""
        while True:
            (before,) = await self.about(tenant, [id])
            if before is None:
                return False
            try:
                outcome = await self.store.describe((tenant, id), before, change(before))
            except RedisAway:
                raise away() from None
            if outcome == "full":
                raise too_large()
            if outcome != "changed":
                return outcome == "ok"

    async def cancel(self, tenant: str, id: str) -> None:
        """It has ended when this returns, whoever runs it: its owner stops at its next write or
        look. What has ended before stays as it is; what is sealed is waited for."""
        last = text_of(RunEvents(events=[failed(cancelled())]))
        try:
            what = await self.store.cancel((tenant, id), last)
        except RedisAway:
            raise away() from None
        if what == "cancelled":
            self._own.cancel(id)
        elif what == "sealed":
            await self._end_of((tenant, id))

    async def _end_of(self, place: Place) -> None:
        try:
            async with aclosing(self._feeds.follow(place, _PATIENCE_S)) as events:
                async for event in events:
                    if event.HasField("finished") or event.HasField("failed"):
                        return
        except RedisAway:
            raise away() from None

    async def drop(self, tenant: str, id: str) -> bool:
        await self.cancel(tenant, id)
        try:
            return await self.store.drop((tenant, id))
        except RedisAway:
            raise away() from None


def _name(principal: Principal, key: str) -> str:
    """Of a caller's idempotency key."""
    return hashlib.sha256(f"{principal.user}\0{key}".encode()).hexdigest()
