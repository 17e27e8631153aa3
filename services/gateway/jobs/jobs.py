"""The durable jobs that this gateway carries out, beside the requests that it serves."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import ParamSpec, Protocol

from pydantic import ValidationError

from services.common.config import JobsSettings
from services.common.errors import PenstockError
from services.common.redis import Redis, RedisAway
from services.gateway import metrics
from services.gateway.jobs.queue import Claimed, Queue, Queues

log = logging.getLogger(__name__)
P = ParamSpec("P")

MAX_CLAIMS = 4  # three gateways were lost under it: it may be the job that they die of
_LEFT_S = 30.0  # what cannot be read here is left for so long, to a gateway of a later version,
_MOST_LEFT = 120  # so often: an upgrade has an end, and may have been taken back
_LOOK_EVERY_S = 1.0  # where there was nothing to do
_PROMISED_S = 30.0  # longer than Redis may take for what comes in between
_AWAY_S = 1.0  # between two tries while Redis is away
_COUNT_EVERY_S = 5.0
_RENEWALS = 3  # in the time of a lease
_LONGEST_BACKOFF_S = 60.0


class Later(Exception):
    """A job is to be done after a while; `body` is what it is then. `pauses`: the others of its
    queue would fare no better now."""

    def __init__(self, body: str, delay_s: float, *, pauses: bool = False) -> None:
        super().__init__(f"in {delay_s:.1f} s")
        self.body = body
        self.delay_s = delay_s
        self.pauses = pauses


class Dead(Exception):
    """A job has failed for good, by no fault of whose job it is."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Unreadable(Exception):
    """A job is stored in a way that this version does not know."""


class Places(Protocol):
    """How many of a kind are under way here."""

    async def take(self) -> None: ...
    def give_back(self) -> None: ...


class Kind(Protocol):
    """What is to be done with the jobs of one kind."""

    name: str

    @property
    def places(self) -> Places: ...

    async def run(self, job: Claimed) -> None:
        """Does it, perhaps again: twice is the same as once. Raises Later, or Dead."""

    async def give_up(self, job: Claimed, why: str) -> None:
        """It will not be tried again, and whose it is must hear of it. It may be one of which `run`
        cannot read all."""


