"""The served models, in the registry beside the replicas: what their workers say of them.

Each worker renews its model's entry as it renews its own lease, but the entry outlives it by
`model_memory_s`: while a model's only worker restarts, its requests wait instead of hearing that
there is no such model. Who removes a model for good ends its entry (`forget`).
"""

import logging
import time
from collections.abc import Callable

from services.common.config import ModelSpec, Settings
from services.common.discovery import Directory, Registration, Replica, leave
from services.common.redis import Redis

log = logging.getLogger(__name__)

_MODEL = "model"  # what the registry calls them
_LOOK_EVERY_S = 0.2  # at most, however many unknown names are asked for


def entry(redis: Redis, settings: Settings, model: ModelSpec) -> Registration:
    """For a worker to keep."""
    listed = Replica(_MODEL, model.name, address="", host_id="", pid=0, facts={"path": model.path})
    return Registration(
        redis, settings.namespace, listed, settings.lease_s, outlived_by_s=settings.model_memory_s
    )


async def forget(redis: Redis, namespace: str, name: str) -> None:
    """Ends a model's entry; for when no worker renews it any more."""
    await leave(redis, namespace, _MODEL, name)


class ServedModels:
    """A live view of them. `on_change` is called on the event loop after each change."""

    def __init__(
        self, redis: Redis, settings: Settings, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._directory = Directory(
            redis, settings.namespace, _MODEL, settings.lease_s, self._changed
        )
        self._specs: dict[str, ModelSpec] = {}
        self._on_change = on_change
        self._looked_at = float("-inf")

    async def start(self) -> None:
        """Looks once; goes on in the background."""
        await self._directory.start()

    async def stop(self) -> None:
        await self._directory.stop()

    def all(self) -> dict[str, ModelSpec]:
        """By name, each with where its checkpoint lies."""
        return dict(self._specs)

    async def has(self, name: str) -> bool:
        """Looks into the registry anew for one that is not known."""
        if name not in self._specs:
            now = time.monotonic()
            if now - self._looked_at > _LOOK_EVERY_S:
                self._looked_at = now
                await self._directory.refresh()
        return name in self._specs

    def _changed(self, added: list[Replica], removed: list[Replica]) -> None:
        for gone in removed:
            self._specs.pop(gone.id, None)
        for listed in added:
            if (spec := _read(listed)) is not None:
                self._specs[spec.name] = spec
        self._on_change()


def _read(listed: Replica) -> ModelSpec | None:
    """Junk is None: whoever wrote it, the other models are served on."""
    try:
        return ModelSpec(name=listed.id, path=listed.facts["path"])
    except (KeyError, ValueError):
        log.warning("an entry in the registry is no model: %.100r", listed.id)
        return None
