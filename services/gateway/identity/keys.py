"""API keys in Redis. Only their hashes are stored.

    {ns}:{identity}:keys      hash   SHA-256 of the key (hex) → the record as JSON
    {ns}:{identity}:ids       hash   key id → SHA-256 of the key; of those before it, behind spaces
    {ns}:{identity}:revoked   hash   SHA-256 of the key → Unix time of its revocation
    {ns}:{identity}:used      hash   key id → Unix time of its last use, a minute late (last_use.py)

SHA-256 without salt or stretching is enough here: a key is 256 random bits, so there is nothing to
guess from its hash. Looking the hash up instead of comparing keys also leaves no timing to measure.

Two kinds: a tenant's ("psk-…"), and an administrator's ("psa-…"), of no tenant and for the admin
listener alone.
"""

import asyncio
import hashlib
import logging
import re
import secrets
import string
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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
from services.gateway.identity.limits import Limit, Limits
from services.gateway.identity.news import channel
from services.gateway.identity.principal import Permission, Role
from services.gateway.identity.tenants import ModelNames, Priority, Said, TenantName, Weight
from services.gateway.ids import KEY

log = logging.getLogger(__name__)

_ALPHABET = string.ascii_letters + string.digits
_LENGTH = 43  # base 62: 256 bits
KEY_PATTERN = re.compile(rf"psk-[A-Za-z0-9]{{{_LENGTH}}}", re.ASCII)
ADMIN_KEY_PATTERN = re.compile(rf"psa-[A-Za-z0-9]{{{_LENGTH}}}", re.ASCII)

_AT_ONCE = 100  # records that are read in one turn of the loop
_OF_TENANTS = (Role.MEMBER, Role.READ_ONLY)
_OF_ADMINISTRATORS = (Role.ADMIN, Role.OPERATOR, Role.READ_ONLY)
_KEPT_APART = {"revoked", "used", "old_until"}  # not in the record as it is stored


class KeyRecord(BaseModel):
    """What a key stands for. The key itself is not in here and cannot be had again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    tenant: TenantName | None = Field(None, description="None: an administrator's")
    name: Said = Field("", max_length=100, description="for people")
    role: Role = Role.MEMBER
    scopes: tuple[Permission, ...] | None = Field(
        None,
        max_length=len(Permission),
        description="of the role's permissions those alone; None: all",
    )
    priority: Priority | None = Field(None, description="None: its tenant's")
    weight: Weight | None = Field(None, description="None: its tenant's")
    models: ModelNames | None = Field(None, description="of its tenant's; None: all of those")
    limits: Limits = Field((), description="of this key, besides its tenant's")
    created: int = Field(description="Unix seconds")
    expires: int | None = Field(None, description="Unix seconds; None: never")
    replaced: int | None = Field(None, description="Unix seconds; by a new one of the same id")
    revoked: int | None = Field(None, description="Unix seconds")
    used: int | None = Field(None, description="Unix seconds; None: not that it is known")
    old_until: int | None = Field(None, description="the key before it holds as long")

    @model_validator(mode="after")
    def _has_a_role_of_its_kind(self) -> "KeyRecord":
        fitting = _OF_TENANTS if self.tenant is not None else _OF_ADMINISTRATORS
        if self.role not in fitting:
            whose = "a tenant's key" if self.tenant is not None else "an administrator's key"
            raise ValueError(f"role: {whose} is {' or '.join(fitting)}, not {self.role}")
        return self

    @property
    def holds(self) -> bool:
        """Whether it lets anybody in now."""
        return self.revoked is None and not self.expired

    @property
    def expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


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
        return _record(stored, revoked=_number(revoked)) if stored else None

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
        if not hashes:
            return set()
        times = await self._redis.hmget(self._revoked, list(hashes))
        return {hashed for hashed, at in zip(hashes, times, strict=True) if at is not None}

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
        key, hashed = _new_key(record)
        changes = [
            Change(self._records, hashed, None, _stored(record)),
            Change(self._ids, record.id, None, hashed),
        ]
        await self._audit.change(Act(by, "key.create", record.id, None, _told(record)), changes)
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
            latest = _record(stored[hashes[0]])
            record = KeyRecord.model_validate({**latest.model_dump(), **fields(latest)})
            changes = [Change(self._ids, id, " ".join(hashes), " ".join(hashes))]
            for hashed, before in stored.items():
                its = {name: getattr(_record(before), name) for name in ("expires", "replaced")}
                own = {} if hashed == hashes[0] else its
                after = _stored(record.model_copy(update=own))
                changes.append(Change(self._records, hashed, before, after))
            act = Act(by, action, id, *differing(_told(latest), _told(record)))
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
            key, hashed = _new_key(record)
            ends = int(time.time()) + overlap_s
            left, changes = [hashed], [Change(self._records, hashed, None, _stored(record))]
            for one, before in stored.items():
                old = _ending(_record(before), ends)
                if one == latest or not _record(before).expired:
                    left.append(one)
                after = _stored(old) if one in left else None
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
            held = [one for one in hashes if one not in await self.revoked_of(hashes)]
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


def _new_key(record: KeyRecord) -> tuple[str, str]:
    """Its text and its hash."""
    prefix = "psa-" if record.tenant is None else "psk-"
    key = prefix + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))
    return key, key_hash(key)


def _ending(record: KeyRecord, at: int) -> KeyRecord:
    """One that is replaced: at that time, if not before."""
    replaced = record.replaced or int(time.time())
    ends = at if record.expires is None else min(record.expires, at)
    return record.model_copy(update={"expires": ends, "replaced": replaced})


def _stored(record: KeyRecord) -> str:
    return record.model_dump_json(exclude_none=True, exclude=_KEPT_APART)


def _record(stored: str, **apart: int | None) -> KeyRecord:
    record = KeyRecord.model_validate_json(stored)
    return record.model_copy(update=apart) if any(apart.values()) else record


def _listed(
    hashes: Sequence[str], stored: Mapping[str, str], revoked: Mapping[str, str]
) -> KeyRecord:
    """The latest of the keys with one id, and until when those before it hold."""
    latest, *old = hashes
    ends = [_record(stored[one]).expires or 0 for one in old if one in stored]
    until = max((end for end in ends if end > time.time()), default=None)
    return _record(stored[latest], revoked=_number(revoked.get(latest)), old_until=until)


def _told(record: KeyRecord) -> dict[str, Any]:
    return record.model_dump(mode="json", exclude_none=True, exclude=_KEPT_APART | {"id"})


def _number(text: str | None) -> int | None:
    return int(text) if text else None