class Jobs:
    """Of one gateway."""

    def __init__(self, redis: Redis, namespace: str, owner: str, settings: JobsSettings) -> None:
        self.queues = Queues(redis, namespace, owner, settings.lease_s)
        self._lease_s = settings.lease_s
        self._kinds: Sequence[Kind] = ()
        self._leaving: Callable[[], bool] = lambda: False
        self._wake: dict[str, asyncio.Event] = {}
        self._own: dict[asyncio.Task[None], Claimed] = {}
        self._has: dict[str, Counter[str]] = {}  # by kind: how many of these are each tenant's
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self, kinds: Sequence[Kind], leaving: Callable[[], bool]) -> None:
        """`leaving`: whether other gateways are to take what comes."""
        self._kinds, self._leaving = kinds, leaving
        self._wake = {kind.name: asyncio.Event() for kind in kinds}
        self._has = {kind.name: Counter() for kind in kinds}
        works = [*(self._feed(kind) for kind in kinds), self._renew(), self._count()]
        self._loops = [asyncio.create_task(work, name="jobs") for work in works]

    async def drain(self, grace_s: float) -> None:
        """Lets what is under way end for `grace_s`; no more is begun."""
        self._stopping = True
        if self._own:
            await asyncio.wait(self._own, timeout=grace_s)

    async def stop(self) -> None:
        """What is under way is another gateway's at once."""
        self._stopping = True
        for task in (*self._loops, *self._own):
            task.cancel()
        await asyncio.gather(*self._loops, *self._own, return_exceptions=True)

    @asynccontextmanager
    async def promised(self, queue: Queue, *jobs: str) -> AsyncIterator[None]:
        """For what is noted elsewhere and is these jobs' to do. They are queued before that, to be
        done once that is through; or after a while, where this gateway is lost in between or fails:
        then they may find nothing to do."""
        await self.queues.add(queue, *jobs, delay_s=_PROMISED_S)
        yield
        await self.queues.hasten(queue, *jobs)
        self.look(queue.kind)

    @asynccontextmanager
    async def insured(
        self, queue: Queue, job: str, *, failing: bool = False
    ) -> AsyncIterator[None]:
        """For what is done here, in steps, and is this job's to do where this gateway is lost in
        between, or its client has left. Who fails tells his client, who may ask again; `failing`:
        then it is the job's as well."""
        await self.queues.add(queue, job, delay_s=_PROMISED_S)
        putting_off = asyncio.create_task(self._put_off(queue, job), name="put off")
        try:
            yield
        except (PenstockError, *RedisAway):
            if not failing:
                with suppress(*RedisAway):
                    await self.queues.withdraw(queue, job)
            raise
        finally:
            putting_off.cancel()
        await self.queues.withdraw(queue, job)

    async def _put_off(self, queue: Queue, job: str) -> None:
        """Nobody begins it while it is being done here."""
        while True:
            await asyncio.sleep(_PROMISED_S / _RENEWALS)
            with suppress(*RedisAway):
                await self.queues.put_off(queue, job, _PROMISED_S)

    def look(self, kind: str) -> None:
        """There is something to do."""
        if kind in self._wake:
            self._wake[kind].set()

    # ---- what comes -----------------------------------------------------------------------------

    async def _feed(self, kind: Kind) -> None:
        wake = self._wake[kind.name]
        while True:
            await kind.places.take()
            job = None
            try:
                wake.clear()
                if not (self._stopping or self._leaving()):
                    job = await self.queues.claim(kind.name, self._has[kind.name])
            except RedisAway as error:
                log.debug("no jobs are claimed: %s", type(error).__name__)
            except Exception:  # the next look may fare better, and nobody else takes it
                log.exception("claiming jobs failed")
            finally:
                if job is None:
                    kind.places.give_back()
            if job is not None:
                self._begin(kind, job)
                continue
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await wake.wait()
            except TimeoutError:
                continue

    def _begin(self, kind: Kind, job: Claimed) -> None:
        task = asyncio.create_task(self._carry_out(kind, job), name=f"{kind.name} {job.body[:40]}")
        self._own[task] = job
        has, tenant = self._has[kind.name], job.queue.tenant
        has[tenant] += 1

        def over(task: "asyncio.Task[None]") -> None:
            self._own.pop(task)
            has[tenant] -= 1
            if not has[tenant]:
                del has[tenant]
            kind.places.give_back()

        task.add_done_callback(over)

    # ---- one job --------------------------------------------------------------------------------

    async def _carry_out(self, kind: Kind, job: Claimed) -> None:
        outcome = "failed"
        try:
            if job.shape > self.queues.shape:
                raise Unreadable(f"its shape is {job.shape}")
            if job.claims > MAX_CLAIMS:
                raise Dead(f"it was begun {MAX_CLAIMS - 1} times, and never ended")
            await kind.run(job)
            await self._say(self.queues.done, job)
            outcome = "done"
        except Later as later:
            outcome = "retried"
            await self._say(self.queues.later, job, later.body, later.delay_s)
            if later.pauses:
                await self._say(self.queues.pause, job.queue, later.delay_s)
        except (Unreadable, ValidationError) as unknown:
            outcome = await self._leave(kind, job, _told_of(unknown))
        except Dead as dead:
            outcome = "dead"
            log.error("%s of %s is dead: %s", kind.name, job.queue.tenant, dead.why)
            await self._bury(kind, job, dead.why)
        except asyncio.CancelledError:
            outcome = "released"
            if self._stopping:
                await self._last(job)
            raise
        except RedisAway:
            outcome = "released"
            await self._say(self.queues.release, job)
        except Exception:  # it is claimed again when its lease has run out, so often
            log.exception("a job failed: %s", kind.name)
        finally:
            metrics.jobs_ended.labels(kind.name, outcome).inc()

    async def _leave(self, kind: Kind, job: Claimed, unknown: str) -> str:
        """To a gateway of a later version, which can read it, or what it is about. What becomes of
        it."""
        if job.left < _MOST_LEFT:
            it = kind.name, job.queue.tenant
            log.warning("%s of %s cannot be read by this version: %s", *it, unknown)
            await self._say(self.queues.leave, job, _LEFT_S)
            await asyncio.sleep(_LOOK_EVERY_S)  # with its place: the others of its kind come slowly
            return "left"
        why = f"no gateway could read it, which a later version may: {unknown}"
        log.error("%s of %s is dead: %s", kind.name, job.queue.tenant, why)
        await self._bury(kind, job, why)
        return "dead"

    async def _bury(self, kind: Kind, job: Claimed, why: str) -> None:
        try:
            await self._say(kind.give_up, job, why)
        except (Unreadable, ValidationError):
            log.error("nobody is told of a job that cannot be read: %s", kind.name)
        except Exception:  # the next claim may fare better, some times
            log.exception("nobody is told of a dead job: %s of %s", kind.name, job.queue.tenant)
            if job.claims < 2 * MAX_CLAIMS:
                return
        await self._say(self.queues.bury, job, why)

    async def _say(
        self, what: Callable[P, Awaitable[None]], *args: P.args, **more: P.kwargs
    ) -> None:
        """As often as it takes."""
        while True:
            try:
                return await what(*args, **more)
            except RedisAway:
                await asyncio.sleep(_AWAY_S)

    async def _last(self, job: Claimed) -> None:
        """This gateway ends. Without it the job is claimed when its lease has run out."""
        try:
            await self.queues.release(job)
        except RedisAway as error:
            log.warning("a job is not released: %s", type(error).__name__)

    # ---- leases, figures ------------------------------------------------------------------------

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS)
            jobs = list(self._own.items())
            held = await asyncio.gather(
                *(self.queues.renew(job) for _, job in jobs), return_exceptions=True
            )
            for (task, _), answer in zip(jobs, held, strict=True):
                if answer is False:  # another gateway has it, or it is no more
                    task.cancel()

    async def _count(self) -> None:
        while True:
            try:
                for kind in self._kinds:
                    waiting, running = await self.queues.counts(kind.name)
                    metrics.jobs.labels(kind.name, "waiting").set(waiting)
                    metrics.jobs.labels(kind.name, "running").set(running)
                metrics.jobs_dead.set(await self.queues.count_dead())
            except RedisAway as error:
                log.debug("jobs are not counted: %s", type(error).__name__)
            except Exception:
                log.exception("counting jobs failed")
            await asyncio.sleep(_COUNT_EVERY_S)


def backoff_s(first_s: float, tries: int) -> float:
    """After so many: longer each time, and not all at once."""
    longest = min(first_s * 2.0 ** (tries - 1), _LONGEST_BACKOFF_S)
    return longest * random.uniform(0.5, 1.0)


def _told_of(unknown: Unreadable | ValidationError) -> str:
    """What this version does not know, without the value."""
    if isinstance(unknown, Unreadable):
        return str(unknown)
    first = unknown.errors(include_url=False, include_input=False)[0]
    return f"{unknown.title} {'.'.join(map(str, first['loc']))}: {first['type']}"
