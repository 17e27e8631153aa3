"""Records of requests in Redis, so that any gateway tells of them: for a time, so many of a tenant.

They are written behind the requests' backs, many at once. While Redis is away or nearly full they
are left out: the gateway that served a request still tells of it.
"""

import asyncio
import logging
from collections import deque
from contextlib import suppress

from services.common.config import GatewaySettings
from services.common.redis import Redis, RedisAway, RedisError, Script
from services.gateway.runs.records import Journal
from services.gateway.stores.files.storage_room import StorageRoom

log = logging.getLogger(__name__)

_EVERY_S = 0.1  # as long as records wait for others to be written with
_AT_ONCE = 100
_LAST_S = 2.0  # for what waits when the gateway ends

# KEYS: the ids of a tenant's records, newest first. ARGV: seconds, how many, what a record's key
# begins with; then ids and records.
_KEEP = """
for i = 4, #ARGV, 2 do
  redis.call('SET', ARGV[3] .. ARGV[i], ARGV[i + 1], 'EX', ARGV[1])
  redis.call('LPUSH', KEYS[1], ARGV[i])
end
for _, id in ipairs(redis.call('LRANGE', KEYS[1], ARGV[2], -1)) do
  redis.call('DEL', ARGV[3] .. id)
end
redis.call('LTRIM', KEYS[1], 0, ARGV[2] - 1)
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""


class SharedRecords:
    def __init__(
        self, redis: Redis, namespace: str, settings: GatewaySettings, room: StorageRoom
    ) -> None:
        self._redis = redis
        self._room = room
        self._keep = Script(redis, _KEEP)
        self._prefix = f"{namespace}:{{records}}:"
        self._bounds = (round(settings.records_kept_s), settings.records_kept)
        self._waiting: deque[Journal] = deque(maxlen=settings.records_kept)
        self._some, self._over = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="records")

    async def stop(self) -> None:
        """Writes what is left, if Redis takes it soon."""
        if self._task is None:
            return
        self._over.set()
        self._some.set()
        await asyncio.wait([self._task], timeout=_LAST_S)
        if not self._task.done():
            self._task.cancel()
            log.warning("the last records are not shared: Redis is too slow")
        await asyncio.gather(self._task, return_exceptions=True)

    def keep(self, journal: Journal) -> None:
        """Soon; costs next to nothing now."""
        if self._room.full:
            return
        self._waiting.append(journal)
        self._some.set()

    async def find(self, request_id: str, tenant: str) -> Journal | None:
        """Raises one of `RedisAway`."""
        stored = await self._redis.get(self._of(tenant) + request_id)
        return None if stored is None else Journal.of_stored(str(stored), tenant)

    def _of(self, tenant: str) -> str:
        """What the keys of a tenant's records begin with. Ids have no colon: no tenant's name can
        make another's key."""
        return f"{self._prefix}{tenant}:"

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _EVERY_S)
            await self._write()
            if self._over.is_set():
                return

    async def _write(self) -> None:
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            of_tenants: dict[str, list[str]] = {}
            for journal in some:
                records = of_tenants.setdefault(journal.tenant, [])
                records += [journal.request_id, journal.as_stored()]
            try:
                for tenant, records in of_tenants.items():
                    await self._keep(
                        [self._of(tenant)], [*self._bounds, self._of(tenant), *records]
                    )
            except (*RedisAway, RedisError) as away:
                log.warning("%d records are not shared: %s", len(some), type(away).__name__)
