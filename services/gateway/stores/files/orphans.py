"""Blobs that no record is of: of uploads whose gateway was lost before their records were written,
or after these were deleted. They are looked for now and then, by one gateway at a time.
"""

import logging
import time
from datetime import UTC, datetime, timedelta

from services.common.blobs import Blob, Blobs
from services.common.redis import Redis
from services.gateway import metrics
from services.gateway.stores.files.files import kept_key
from services.gateway.stores.lookout import Lookout

log = logging.getLogger(__name__)

_EVERY_S = 3600
_OLD = timedelta(days=1)  # an upload has ended long before
_AT_ONCE = 500


class Orphans(Lookout):
    def __init__(self, redis: Redis, namespace: str, blobs: Blobs) -> None:
        turn, failed = f"{namespace}:{{files}}:orphans", metrics.orphan_looks_failed.inc
        super().__init__(redis, turn, _EVERY_S, self._collect, "blobs without a record", failed)
        self._blobs = blobs
        self._kept = kept_key(f"{namespace}:{{files}}:")
        self._since = f"{namespace}:{{files}}:kept:since"

    async def _collect(self) -> None:
        await self.collect(datetime.now(UTC) - _OLD)

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
