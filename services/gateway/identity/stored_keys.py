"""API keys in Redis. Only their hashes are stored.

    {ns}:{identity}:keys      hash   SHA-256 of the key (hex) → the record as JSON
    {ns}:{identity}:ids       hash   key id → SHA-256 of the key; of those before it, behind spaces
    {ns}:{identity}:revoked   hash   SHA-256 of the key → Unix time of its revocation
    {ns}:{identity}:used      hash   key id → Unix time of its last use, a minute late (last_use.py)
    {ns}:{identity}:keys-of:<tenant>
                              hash   key id → Unix time when it was made; no tenant: administrators'

SHA-256 without salt or stretching is enough here: a key is 256 random bits, so there is nothing to
guess from its hash. Looking the hash up instead of comparing keys also leaves no timing to measure.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from services.common.redis import Redis
from services.gateway.identity.key_record import KeyRecord
from services.gateway.ids import KEY

log = logging.getLogger(__name__)

_AT_ONCE = 100  # keys whose records are read in one turn of the loop
_ASKED_AT_ONCE = 1000  # of hashes: 64 kB


class StoredKeys:
    """Looks at them. Raises `RedisAway` when Redis is away."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self.namespace = namespace
        own = f"{namespace}:{{identity}}"
        self._records = f"{own}:keys"
        self._ids = f"{own}:ids"
        self._revoked = f"{own}:revoked"
        self._used = f"{own}:used"
        self._keys_of = f"{own}:keys-of"
        self._before = f"{namespace}:keys"

    async def find(self, hashed: str) -> KeyRecord | None:
        """The record of the key with this hash, revoked ones included."""
        async with self._redis.pipeline(transaction=True) as both:
            both.hget(self._records, hashed)
            both.hget(self._revoked, hashed)
            stored, revoked = await both.execute()
        return KeyRecord.of_stored(stored, revoked=_number(revoked)) if stored else None

    async def is_of_before(self, hashed: str) -> bool:
        """Whether a Penstock made it that had no tenants' records: it is not taken any more."""
        return bool(await self._redis.hexists(self._before, hashed))

    async def find_id(self, id: str) -> KeyRecord | None:
        """The record of the latest key with this id, revoked ones included."""
        hashes = await self._hashes(id)
        return await self.find(hashes[0]) if hashes else None

    async def list(self) -> list[KeyRecord]:
        """All keys, also those that hold no more, oldest first; of a replaced one the latest."""
        return [*await self._listed([str(id) for id in await self._redis.hkeys(self._ids)])]

    async def list_of(self, tenant: str | None) -> Sequence[KeyRecord]:
        """The same of one tenant's, or of administrators': nobody else's are read."""
        return await self._listed([str(id) for id in await self._redis.hkeys(self._of(tenant))])

    async def _listed(self, ids: Sequence[str]) -> Sequence[KeyRecord]:
        found = [
            record
            for first in range(0, len(ids), _AT_ONCE)  # between them others are served
            for record in await self._some(ids[first : first + _AT_ONCE])
        ]
        return sorted(found, key=lambda record: (record.created, record.id))

    async def _some(self, ids: Sequence[str]) -> Sequence[KeyRecord]:
        async with self._redis.pipeline(transaction=True) as both:
            both.hmget(self._ids, [*ids])
            both.hmget(self._used, [*ids])
            texts, used = await both.execute()
        held = {id: hashes.split() for id, hashes in zip(ids, texts, strict=True) if hashes}
        hashes = [one for of in held.values() for one in of]
        if not hashes:
            return []
        async with self._redis.pipeline(transaction=True) as both:
            both.hmget(self._records, hashes)
            both.hmget(self._revoked, hashes)
            of_them = [
                {one: value for one, value in zip(hashes, values, strict=True) if value is not None}
                for values in await both.execute()
            ]
        listed = []
        for id, last in zip(ids, used, strict=True):
            if id not in held:  # it was forgotten meanwhile
                continue
            try:
                record = _listed(held[id], *of_them)
            except (KeyError, ValidationError):  # another version's, or forgotten meanwhile
                log.warning("the record of %s cannot be read", id)
                continue
            listed.append(record.model_copy(update={"used": _number(last)}))
        return listed

    async def revoked_of(self, hashes: Sequence[str]) -> set[str]:
        """Those of the keys with these hashes that are revoked."""
        found: set[str] = set()
        for first in range(0, len(hashes), _ASKED_AT_ONCE):  # nobody waits for the answer to all
            some = hashes[first : first + _ASKED_AT_ONCE]
            times = await self._redis.hmget(self._revoked, list(some))
            found |= {hashed for hashed, at in zip(some, times, strict=True) if at is not None}
        return found

    def _of(self, tenant: str | None) -> str:
        return f"{self._keys_of}:{tenant or ''}"

    async def _hashes(self, id: str) -> Sequence[str]:
        """Of the keys with this id, the latest first."""
        hashes = await self._redis.hget(self._ids, id) if KEY.fits(id) else None
        return str(hashes).split() if hashes else []

    async def _stored_of(self, id: str) -> tuple[Sequence[str], dict[str, str]]:
        """The hashes, and their records."""
        hashes = await self._hashes(id)
        stored = await self._redis.hmget(self._records, hashes) if hashes else []
        return hashes, {h: str(one) for h, one in zip(hashes, stored, strict=True) if one}


def _listed(
    hashes: Sequence[str], stored: Mapping[str, str], revoked: Mapping[str, str]
) -> KeyRecord:
    """The latest of the keys with one id, and until when those before it hold."""
    latest, *old = hashes
    ends = [KeyRecord.of_stored(stored[one]).expires or 0 for one in old if one in stored]
    until = max((end for end in ends if end > time.time()), default=None)
    return KeyRecord.of_stored(
        stored[latest], revoked=_number(revoked.get(latest)), old_until=until
    )


def _number(text: str | None) -> int | None:
    return int(text) if text else None
