"""The windows that the engines have: a checkpoint may know more than a worker's KV cache holds.

This is the one place where the tokenizer looks past its next service, the router. A prompt is cut
to the window here or not at all, so the figure must be known before the prompt goes on. It is a
fact of the registry, which is there for all; no worker is spoken to, and the router, which gets
prompts that are ready, does not have to carry a figure that it does not use.
"""

import logging

from services.common.config import Settings
from services.common.discovery import Directory, Replica
from services.common.redis import Redis
from services.tokenizer.models import Models

log = logging.getLogger(__name__)


class Windows:
    """Keeps each model's window at what all of its registered workers have room for.

    Any of them may get the prompt, so the smallest counts. While none is registered, the last known
    figure stands: workers come back as they were.
    """

    def __init__(self, redis: Redis, settings: Settings, models: Models) -> None:
        self._models = models
        self._workers = Directory(
            redis, settings.namespace, "worker", settings.lease_s, self._changed
        )

    async def start(self) -> None:
        """Looks once; goes on in the background."""
        await self._workers.start()

    async def stop(self) -> None:
        await self._workers.stop()

    def _changed(self, _added: list[Replica], _removed: list[Replica]) -> None:
        rooms: dict[str, int] = {}
        for worker in self._workers.replicas.values():
            name, room = worker.facts.get("model", ""), worker.facts.get("max_model_len", "")
            if not room.isdecimal() or not int(room):
                continue  # of another version: says nothing about its room
            rooms[name] = min(int(room), rooms.get(name, int(room)))
        for name, least in rooms.items():
            if self._models.bound(name, least):
                log.info("model %s: its workers have room for %d tokens", name, least)
