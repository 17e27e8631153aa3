"""API keys in Redis. Only their hashes are stored.

    {ns}:{identity}:keys      hash   SHA-256 of the key (hex) → the record as JSON
    {ns}:{identity}:ids       hash   key id → SHA-256 of the key; of those before it, behind spaces
    {ns}:{identity}:revoked   hash   SHA-256 of the key → Unix time of its revocation
    {ns}:{identity}:used      hash   key id → Unix time of its last use, a minute late (last_use.py)

SHA-256 without salt or stretching is enough here: a key is 256 random bits, so there is nothing to
guess from its hash. Looking the hash up instead of comparing keys also leaves no timing to measure.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from services.common.redis import Redis
from services.gateway.identity.audit import (
    DIRECT,
    Act,
    Actor,
    AuditLog,
    Change,
    differing,
    until_first,
)
from services.gateway.identity.key_record import KeyRecord, new_key
from services.gateway.identity.limits import Limit
from services.gateway.identity.news import channel
from services.gateway.identity.principal import Permission, Role
from services.gateway.identity.tenants import Priority
from services.gateway.ids import KEY

log = logging.getLogger(__name__)

_AT_ONCE = 100  # records that are read in one turn of the loop
_ASKED_AT_ONCE = 1000  # of hashes: 64 kB


class KeyStore:
    """All changes of keys, each with its line in the audit log, told to all gateways (news.py).

    Methods raise `RedisAway` when Redis is away. Those that change a key are given its id, and
    return None (False) where there is none.
    """

    def __init__(self, redis: Redis, namespace: str, audit: AuditLog | None = None) -> None:
        self._redis = redis
        self.namespace = namespace
        self._audit = audit or AuditLog(redis, namespace)
        self._records = f"{namespace}:{{identity}}:keys"
        self._ids = f"{namespace}:{{identity}}:ids"
        self._revoked = f"{namespace}:{{identity}}:revoked"
        self._used = f"{namespace}:{{identity}}:used"
        self._before = f"{namespace}:keys"
        self._news = channel(namespace)

    # ---- looking ----------------------------------------------------------------------------

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
        """All keys ever made, oldest first; of a replaced one the latest."""
        async with self._redis.pipeline(transaction=True) as all_of_it:
            for name in (self._records, self._ids, self._revoked, self._used):
                all_of_it.hgetall(name)
            stored, ids, revoked, used = await all_of_it.execute()
        listed = []
        for number, (id, hashes) in enumerate(ids.items()):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # a gateway that lists very many has requests to serve
            try:
                record = _listed(hashes.split(), stored, revoked)
            except (KeyError, ValidationError):  # another version's
                log.warning("the record of %s cannot be read", id)
                continue
            listed.append(record.model_copy(update={"used": _number(used.get(id))}))
        return sorted(listed, key=lambda record: (record.created, record.id))

    async def revoked_of(self, hashes: Sequence[str]) -> set[str]:
        """Those of the keys with these hashes that are revoked."""
        found: set[str] = set()
        for first in range(0, len(hashes), _ASKED_AT_ONCE):  # nobody waits for the answer to all
            some = hashes[first : first + _ASKED_AT_ONCE]
            times = await self._redis.hmget(self._revoked, list(some))
            found |= {hashed for hashed, at in zip(some, times, strict=True) if at is not None}
        return found

    # ---- changing ---------------------------------------------------------------------------

    async def create(
        self,
        tenant: str | None,
        name: str = "",
        *,
        role: Role = Role.MEMBER,
        scopes: Sequence[Permission] | None = None,
        priority: Priority | None = None,
        weight: float | None = None,
        models: Sequence[str] | None = None,
        limits: Sequence[Limit] = (),
        expires_in_s: int | None = None,
        by: Actor = DIRECT,
    ) -> tuple[str, KeyRecord]:
        """Makes a key: the only time that it is seen. Raises ValueError for a bad field."""
        now = int(time.time())
        record = KeyRecord(
            id=KEY.new(),
            tenant=tenant,
            name=name,
            role=role,
            scopes=None if scopes is None else tuple(scopes),
            priority=priority,
            weight=weight,
            models=None if models is None else tuple(models),
            limits=tuple(limits),
            created=now,
            expires=None if expires_in_s is None else now + expires_in_s,
        )
        key, hashed = new_key(record)
        changes = [
            Change(self._records, hashed, None, record.as_stored()),
            Change(self._ids, record.id, None, hashed),
        ]
        await self._audit.change(Act(by, "key.create", record.id, None, record.as_told()), changes)
        return key, record

    async def change(
        self,
        id: str,
        action: str,
        fields: Callable[[KeyRecord], Mapping[str, Any]],
        by: Actor = DIRECT,
    ) -> KeyRecord | None:
        """Other `fields` for the key with this id, and those before it that still hold. `action`:
        for the audit log. Raises ValueError for a bad field."""

        async def attempt() -> KeyRecord | None:
            hashes, stored = await self._stored_of(id)
            if not hashes:
                return None
            latest = KeyRecord.of_stored(stored[hashes[0]])
            record = KeyRecord.model_validate({**latest.model_dump(), **fields(latest)})
            changes = [Change(self._ids, id, " ".join(hashes), " ".join(hashes))]
            for hashed, before in stored.items():
                its = {
                    name: getattr(KeyRecord.of_stored(before), name)
                    for name in ("expires", "replaced")
                }
                own = {} if hashed == hashes[0] else its
                after = record.model_copy(update=own).as_stored()
                changes.append(Change(self._records, hashed, before, after))
            act = Act(by, action, id, *differing(latest.as_told(), record.as_told()))
            await self._audit.change(act, changes, self._news, [f"key {one}" for one in stored])
            return record

        return await until_first(attempt)

    async def rotate(
        self,
        id: str,
        overlap_s: int,
        by: Actor = DIRECT,
        allow: Callable[[KeyRecord], None] = lambda _: None,
    ) -> tuple[str, KeyRecord] | None:
        """A new key with the same id and grants; those before it hold for `overlap_s` at most.
        `allow` is asked of the record that the new one is to have; what it raises ends it. Raises
        ValueError where the latest holds no more."""

        async def attempt() -> tuple[str, KeyRecord] | None:
            hashes, stored = await self._stored_of(id)
            if not hashes:
                return None
            latest = hashes[0]
            record = await self.find(latest)
            if record is None or not record.holds:
                raise ValueError(f"{id} holds no more: make a new key")
            allow(record)
            key, hashed = new_key(record)
            ends = int(time.time()) + overlap_s
            left, changes = [hashed], [Change(self._records, hashed, None, record.as_stored())]
            for one, before in stored.items():
                old = KeyRecord.of_stored(before).ending(ends)
                if one == latest or not KeyRecord.of_stored(before).expired:
                    left.append(one)
                after = old.as_stored() if one in left else None
                changes.append(Change(self._records, one, before, after))
            changes.append(Change(self._ids, id, " ".join(hashes), " ".join(left)))
            changes.append(Change(self._revoked, latest, None, None))
            act = Act(by, "key.rotate", id, None, {"old_until": ends})
            await self._audit.change(act, changes, self._news, [f"key {one}" for one in stored])
            return key, record

        return await until_first(attempt)

    async def revoke(self, id: str, by: Actor = DIRECT) -> bool:
        """Makes the key worthless, and those before it; all gateways are told so.

        Revoking twice keeps the first time, and tells again.
        """

        async def attempt() -> bool:
            hashes, _ = await self._stored_of(id)
            if not hashes:
                return False
            news = [f"revoked {hashed}" for hashed in hashes]
            ended = await self.revoked_of(hashes)
            held = [one for one in hashes if one not in ended]
            if held:
                now = int(time.time())
                changes = [Change(self._ids, id, " ".join(hashes), " ".join(hashes))]
                changes += [Change(self._revoked, one, None, str(now)) for one in held]
                act = Act(by, "key.revoke", id, None, {"revoked": now})
                await self._audit.change(act, changes, self._news, news)
            else:
                for message in news:
                    await self._redis.publish(self._news, message)
            return True

        return await until_first(attempt)

    async def note_uses(self, uses: dict[str, int]) -> None:
        """When the keys with these ids were last used, Unix seconds."""
        mapping: dict[Any, Any] = {**uses}
        await self._redis.hset(self._used, mapping=mapping)

    # ---- inside -----------------------------------------------------------------------------

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
