"""Blobs that no record is of: of uploads whose gateway was lost before their records were written,
or after these were deleted. They are looked for now and then, by one gateway at a time.
"""

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta

from services.common.blobs import Blob, Blobs
from services.common.errors import PenstockError
from services.common.redis import Redis, RedisAway
from services.gateway import metrics
from services.gateway.stores.files import kept_key

log = logging.getLogger(__name__)

_EVERY_S = 3600
_OLD = timedelta(days=1)  # an upload has ended long before
_AT_ONCE = 500


class Orphans:
    """Looks from `start` to `stop`."""

    def __init__(self, redis: Redis, namespace: str, blobs: Blobs) -> None:
        self._redis = redis
        self._blobs = blobs
        self._kept = kept_key(f"{namespace}:{{files}}:")
        self._since = f"{namespace}:{{files}}:kept:since"
        self._turn = f"{namespace}:{{files}}:orphans"
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="orphans")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                if await self._redis.set(self._turn, 1, nx=True, ex=_EVERY_S):
                    await self.collect(datetime.now(UTC) - _OLD)
            except (*RedisAway, PenstockError) as error:
                metrics.orphan_looks_failed.inc()
                log.warning("blobs without a record were not looked for: %s", error)
            except Exception:  # the next look may fare better
                metrics.orphan_looks_failed.inc()
                log.exception("looking for blobs without a record failed")
            await asyncio.sleep(_EVERY_S)

    async def collect(self, before: datetime) -> int:
        """Deletes those that were written before that, and returns how many. None that are older
        than the first look that Redis knows of: it may be what was lost, and its backup knows them.
        Parts of uploads that were killed go in any case."""
        await self._blobs.sweep(before)
        now = time.time()
        await self._redis.set(self._since, now, nx=True)
        since = datetime.fromtimestamp(float(await self._redis.get(self._since) or now), UTC)
        gone, some = 0, list[Blob]()
        async for blob in self._blobs.all():
            if since < blob.written < before:
                some.append(blob)
            if len(some) == _AT_ONCE:
                gone += await self._delete(some)
                some = []
        return gone + await self._delete(some)

    async def _delete(self, some: list[Blob]) -> int:
        known = (
            await self._redis.smismember(self._kept, [blob.key for blob in some]) if some else []
        )
        orphans = [blob for blob, is_known in zip(some, known, strict=True) if not is_known]
        for blob in orphans:
            await self._blobs.delete(blob.key)
            metrics.orphans.inc()
            log.info("deleted a blob that no file is of: %s, %d bytes", blob.key, blob.bytes)
        return len(orphans)
