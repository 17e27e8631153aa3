"""API keys: how they are made, changed, replaced and ended."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc

from services.common.errors import PenstockError
from services.common.redis import Redis
from services.gateway.identity.audit import (
    DIRECT,
    Act,
    Actor,
    AuditLog,
    Change,
    Conflict,
    Full,
    differing,
    until_first,
)
from services.gateway.identity.key_record import KeyRecord, new_key
from services.gateway.identity.limits import Limit
from services.gateway.identity.news import channel
from services.gateway.identity.principal import Permission, Role
from services.gateway.identity.stored_keys import StoredKeys
from services.gateway.identity.tenants import Priority
from services.gateway.ids import KEY

_MOST_TEXTS = 10  # of one key that hold, side by side


class KeyStore(StoredKeys):
    """All changes of keys, each with its line in the audit log, told to all gateways (news.py).

    Methods raise `RedisAway` when Redis is away. Those that change a key are given its id, and
    return None (False) where there is none.
    """

    def __init__(
        self, redis: Redis, namespace: str, audit: AuditLog | None = None, most: int = 1000
    ) -> None:
        """`most`: keys of one tenant, and of administrators."""
        super().__init__(redis, namespace)
        self._audit = audit or AuditLog(redis, namespace)
        self._most = most
        self._news = channel(namespace)

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
        """Makes a key: the only time that it is seen. Where there are as many as may be, the one
        that ended first makes room. Raises ValueError for a bad field, RESOURCE_EXHAUSTED
        ("too_many_keys") where all of them hold."""
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
            Change(self._of(tenant), record.id, None, str(now), self._most),
        ]
        act = Act(by, "key.create", record.id, None, record.as_told())
        while True:
            try:
                await self._audit.change(act, changes)
                return key, record
            except Full:
                await self._make_room(tenant, by)

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
            ending = {one: KeyRecord.of_stored(of).ending(ends) for one, of in stored.items()}
            if sum(old.holds for old in ending.values()) >= _MOST_TEXTS:
                raise ValueError(f"{id} has {_MOST_TEXTS} texts that hold: give a shorter overlap")
            for one, before in stored.items():
                old = ending[one]
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

    async def _make_room(self, tenant: str | None, by: Actor) -> None:
        """Forgets the tenant's key that ended before all others. Raises RESOURCE_EXHAUSTED."""
        ended = [one for one in await self.list_of(tenant) if not one.holds]
        if not ended:
            raise _too_many(tenant, self._most)
        id = min(ended, key=lambda one: one.ended).id
        hashes, stored = await self._stored_of(id)
        with suppress(Conflict):  # another makes room
            await self._audit.change(
                Act(by, "key.forget", id),
                [
                    await self._gone(self._of(tenant), id),
                    await self._gone(self._ids, id),
                    await self._gone(self._used, id),
                    *(Change(self._records, one, before, None) for one, before in stored.items()),
                    *[await self._gone(self._revoked, one) for one in hashes],
                ],
                self._news,
                [f"revoked {one}" for one in hashes],  # who trusts it still, trusts it no more
            )

    async def _gone(self, hash: str, field: str) -> Change:
        before = await self._redis.hget(hash, field)
        return Change(hash, field, None if before is None else str(before), None)


def _too_many(tenant: str | None, most: int) -> PenstockError:
    whose = "A tenant" if tenant is not None else "Administrators"
    return PenstockError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{whose} may have {most} API keys that hold; revoke some first.",
        stage="gateway",
        param="tenant" if tenant is not None else "admin",
        reason="too_many_keys",
    )
