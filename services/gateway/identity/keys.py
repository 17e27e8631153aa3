"""API keys in Redis. Only their hashes are stored.

    {ns}:keys           hash   SHA-256 of the key (hex) → the record as JSON
    {ns}:keys:ids       hash   key id → SHA-256 of the key
    {ns}:keys:revoked   hash   SHA-256 of the key → Unix time of its revocation

SHA-256 without salt or stretching is enough here: a key is 256 random bits, so there is nothing to
guess from its hash. Looking the hash up instead of comparing keys also leaves no timing to measure.
"""

import hashlib
import re
import secrets
import string
import time
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from services.common.redis import Redis
from services.gateway.identity.limits import Limit, Limits
from services.gateway.identity.news import channel
from services.gateway.identity.tenants import Priority, TenantName, Weight
from services.gateway.ids import KEY

_ALPHABET = string.ascii_letters + string.digits
_LENGTH = 43  # base 62: 256 bits
KEY_PATTERN = re.compile(rf"psk-[A-Za-z0-9]{{{_LENGTH}}}", re.ASCII)


class KeyRecord(BaseModel):
    """What a key stands for. The key itself is not in here and cannot be had again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    tenant: TenantName
    name: str = Field("", max_length=100, description="for people")
    priority: Priority | None = Field(None, description="None: its tenant's")
    weight: Weight | None = Field(None, description="None: its tenant's")
    models: list[str] | None = Field(None, description="of its tenant's; None: all of those")
    limits: Limits = Field((), description="of this key, besides its tenant's")
    created: int = Field(description="Unix seconds")
    expires: int | None = Field(None, description="Unix seconds; None: never")
    revoked: int | None = Field(None, description="Unix seconds")

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
    """Creates, lists, finds and revokes keys. Methods raise `RedisAway` when Redis is away."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self.namespace = namespace
        self._records = f"{namespace}:keys"
        self._ids = f"{namespace}:keys:ids"
        self._revoked = f"{namespace}:keys:revoked"
        self._news = channel(namespace)

    async def create(
        self,
        tenant: str,
        name: str = "",
        *,
        priority: Priority | None = None,
        weight: float | None = None,
        models: list[str] | None = None,
        limits: Sequence[Limit] = (),
        expires_in_s: int | None = None,
    ) -> tuple[str, KeyRecord]:
        """Makes a key: the only time that it is seen. Raises ValueError for a bad field."""
        now = int(time.time())
        key = "psk-" + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))
        record = KeyRecord(
            id=KEY.new(),
            tenant=tenant,
            name=name,
            priority=priority,
            weight=weight,
            models=models,
            limits=tuple(limits),
            created=now,
            expires=None if expires_in_s is None else now + expires_in_s,
        )
        hashed = key_hash(key)
        async with self._redis.pipeline(transaction=True) as both:
            both.hset(self._records, hashed, record.model_dump_json(exclude_none=True))
            both.hset(self._ids, record.id, hashed)
            await both.execute()
        return key, record

    async def find(self, hashed: str) -> KeyRecord | None:
        """The record of the key with this hash, revoked ones included."""
        async with self._redis.pipeline(transaction=True) as both:
            both.hget(self._records, hashed)
            both.hget(self._revoked, hashed)
            stored, revoked = await both.execute()
        return _record(stored, revoked) if stored else None

    async def list(self) -> list[KeyRecord]:
        """All keys ever made, oldest first."""
        async with self._redis.pipeline(transaction=True) as both:
            both.hgetall(self._records)
            both.hgetall(self._revoked)
            stored, revoked = await both.execute()
        records = [_record(record, revoked.get(hashed)) for hashed, record in stored.items()]
        return sorted(records, key=lambda record: (record.created, record.id))

    async def find_id(self, id: str) -> KeyRecord | None:
        """The record of the key with this id, revoked ones included."""
        hashed = await self._redis.hget(self._ids, id) if KEY.fits(id) else None
        return await self.find(str(hashed)) if hashed else None

    async def revoke(self, id: str) -> bool:
        """Makes the key worthless, and tells all gateways so (news.py).

        False when there is no such key; revoking twice keeps the first time, and tells again.
        """
        hashed = await self._redis.hget(self._ids, id) if KEY.fits(id) else None
        if hashed is None:
            return False
        async with self._redis.pipeline(transaction=True) as both:
            both.hsetnx(self._revoked, hashed, str(int(time.time())))
            both.publish(self._news, f"revoked {hashed!s}")
            await both.execute()
        return True

    async def revoked_of(self, hashes: Sequence[str]) -> set[str]:
        """Those of the keys with these hashes that are revoked."""
        if not hashes:
            return set()
        times = await self._redis.hmget(self._revoked, list(hashes))
        return {hashed for hashed, at in zip(hashes, times, strict=True) if at is not None}


def _record(stored: str, revoked: str | None) -> KeyRecord:
    record = KeyRecord.model_validate_json(stored)
    return record.model_copy(update={"revoked": int(revoked)}) if revoked else record
