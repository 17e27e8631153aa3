"""Makes Serve's applications what the wanted models are, while a stack is up."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from services.cli.stack.replicas import check_room, missing, workers_of
from services.cli.stack.wanted_models import Look, WantedModels
from services.common import served_models
from services.common.config import ModelSpec, Settings
from services.common.discovery import Directory
from services.common.redis import Redis, RedisAway, RedisError, connect
from services.common.start_failures import first_told, forget

T = TypeVar("T")

_LOOK_EVERY_S = 0.5
_END_S = 2.0
_START_TIMEOUT_S = 1800.0  # a large checkpoint, perhaps from a slow disk
_TRIED_AGAIN_S = (10.0, 30.0, 60.0, 300.0)  # the last again and again


class ModelKeeper:
    """Runs in a thread of its own from `start` to `stop`: Serve's calls block.

    The last that began keeps them (`id`): one that sees another's mark in Redis is `replaced`, and
    ends nothing and starts nothing from then on.

    A model that is added and does not start is given up. One that was served once, by a stack that
    was lost, is tried again until it is not wanted any more; it keeps no other from coming back.
    """

    def __init__(
        self,
        id: str,
        settings: Settings,
        has: Callable[[], dict[str, float]],
        report: Callable[[str], None],
    ) -> None:
        """`settings.models` are deployed already; `has` is what Ray has."""
        self.replaced = False
        self._id = id
        self._settings = settings
        self._has = has
        self._report = report
        self._deployed = {model.name: model for model in settings.models}  # at least in part
        self._served = dict(self._deployed)
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._settled = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="models", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def settle(self, timeout_s: float) -> None:
        """Returns once each wanted model is served, or it is told why not."""
        self._settled.wait(timeout_s)

    def stop(self) -> None:
        """Whatever is under way is left as it is; `wait` for what Serve is asked just now."""
        self._stopped.set()
        self._thread.join(_END_S)

    def wait(self) -> None:
        """Returns when nothing more comes to Serve of one that was stopped: what a thread asks of
        it cannot be cancelled."""
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._keep())

    async def _keep(self) -> None:
        redis = connect(self._settings.redis_dsn)
        self._wanted = WantedModels(redis, self._settings.namespace)
        self._workers = Directory(redis, self._settings.namespace, "worker", self._settings.lease_s)
        begun = False
        try:
            await self._workers.start()
            while not self._stopped.is_set():
                try:
                    look = await self._wanted.look()
                    if look.keeper not in ("", self._id):
                        self.replaced = True
                        return
                    if begun and look.keeper:
                        self._compare(redis, look)
                    else:
                        await self._begin(redis, look)
                        begun = True
                except (*RedisAway, RedisError):
                    pass  # it is started again, or somebody wrote what is no model
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            self._settled.set()
            for task in self._under_way.values():
                task.cancel()
            await asyncio.gather(*self._under_way.values(), return_exceptions=True)
            await self._workers.stop()
            await redis.aclose()

    async def _begin(self, redis: Redis, look: Look) -> None:
        """Also after Redis has lost what was wanted: what runs is wanted then."""
        if not look.keeper:
            await self._wanted.start_with(self._deployed.values(), self._id)
        await self._wanted.runs(self._deployed)
        specs = (*look.specs.values(), *self._deployed.values())
        names = {name for spec in specs for name in spec.names}
        # What an earlier stack served, and lost: its entries would stand for a day.
        await served_models.forget(redis, self._settings, lambda one: one.model not in names)

    def _compare(self, redis: Redis, look: Look) -> None:
        """Begins what is to be done, one thing at a time for each model."""
        if look.specs.keys() <= self._served.keys() | look.failures.keys():
            self._settled.set()
        for name in look.specs.keys() | self._deployed.keys() | look.running:
            under_way = self._under_way.get(name)
            if name in look.odd or (under_way is not None and not under_way.done()):
                continue
            spec, deployed = look.specs.get(name), self._deployed.get(name)
            if spec is None:
                work = self._ended(name) if deployed is None else self._remove(redis, deployed)
            elif name not in self._served:
                work = self._add(redis, spec)
            else:
                self._served[name] = self._deployed[name] = spec  # of other adapters, perhaps
                continue
            self._under_way[name] = asyncio.create_task(self._told(name, work))

    async def _told(self, name: str, work: Any) -> None:
        """Does it, and says what went wrong; the next look tries again."""
        try:
            await work
        except Exception as error:  # Serve's are of many kinds, most often that Ray is away
            self._report(f"model {name}: {error}")
            await asyncio.sleep(10 * _LOOK_EVERY_S)

    async def _add(self, redis: Redis, spec: ModelSpec) -> None:
        name, tries = spec.name, 0
        while await self._wanted.begin(name):
            self._report(f"model {name}: starting its workers")
            why = await self._deploy(redis, spec)
            look = await _once_told(self._wanted.look)
            if name not in look.specs:
                return
            if not why:
                await _once_told(partial(self._wanted.served, name))
                self._served[name] = spec
                return self._report(f"model {name}: served")
            if name not in look.proven:
                await _once_told(partial(self._wanted.give_up, name, why))
                return self._report(f"model {name}: given up: {why}")
            wait_s = _TRIED_AGAIN_S[min(tries, len(_TRIED_AGAIN_S) - 1)]
            tries += 1
            await _once_told(partial(self._wanted.failed, name, f"{why} (it is tried again)"))
            self._report(f"model {name}: not served, tried again in {wait_s:g} s: {why}")
            await self._while_wanted(name, wait_s)

    async def _deploy(self, redis: Redis, spec: ModelSpec) -> str:
        """Returns why it is not served; empty once its workers are registered, or nobody wants it
        any more."""
        from services.app import deploy_model

        models = {**self._deployed, spec.name: spec}
        settings = self._settings.model_copy(update={"models": list(models.values())})
        try:
            check_room(settings, await asyncio.to_thread(self._has))
        except RuntimeError as error:
            return str(error)
        await forget(redis, settings.namespace, spec.name)
        self._deployed[spec.name] = spec
        await asyncio.to_thread(deploy_model, settings, spec)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while left := missing(workers_of(spec), {"worker": self._workers}):
            if told := await first_told(redis, self._settings.namespace, spec.name):
                return str(told)
            if time.monotonic() > deadline:
                return f"not up after {_START_TIMEOUT_S:.0f} s: {', '.join(left)}"
            if spec.name not in await _once_told(self._wanted.all):
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        return ""

    async def _while_wanted(self, name: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        look = self._wanted.all
        while time.monotonic() < until and name in await _once_told(look):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _ended(self, name: str) -> None:
        self._served.pop(name, None)
        self._deployed.pop(name, None)
        await self._wanted.ended(name)

    async def _remove(self, redis: Redis, spec: ModelSpec) -> None:
        self._report(f"model {spec.name}: its workers drain")
        await remove_model(redis, self._settings, self._workers, spec.name)
        await self._ended(spec.name)
        self._report(f"model {spec.name}: removed")


async def remove_model(redis: Redis, settings: Settings, workers: Directory, name: str) -> None:
    """Its workers leave the registry as they begin to drain; then nobody knows of it any more,
    while what runs on them ends. Returns when they have ended. May be repeated where it fails, as
    it does while Redis is away."""
    from services.app import delete_model

    deleting = asyncio.create_task(asyncio.to_thread(delete_model, settings.namespace, name))
    while any(w.facts.get("model") == name for w in workers.replicas.values()):
        if deleting.done():
            break
        await asyncio.sleep(_LOOK_EVERY_S / 5)
    while True:
        try:
            await served_models.forget(redis, settings, lambda one: name in (one.model, one.parent))
            return await deleting
        except RedisAway:
            if deleting.done():
                raise
            await asyncio.sleep(_LOOK_EVERY_S)


async def _once_told(ask: Callable[[], Awaitable[T]]) -> T:
    """As soon as Redis answers. What Serve has begun goes on meanwhile: begun anew, workers that
    load a model would be replaced by others, which load it from the start."""
    while True:
        try:
            return await ask()
        except (*RedisAway, RedisError):
            await asyncio.sleep(_LOOK_EVERY_S)
