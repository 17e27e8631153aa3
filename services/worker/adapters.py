"""The adapters that a worker serves beside its model: those of its settings from the start, and
what `penstock models` adds and removes while it runs.

Each is a checkpoint of its own to all services, of the base's and its own digest: what was computed
with one is nobody else's, as with any other checkpoint (decision 0072).
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from services.common import served_models
from services.common.config import ModelSpec, Settings
from services.common.discovery import Registration
from services.common.redis import Redis, RedisAway, RedisError
from services.common.served_models import Checkpoint, adapted, entry
from services.worker.engine import EngineClient, EngineDied
from services.worker.engine.adapters import Adapter, PlaceInUse, UnsupportedAdapter, peft

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_TOLD = 1000  # characters of why one could not be loaded: of a strange file it may be any
_NOT_NOW = (*RedisAway, RedisError)


class ServedAdapters:
    """`on_change` is called when routers are to hear of another set of them."""

    def __init__(
        self, redis: Redis, settings: Settings, model: ModelSpec, base: Checkpoint, folder: Path
    ) -> None:
        """`base`: what the worker serves of the model, which lies in `folder`."""
        self._redis, self._settings, self._model = redis, settings, model
        self._base, self._folder = base, folder
        self._served: dict[str, tuple[str, Checkpoint, Registration]] = {}
        """By name; the path from which it was read."""
        self._failed: dict[str, str] = {}
        """By name, from where it could not be loaded: it is not tried again from there."""
        self._watching: asyncio.Task[None] | None = None

    @property
    def digests(self) -> list[str]:
        """Of what requests may be computed with, besides the base."""
        return sorted(served.digest for _, served, _ in self._served.values())

    async def wanted(self) -> dict[str, str]:
        """By name, the folders of those that are to be served now: what `penstock models` says, or
        where nobody does, as on Kubernetes, the settings. Raises ValueError, and while Redis is
        away one of `RedisAway`."""
        key = served_models.wanted_key(self._settings.namespace)
        told = await self._redis.hget(key, self._model.name)
        return (ModelSpec.model_validate_json(told) if told else self._model).adapters

    async def first(self) -> dict[str, tuple[str, Checkpoint, Adapter]]:
        """By name, with the folder, those that are wanted now, read: a worker that takes another's
        place has what that one had, before routers hear that it has less. Raises
        UnsupportedAdapter for those of the settings; others may fail later (`_make_so`)."""
        try:
            now = await self.wanted()
        except (*_NOT_NOW, ValueError):
            now = self._model.adapters
        found = {}
        for name, path in now.items():
            with self._tolerant(name, path):
                found[name] = path, *await asyncio.to_thread(self.read, name, path)
        return found

    @contextmanager
    def _tolerant(self, name: str, path: str) -> Iterator[None]:
        """Of what is wrong with an adapter that is not of the settings."""
        try:
            yield
        except UnsupportedAdapter as error:
            if self._model.adapters.get(name) == path:
                raise UnsupportedAdapter(f"adapter {name!r}: {error}") from error

    def read(self, name: str, path: str) -> tuple[Checkpoint, Adapter]:
        """Blocking. Raises UnsupportedAdapter."""
        own = self._settings.worker
        found = peft.read(Path(path).expanduser(), self._folder, own.max_adapter_rank)
        served = adapted(self._base, name, found.id)
        return served, replace(found, id=served.digest)

    async def start(
        self,
        first: dict[str, tuple[str, Checkpoint, Adapter]],
        engine: EngineClient,
        on_change: Callable[[], None],
    ) -> None:
        """With the `first`, where none goes as yet. Raises UnsupportedAdapter."""
        self._engine, self._on_change = engine, on_change
        for name, (path, served, adapter) in first.items():
            with self._tolerant(name, path):
                await self._load(name, path, served, adapter)
        self._watching = asyncio.create_task(self._watch(), name="wanted adapters")

    async def withdraw(self) -> None:
        """For a worker that takes no more requests: the names stay known for a while, as the
        base's does."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for _, _, registered in self._served.values():
            await registered.stop()

    async def _load(self, name: str, path: str, served: Checkpoint, adapter: Adapter) -> None:
        if why_not := await self._engine.load_adapter(adapter):
            raise UnsupportedAdapter(why_not)
        registered = entry(self._redis, self._settings, served)
        self._served[name] = path, served, registered
        self._on_change()
        await registered.start()
        log.info("adapter %r, %s: loaded from %s", name, served.digest, path)

    async def _drop(self, name: str) -> None:
        """Requests that it runs with end with it."""
        _, served, registered = self._served.pop(name)
        self._on_change()
        await registered.stop()
        try:
            await served_models.forget(self._redis, self._settings, served.__eq__)
        except _NOT_NOW:
            log.warning("adapter %r: it is listed until its entry runs out, Redis is away", name)
        if served.digest not in self.digests:  # two names of one
            self._engine.drop_adapter(served.digest)
        log.info("adapter %r, %s: dropped", name, served.digest)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self._make_so(await self.wanted())
            except (*_NOT_NOW, ValueError):
                continue
            except EngineDied:
                return
            except Exception:  # the next look may fare better
                log.exception("looking after adapters failed")

    async def _make_so(self, wanted: dict[str, str]) -> None:
        for name in [n for n, (path, *_) in self._served.items() if wanted.get(n) != path]:
            await self._drop(name)
        self._failed = {n: path for n, path in self._failed.items() if wanted.get(n) == path}
        for name in wanted.keys() - self._served.keys() - self._failed.keys():
            try:
                read = await asyncio.to_thread(self.read, name, wanted[name])
                await self._load(name, wanted[name], *read)
            except (EngineDied, *_NOT_NOW):
                raise
            except PlaceInUse:  # the next look may find it free
                log.debug("adapter %r waits for the place of one that goes", name)
            except Exception as error:  # whatever strange files make libraries raise
                why = str(error) if isinstance(error, ValueError) else repr(error)
                log.error("adapter %r is not served: %s", name, why[:_TOLD])
                if (await self.wanted()).get(name) == wanted[name]:  # else nobody takes it away
                    key = served_models.failures_key(self._settings.namespace)
                    await self._redis.hset(key, name, why[:_TOLD])
                self._failed[name] = wanted[name]
