"""What tells a cached search that a collection was written to since. In Redis, of each tenant:

{ns}:{tenant}:retrieval:revisions   hash   collection → "removal.content", two words of chance
{ns}:{tenant}:retrieval:writing     zset   "collection:word" of writes under way, by when they lapse

A write begins with a new `content` (and a new `removal`, if text leaves for good) and counts as
under way until it is done. One that failed may go on in the store, and of a killed replica nobody
knows: they count until their leases are over. While one is under way nothing is taken from the
cache and nothing kept. So what is kept under a revision
was searched for after the write that made it, and before the next: an interleaving of any number of
replicas cannot make it otherwise. A revision that Redis lost is made anew by who asks for it: words
of chance never come back, as numbers would.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from services.common.errors import PenstockError, unavailable
from services.common.redis import Redis, RedisAway, Script

_LOOK_S = 0.1  # a search waits no longer to know whether it may use the cache
_AWAY_S = 1.0  # and asks no more for so long, when it had no answer
_PATIENCE_S = 10.0  # of a write
_RETRY_S = 0.2
_KEPT_MS = 30 * 24 * 3600 * 1000  # since the tenant's last write: of what is gone nothing stays

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local revisions, writing = KEYS[1], KEYS[2]
"""
_LOOK = f"""{_NOW}
local busy = {{}}
for _, one in ipairs(redis.call('ZRANGEBYSCORE', writing, now, '+inf')) do
  busy[string.match(one, '^(.*):')] = true
end
local found = {{0}}
for n = 2, #ARGV do
  local revision = redis.call('HGET', revisions, ARGV[n])
  if not revision then
    revision = ARGV[1] .. '.' .. ARGV[1]
    redis.call('HSET', revisions, ARGV[n], revision)
    redis.call('PEXPIRE', revisions, {_KEPT_MS})
  end
  if busy[ARGV[n]] then found[1] = 1 end
  found[n] = revision
end
return found
"""
_BEGIN = f"""{_NOW}
local collection, word, removes, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local before = redis.call('HGET', revisions, collection)
local removal = before and removes == '0' and string.match(before, '^[^.]*') or word
redis.call('HSET', revisions, collection, removal .. '.' .. word)
redis.call('PEXPIRE', revisions, {_KEPT_MS})
redis.call('ZREMRANGEBYSCORE', writing, '-inf', now)
redis.call('ZADD', writing, now + lease, collection .. ':' .. word)
redis.call('PEXPIRE', writing, lease)
"""


class Revision(NamedTuple):
    """Of one collection."""

    removal: str  # the last write by which text left
    content: str  # the last write


class Seen(NamedTuple):
    """Of the collections of a search, in their order."""

    revisions: tuple[Revision, ...]
    settled: bool  # no write is under way


class Revisions:
    def __init__(self, redis: Redis, namespace: str, lease_s: float) -> None:
        """`lease_s`: longer than any write takes, a failed one's rest in the store included."""
        self._redis = redis
        self._namespace = namespace
        self._lease_ms = round(lease_s * 1000)
        self._look = Script(redis, _LOOK)
        self._begin = Script(redis, _BEGIN)
        self._asks_again = 0.0  # monotonic

    async def seen(self, tenant: str, collections: Sequence[str]) -> Seen | None:
        """None: Redis does not tell now."""
        if time.monotonic() < self._asks_again:
            return None
        try:
            async with asyncio.timeout(_LOOK_S):
                busy, *told = await self._look(
                    self._keys(tenant), [secrets.token_hex(8), *collections]
                )
        except (TimeoutError, *RedisAway):
            self._asks_again = time.monotonic() + _AWAY_S
            return None
        return Seen(tuple(Revision(*one.split(".")) for one in told), not busy)

    @asynccontextmanager
    async def writing(
        self, tenant: str, collection: str, *, removes: bool = False
    ) -> AsyncIterator[None]:
        """Around whatever changes the collection. Raises UNAVAILABLE ("revisions_away"), with
        nothing written, while Redis cannot be told."""
        word = secrets.token_hex(8)
        await self._begun(tenant, [collection, word, int(removes), self._lease_ms])
        yield
        with suppress(*RedisAway):  # its lease ends it
            await self._redis.zrem(self._keys(tenant)[1], f"{collection}:{word}")

    async def _begun(self, tenant: str, told: Sequence[object]) -> None:
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                await self._begin(self._keys(tenant), told)
                return
            except RedisAway:
                if time.monotonic() > until:
                    raise _away() from None
                await asyncio.sleep(_RETRY_S)

    def _keys(self, tenant: str) -> list[str]:
        """The braces keep them in one slot of a Redis cluster."""
        root = f"{self._namespace}:{{{tenant}}}:retrieval"
        return [f"{root}:revisions", f"{root}:writing"]


def _away() -> PenstockError:
    return unavailable(
        "the search cache cannot be told of the change: Redis is away",
        stage="retrieval",
        reason="revisions_away",
    )
