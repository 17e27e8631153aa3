"""Tenants in Redis: what all of one's callers share.

{ns}:{identity}:tenants   hash   name → the record as JSON
"""

import re
import time
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

from services.common.redis import Redis
from services.gateway.faults import spelt
from services.gateway.identity.audit import (
    DIRECT,
    Act,
    Actor,
    AuditLog,
    Change,
    Conflict,
    differing,
    until_first,
)
from services.gateway.identity.limits import Bound, Limits
from services.gateway.identity.news import channel

Priority = Literal["high", "normal", "low"]
TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
TenantName = Annotated[
    str,
    Strict(),
    spelt(
        f"^{TENANT_NAME.pattern}$",
        "1 to 64 letters of ASCII, digits, underscores, points and hyphens",
    ),
]
Said = Annotated[
    str,
    spelt(
        r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*$",
        "one line without control characters",
    ),
]
"""For people: it is shown on terminals, so nothing in it commands one or turns its order round."""
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
MOST_MODELS = 1000
ModelNames = Annotated[tuple[ModelName, ...], Field(max_length=MOST_MODELS)]
Weight = Annotated[float, Field(gt=0, le=1000)]


class TenantRecord(BaseModel):
    """What a tenant is granted. One without a record has all of these as they are here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: TenantName = Field(description="owns data and caches")
    note: Said = Field("", max_length=200, description="for people")
    models: ModelNames | None = Field(None, description="that it may use; None: all")
    priority: Priority = Field("normal", description="of those that have none of their own")
    weight: Weight = Field(1.0, description="share in weighted fair admission, likewise")
    limits: Limits = Field((), description="of all its callers together")
    user_limits: Limits = Field((), description="of each of its keys and users by itself")
    suspended: int | None = Field(None, description="Unix seconds; nobody of it is let in since")
    created: int = Field(0, description="Unix seconds")

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """Its `limits`, for its callers to share."""
        return tuple(Bound(f"tenant:{self.name}", limit) for limit in self.limits)


@lru_cache(maxsize=1000)
def _of_stored(stored: str) -> TenantRecord:
    """The same for all who are of it: a tenant has many callers."""
    return TenantRecord.model_validate_json(stored)


class TenantStore:
    """Raises `RedisAway` when Redis is away."""

    def __init__(self, redis: Redis, namespace: str, audit: AuditLog | None = None) -> None:
        self._redis = redis
        self._audit = audit or AuditLog(redis, namespace)
        self._records = f"{namespace}:{{identity}}:tenants"
        self._news = channel(namespace)

    async def find(self, name: str) -> TenantRecord | None:
        stored = await self._redis.hget(self._records, name)
        return _of_stored(stored) if stored else None

    async def list(self) -> list[TenantRecord]:
        """By name."""
        stored = await self._redis.hgetall(self._records)
        return [_of_stored(stored[name]) for name in sorted(stored)]

    async def add(
        self, name: str, fields: Mapping[str, Any] = MappingProxyType({}), by: Actor = DIRECT
    ) -> TenantRecord | None:
        """Makes the record of a new tenant, all of it at once; None where there is one. Raises
        ValueError for a bad field."""
        record = TenantRecord.model_validate({**fields, "name": name, "created": int(time.time())})
        act = Act(by, "tenant.create", f"tenant:{name}", None, _told(record))
        try:
            await self._write(act, None, record)
        except Conflict:
            return None
        return record

    async def change(
        self,
        name: str,
        action: str,
        fields: Callable[[TenantRecord], Mapping[str, Any]],
        by: Actor = DIRECT,
    ) -> TenantRecord | None:
        """Other `fields` for it; None where there is no such tenant. `action`: for the audit log.
        Raises ValueError for a bad field."""

        async def attempt() -> TenantRecord | None:
            stored = await self._redis.hget(self._records, name)
            if stored is None:
                return None
            before = _of_stored(stored)
            record = TenantRecord.model_validate({**before.model_dump(), **fields(before)})
            act = Act(by, action, f"tenant:{name}", *differing(_told(before), _told(record)))
            await self._write(act, str(stored), record)
            return record

        return await until_first(attempt)

    async def _write(self, act: Act, before: str | None, record: TenantRecord) -> None:
        """All gateways are told. Raises Conflict."""
        after = record.model_dump_json(exclude_none=True)
        change = Change(self._records, record.name, before, after)
        await self._audit.change(act, [change], self._news, [f"tenant {record.name}"])


def _told(record: TenantRecord) -> dict[str, Any]:
    return record.model_dump(mode="json", exclude_none=True, exclude={"name", "created"})
