"""Tenants in Redis: what all of one's callers share.

{ns}:tenants   hash   name → the record as JSON
"""

import time
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.common.redis import Redis
from services.gateway.identity.limits import Limits
from services.gateway.identity.news import channel

Priority = Literal["high", "normal", "low"]
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", strict=True)]
Weight = Annotated[float, Field(gt=0, le=1000)]


class TenantRecord(BaseModel):
    """What a tenant is granted. One without a record has all of these as they are here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: TenantName = Field(description="owns data and caches")
    note: str = Field("", max_length=200, description="for people")
    models: tuple[str, ...] | None = Field(None, description="that it may use; None: all")
    priority: Priority = Field("normal", description="of those that have none of their own")
    weight: Weight = Field(1.0, description="share in weighted fair admission, likewise")
    limits: Limits = Field((), description="of all its callers together")
    user_limits: Limits = Field((), description="of each of its keys and users by itself")
    suspended: int | None = Field(None, description="Unix seconds; nobody of it is let in since")
    created: int = Field(0, description="Unix seconds")


class TenantStore:
    """Raises `RedisAway` when Redis is away."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self._records = f"{namespace}:tenants"
        self._news = channel(namespace)

    async def find(self, name: str) -> TenantRecord | None:
        stored = await self._redis.hget(self._records, name)
        return TenantRecord.model_validate_json(stored) if stored else None

    async def list(self) -> list[TenantRecord]:
        """By name."""
        stored = await self._redis.hgetall(self._records)
        return [TenantRecord.model_validate_json(stored[name]) for name in sorted(stored)]

    async def add(self, name: str) -> bool:
        """Makes the record of a new tenant; False where there is one. Raises ValueError."""
        record = TenantRecord(name=name, created=int(time.time()))
        return bool(await self._redis.hsetnx(self._records, name, _stored(record)))

    async def put(self, record: TenantRecord) -> None:
        """In place of the one of its name; all gateways are told."""
        async with self._redis.pipeline(transaction=True) as both:
            both.hset(self._records, record.name, _stored(record))
            both.publish(self._news, f"tenant {record.name}")
            await both.execute()


def _stored(record: TenantRecord) -> str:
    return record.model_dump_json(exclude_none=True)
