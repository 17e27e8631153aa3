"""How full Redis is with what tenants keep there, and when it takes no more of that.

Redis has one memory for all: batches' answers, vector stores and records of requests beside the
registry and admission, without which nothing goes on. Files have bounds of their own (files.py);
when nonetheless Redis has little left, whatever has filled it, nothing is taken that would stay.
"""

import asyncio
import logging

import grpc

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.common.redis import Redis, RedisAway, RedisError
from services.gateway import metrics

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_SHARE = 0.8  # of `maxmemory`; the rest is for what nothing goes on without


class StorageRoom:
    """Looks again and again, from `start` to `stop`. While Redis is away, tells no memory, or has
    what is no number, the last look stands."""

    def __init__(self, redis: Redis, namespace: str, settings: GatewaySettings) -> None:
        self._redis = redis
        self._settings = settings
        self.file_bytes_key = f"{namespace}:{{files}}:bytes"
        self._blob_bytes_key = f"{namespace}:{{files}}:blobs"
        self.full = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        metrics.file_bytes_limit.set(self._settings.max_file_bytes)
        metrics.blob_bytes_limit.set(self._settings.max_blob_bytes)
        self._task = asyncio.create_task(self._run(), name="storage room")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def check(self) -> None:
        """Raises RESOURCE_EXHAUSTED ("storage_full")."""
        if self.full:
            raise storage_full()

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except (*RedisAway, RedisError, ValueError) as error:
                log.debug("how full Redis is is not known: %s", type(error).__name__)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self) -> None:
        metrics.file_bytes.set(int(await self._redis.get(self.file_bytes_key) or 0))
        metrics.blob_bytes.set(int(await self._redis.get(self._blob_bytes_key) or 0))
        memory = await self._redis.info("memory")
        most = int(memory.get("maxmemory", 0))
        used = int(memory.get("used_memory", 0)) / most if most else 0.0
        metrics.redis_memory.set(used)
        if self.full != (used >= _SHARE):
            self.full = not self.full
            log.warning("Redis is %s", "nearly full" if self.full else "no longer nearly full")


def storage_full() -> PenstockError:
    metrics.files_refused.labels("all").inc()
    return PenstockError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "What all tenants keep has reached what this installation has room for. This is not your "
        "own limit: until others delete some, or the operator makes room, no more is taken.",
        stage="gateway",
        reason="storage_full",
    )


def too_many(what: str, limit: int) -> PenstockError:
    return PenstockError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"A tenant may have {limit} {what}; delete some first.",
        stage="gateway",
        reason="too_many_" + what.replace(" ", "_"),
    )
