"""Tokens of the OIDC issuer that hold no more, though they have not expired.

    {ns}:{identity}:revoked-tokens   hash   whose, "user" or "token", which → the record as JSON

One is kept until all that it ends have expired: none is taken that holds for longer than
`oidc_longest_s`. News of it are that its tenant has changed: its callers are verified anew, and
each look asks here.
"""

import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.common.config import IdentitySettings
from services.common.redis import Redis
from services.gateway.faults import spelt
from services.gateway.identity.audit import (
    DIRECT,
    Act,
    Actor,
    AuditLog,
    Change,
    until_first,
)
from services.gateway.identity.news import channel
from services.gateway.identity.tenants import Said, TenantName

_TIDIED = 1000  # expired ones that go with one more
UserName = Annotated[
    str, spelt(r"^oidc:([A-Za-z0-9_.@|+-]{1,128}|#[0-9a-f]{32})$", "a user's name, oidc:…")
]


class RevokedTokens(BaseModel):
    """All of a user's that were issued before, or one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: TenantName | None = Field(None, description="None: an administrator's")
    user: UserName | None = Field(None, description="as records and usage name him")
    token: Annotated[Said, Field(min_length=1, max_length=256)] | None = Field(
        None, description="its `jti`"
    )
    revoked: int = Field(description="Unix seconds")
    until: int = Field(description="Unix seconds; all of them have expired then")

    @model_validator(mode="after")
    def _says_which(self) -> "RevokedTokens":
        if (self.user is None) == (self.token is None):
            raise ValueError("give a user or a token, and not both")
        return self

    @property
    def name(self) -> str:
        """Of its field in Redis."""
        what, which = ("user", self.user) if self.user is not None else ("token", self.token)
        return _name(self.tenant, what, str(which))


class TokenRevocations:
    """Raises `RedisAway` when Redis is away."""

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        settings: IdentitySettings,
        audit: AuditLog | None = None,
    ) -> None:
        self._redis = redis
        self._audit = audit or AuditLog(redis, namespace)
        self._settings = settings
        self._records = f"{namespace}:{{identity}}:revoked-tokens"
        self._news = channel(namespace)

    async def list(self) -> list[RevokedTokens]:
        """Those that still end something, the latest first."""
        stored = await self._redis.hgetall(self._records)
        found = [RevokedTokens.model_validate_json(one) for one in stored.values()]
        held = [one for one in found if one.until > time.time()]
        return sorted(held, key=lambda one: (-one.revoked, one.name))

    async def revoke(
        self,
        tenant: str | None,
        user: str | None = None,
        token: str | None = None,
        by: Actor = DIRECT,
    ) -> RevokedTokens:
        """Of a user all tokens that were issued until now, or one by its `jti`; all gateways are
        told. Whether there is such a one only the issuer knows. Raises ValueError for a bad field.
        """
        now = int(time.time())
        until = now + int(self._settings.oidc_longest_s + 2 * self._settings.oidc_skew_s) + 1
        record = RevokedTokens(tenant=tenant, user=user, token=token, revoked=now, until=until)
        told = record.model_dump(mode="json", exclude_none=True)
        act = Act(by, "token.revoke", user or f"token:{token}", None, told)

        async def attempt() -> RevokedTokens:
            found = await self._redis.hgetall(self._records)
            stored = {str(name): str(one) for name, one in found.items()}
            before, after = stored.pop(record.name, None), record.model_dump_json(exclude_none=True)
            changes = [Change(self._records, record.name, before, after)]
            for name, one in stored.items():
                if len(changes) <= _TIDIED and RevokedTokens.model_validate_json(one).until <= now:
                    changes.append(Change(self._records, name, one, None))
            await self._audit.change(act, changes, self._news, [f"tenant {tenant or ''}"])
            return record

        return await until_first(attempt)

    async def hold(self, tenant: str | None, user: str, claims: Mapping[str, Any]) -> bool:
        """Whether a token with these claims, `iat` among them, is revoked."""
        names = [_name(tenant, "user", user)]
        if claims.get("jti"):
            names.append(_name(tenant, "token", str(claims["jti"])))
        of_user, *of_token = await self._redis.hmget(self._records, names)
        if any(of_token):
            return True
        if of_user is None:
            return False
        # The issuer's clock may be ahead of ours.
        until = RevokedTokens.model_validate_json(of_user).revoked + self._settings.oidc_skew_s
        return bool(claims["iat"] <= until)


def _name(tenant: str | None, what: str, which: str) -> str:
    return f"{tenant or ''} {what} {which}"
