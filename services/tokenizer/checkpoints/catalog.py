"""Which models are tokenized for: those that the registry lists, read as they come.

While a checkpoint takes the place of another, both are read. New requests are for the one whose
workers can decode more sequences at once, and of equals for the one whose worker began last: so
all tokenizers choose the same, and a replacement step by step never crowds into its first worker.
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import grpc

from protos.tokenizer_pb2 import ModelInfo
from services.common.config import Settings
from services.common.discovery import Registration, Replica
from services.common.errors import PenstockError, unavailable
from services.common.redis import Redis
from services.common.served_models import READING, Checkpoint, ServedModels
from services.tokenizer.checkpoints.models import Parsers, ServedModel, load
from services.tokenizer.checkpoints.pools import Pools, Standing

log = logging.getLogger(__name__)

_RETRY_S = (1.0, 2.0, 5.0, 15.0, 60.0)  # the last again and again: a shared folder may come back
_PATIENCE_S = 10.0  # of a request, for its model to be read
_FIRST_TRIES_S = 4.0  # of whoever asks which models there are
_TOLD = 300  # characters of why


@dataclass(eq=False)
class _Reading:
    """Of one listed checkpoint."""

    served: Checkpoint  # as its worker of now says: another may have it elsewhere
    task: "asyncio.Task[None]"
    tried: asyncio.Event = field(default_factory=asyncio.Event)  # once, at least, or given up
    model: ServedModel | None = None
    why_not: str = "it is being read"


class Catalog:
    """Reads what the registry lists, and chooses between checkpoints of a name."""

    def __init__(self, redis: Redis, settings: Settings, id: str, pools: Pools) -> None:
        """`id`: the own replica's."""
        self._pools = pools
        self._max_window = settings.worker.max_model_len
        self._chosen = settings.tokenizer
        self._listed = ServedModels(redis, settings, self._changed)
        self._readings: dict[str, _Reading] = {}
        own = Replica("tokenizer", id, address="", host_id="", pid=0)
        self._told = Registration(redis, settings.namespace, own, settings.lease_s, under=READING)
        self._news = asyncio.Event()
        self._telling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once the models of this moment are read, or could not be."""
        await self._listed.start()
        await self._first_tries(_PATIENCE_S)
        await self._told.start()
        self._telling = asyncio.create_task(self._tell(), name="what is read")

    async def stop(self) -> None:
        await self._listed.stop()
        tasks = [reading.task for reading in self._readings.values()]
        if self._telling is not None:
            tasks.append(self._telling)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._told.stop()

    async def find(self, name: str, replaced: Collection[str] = ()) -> ServedModel:
        """The checkpoint for a new request, none of the `replaced` (digests), with its window as it
        is now; a request keeps both throughout. Waits for one that is being read.

        Raises NOT_FOUND, param "model"; UNAVAILABLE when no checkpoint of it can be read.
        """
        if not self._of(name, replaced):
            await self._listed.look()
        if not self._listed.of(name):
            raise _not_found(name)
        if (found := self._best(name, replaced)) is None:
            await self._any_read(self._of(name, replaced))
            found = self._best(name, replaced)
        if found is None:
            raise _unreadable(name, self._of(name, replaced))
        return found

    async def exactly(self, name: str, digest: str) -> ServedModel:
        """That checkpoint, for an answer that was begun with it. Raises UNAVAILABLE."""
        listed = {served.digest for served in self._listed.of(name)}
        if digest not in listed:
            await self._listed.look()
            listed = {served.digest for served in self._listed.of(name)}
        try:
            return await self.find(name, listed - {digest})
        except PenstockError:
            raise unavailable(
                f"the answer cannot be gone on with: its checkpoint {digest!r} is served no more",
                stage="tokenizer",
                reason="cannot_resume",
            ) from None

    async def all(self) -> list[ModelInfo]:
        """Those that can be asked for, by the registry as it is now. Raises UNAVAILABLE when it was
        never read."""
        await self._listed.look()
        if not self._listed.seen:
            raise unavailable("Redis is away", stage="tokenizer", reason="no_registry")
        await self._first_tries(_FIRST_TRIES_S)
        best = (self._best(name, ()) for name in self._listed.names())
        return [
            ModelInfo(
                name=model.name,
                window=model.window,
                created=model.created,
                sampling=model.sampling,
                parent=model.parent,
            )
            for model in best
            if model is not None
        ]

    def _of(self, name: str, replaced: Collection[str]) -> list[_Reading]:
        return [
            reading
            for reading in self._readings.values()
            if reading.served.model == name and reading.served.digest not in replaced
        ]

    def _best(self, name: str, replaced: Collection[str]) -> ServedModel | None:
        read = [r.model for r in self._of(name, replaced) if r.model is not None]
        if not read:
            return None

        def standing(model: ServedModel) -> Standing:
            return self._pools.standing(model.routed_as, model.base or model.checkpoint)

        best = max(read, key=lambda model: (standing(model), model.checkpoint))
        room = self._pools.room(best.routed_as, best.base or best.checkpoint)
        return best if room is None else replace(best, window=min(room, self._max_window or room))

    async def _any_read(self, readings: list[_Reading]) -> None:
        if tasks := [reading.task for reading in readings]:
            await asyncio.wait(tasks, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)

    async def _first_tries(self, timeout_s: float) -> None:
        waits = [asyncio.create_task(r.tried.wait()) for r in self._readings.values()]
        if waits:
            await asyncio.wait(waits, timeout=timeout_s)
        for wait in waits:
            wait.cancel()

    def _changed(self) -> None:
        listed = {str(served): served for served in self._listed.all()}
        for key in self._readings.keys() - listed.keys():
            log.info("model %s is served no more", key)
            gone = self._readings.pop(key)
            gone.task.cancel()
            gone.tried.set()  # adapters of it wait for that, and look for what is listed by then
            self._pools.forget(gone.served.model, gone.served.digest)
        for key, served in listed.items():
            if key in self._readings:
                self._readings[key].served = served
            else:
                task = asyncio.create_task(self._read(key), name=f"model {key}")
                self._readings[key] = _Reading(served, task)
        self._news.set()

    async def _read(self, key: str) -> None:
        """Until it is read, or not listed any more."""
        reading, tries = self._readings[key], 0
        while True:
            try:
                reading.model = await self._model(reading.served)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:_TOLD]
                if why != reading.why_not:
                    log.error("model %s cannot be tokenized for: %s", key, why)
                reading.why_not = why
            else:
                reading.why_not = ""
            reading.tried.set()
            self._news.set()
            if reading.model is not None:
                return
            await asyncio.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
            tries += 1

    async def _model(self, served: Checkpoint) -> ServedModel:
        """Raises whatever a library raises on a strange file; ValueError of an adapter whose base
        is not read."""
        if served.parent:
            base = self._readings.get(f"{served.parent}@{served.base}")
            if base is not None:
                await base.tried.wait()
            if base is None or base.model is None:
                raise ValueError(f"its model {served.parent!r} is not read")
            return base.model.adapted(served)
        return await asyncio.to_thread(
            _load,
            served,
            self._max_window,
            self._parsers(served.model),
            self._chosen.generation_config == "auto",
        )

    def _parsers(self, name: str) -> Parsers:
        chosen = self._chosen
        return Parsers(chosen.tool_parsers.get(name, ""), chosen.reasoning_parsers.get(name, ""))

    async def _tell(self) -> None:
        """Keeps in the registry what is read, for whoever waits for it or wonders."""
        while True:
            self._news.clear()
            await self._told.tell({key: r.why_not for key, r in self._readings.items()})
            await self._news.wait()


def _load(served: Checkpoint, max_window: int, parsers: Parsers, own_sampling: bool) -> ServedModel:
    """Whatever a library raises on a strange file is an Exception."""
    try:
        return load(served, max_window, parsers, own_sampling)
    except Exception:
        raise
    except BaseException as panic:  # of tokenizers' Rust code
        raise RuntimeError(f"{type(panic).__name__}: {panic}") from panic


def _not_found(name: str) -> PenstockError:
    return PenstockError(
        grpc.StatusCode.NOT_FOUND,
        f"the model {name!r} does not exist",
        param="model",
        reason="model_not_found",
    )


def _unreadable(name: str, readings: list[_Reading]) -> PenstockError:
    why = "; ".join(reading.why_not for reading in readings) or "none is left"
    log.warning("a request for %s found no checkpoint that is read: %s", name, why)
    return unavailable(
        f"no checkpoint of {name!r} can be read by this tokenizer now",
        stage="tokenizer",
        reason="model_not_read",
    )
