"""Which models are tokenized for: those that the registry lists, read as they come."""

import asyncio
import logging

from services.common.config import ModelSpec, Settings
from services.common.redis import Redis
from services.common.served_models import ServedModels
from services.tokenizer.models import Models, ServedModel, load

log = logging.getLogger(__name__)

_RETRY_S = 5.0  # after a checkpoint that could not be read: a shared folder may come back
_PATIENCE_S = 10.0  # of a request, for its model to be read


class Catalog:
    """Keeps `models` as the registry says; those that were there before stay."""

    def __init__(self, redis: Redis, settings: Settings, models: Models) -> None:
        self.models = models
        self._own = {model.name for model in models.info()}
        self._max_window = settings.worker.max_model_len
        self._listed = ServedModels(redis, settings, self._changed)
        self._read: dict[str, ModelSpec] = {}  # what `models` has of the listed
        self._reading: dict[str, tuple[ModelSpec, asyncio.Task[None]]] = {}

    async def start(self) -> None:
        """Returns once the models of this moment are read, or could not be."""
        await self._listed.start()
        if tasks := [task for _, task in self._reading.values()]:
            await asyncio.wait(tasks, timeout=_PATIENCE_S)

    async def stop(self) -> None:
        await self._listed.stop()
        tasks = [task for _, task in self._reading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def find(self, name: str) -> ServedModel:
        """Waits for one that is being read. Raises NOT_FOUND, param "model"."""
        if name not in self.models and await self._listed.has(name) and name in self._reading:
            await asyncio.wait([self._reading[name][1]], timeout=_PATIENCE_S)
        return self.models[name]

    def _changed(self) -> None:
        listed = self._listed.all()
        for name in [*self._read, *self._reading]:
            if name not in listed:
                self._leave(name)
        for name, spec in listed.items():
            reading, _ = self._reading.get(name, (None, None))
            if name in self._own or spec in (reading, self._read.get(name)):
                continue
            self._give_up(name)
            task = asyncio.create_task(self._take(spec), name=f"model {name}")
            self._reading[name] = (spec, task)

    def _give_up(self, name: str) -> None:
        """Reading it."""
        if name in self._reading:
            self._reading.pop(name)[1].cancel()

    def _leave(self, name: str) -> None:
        self._give_up(name)
        if self._read.pop(name, None) is not None:
            log.info("model %s is served no more", name)
            self.models.drop(name)

    async def _take(self, spec: ModelSpec) -> None:
        while True:
            try:
                model = await asyncio.to_thread(load, spec, self._max_window)
            except (ValueError, OSError) as error:
                log.error("a model cannot be tokenized for: %s", error)
            else:
                break
            await asyncio.sleep(_RETRY_S)
        self.models.put(model)
        self._read[spec.name] = spec
        del self._reading[spec.name]
