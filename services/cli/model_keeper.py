"""Makes Serve's applications what the wanted models are, while a stack is up."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from services.cli.replicas import check_room, missing, workers_of
from services.cli.wanted_models import WantedModels
from services.common import served_models
from services.common.config import ModelSpec, Settings
from services.common.discovery import Directory
from services.common.redis import Redis, RedisAway, RedisError, connect
from services.common.start_failures import first_told, forget

_LOOK_EVERY_S = 0.5
_END_S = 2.0
_START_TIMEOUT_S = 1800.0  # a large checkpoint, perhaps from a slow disk


class ModelKeeper:
    """Runs in a thread of its own from `start` to `stop`: Serve's calls block."""

    def __init__(
        self, settings: Settings, has: Callable[[], dict[str, float]], report: Callable[[str], None]
    ) -> None:
        """`settings.models` are deployed already; `has` is what Ray has."""
        self._settings = settings
        self._has = has
        self._report = report
        self._deployed = {model.name: model for model in settings.models}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="models", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Whatever is under way is left as it is."""
        self._stopped.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        asyncio.run(self._keep())

    async def _keep(self) -> None:
        redis = connect(self._settings.redis_dsn)
        self._wanted = WantedModels(redis, self._settings.namespace)
        self._workers = Directory(redis, self._settings.namespace, "worker", self._settings.lease_s)
        try:
            await self._workers.start()
            while not self._stopped.is_set():
                try:
                    self._compare(redis, await self._wanted.all())
                except (*RedisAway, RedisError, ValueError):
                    pass  # it is started again, or somebody wrote what is no model
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            for task in self._under_way.values():
                task.cancel()
            await asyncio.gather(*self._under_way.values(), return_exceptions=True)
            await self._workers.stop()
            await redis.aclose()

    def _compare(self, redis: Redis, wanted: dict[str, ModelSpec]) -> None:
        """Begins what is to be done, one thing at a time for each model."""
        for name in wanted.keys() | self._deployed.keys():
            under_way = self._under_way.get(name)
            if under_way is not None and not under_way.done():
                continue
            spec, deployed = wanted.get(name), self._deployed.get(name)
            if spec is None and deployed is not None:
                work = self._remove(redis, deployed)
            elif spec is not None and deployed is None:
                work = self._add(redis, spec)
            else:
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
        from services.app import deploy_model

        models = [*self._deployed.values(), spec]
        settings = self._settings.model_copy(update={"models": models})
        try:
            check_room(settings, await asyncio.to_thread(self._has))
        except RuntimeError as error:
            return await self._wanted.give_up(spec.name, str(error))
        self._report(f"model {spec.name}: starting its workers")
        await forget(redis, settings.namespace, spec.name)
        await asyncio.to_thread(deploy_model, settings, spec)
        self._deployed[spec.name] = spec
        if why := await self._why_not_up(redis, spec):
            self._report(f"model {spec.name}: given up: {why}")
            await self._wanted.give_up(spec.name, why)
        else:
            self._report(f"model {spec.name}: served")

    async def _why_not_up(self, redis: Redis, spec: ModelSpec) -> str:
        """Empty once its workers are registered, or nobody wants it any more."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while left := missing(workers_of(spec), {"worker": self._workers}):
            if told := await first_told(redis, self._settings.namespace, spec.name):
                return str(told)
            if time.monotonic() > deadline:
                return f"not up after {_START_TIMEOUT_S:.0f} s: {', '.join(left)}"
            if spec.name not in await self._wanted.all():
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        return ""

    async def _remove(self, redis: Redis, spec: ModelSpec) -> None:
        """Its workers leave the registry as they begin to drain; then nobody knows of it any more,
        while what runs on them ends."""
        from services.app import delete_model

        self._report(f"model {spec.name}: its workers drain")
        deleting = asyncio.create_task(asyncio.to_thread(delete_model, spec.name))
        while any(w.facts.get("model") == spec.name for w in self._workers.replicas.values()):
            if deleting.done():
                break
            await asyncio.sleep(_LOOK_EVERY_S / 5)
        await served_models.forget(redis, self._settings.namespace, spec.name)
        await deleting
        del self._deployed[spec.name]
        await self._wanted.removed(spec.name)
        self._report(f"model {spec.name}: removed")
