"""Who asks, and what he may: what every verifier makes of what a caller shows."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

import grpc

from protos import common_pb2
from services.common.errors import PenstockError
from services.gateway.identity.limits import Bound, Limits
from services.gateway.identity.tenants import Priority, TenantRecord

T = TypeVar("T")

_PRIORITIES = {
    "high": common_pb2.PRIORITY_HIGH,
    "normal": common_pb2.PRIORITY_NORMAL,
    "low": common_pb2.PRIORITY_LOW,
}


class Permission(StrEnum):
    """What can be granted; permissions.py says what needs it."""

    INFERENCE = "inference"
    MODELS_READ = "models:read"
    FILES_READ = "files:read"
    FILES_WRITE = "files:write"
    STORES_READ = "stores:read"
    STORES_SEARCH = "stores:search"
    STORES_WRITE = "stores:write"
    REQUESTS_READ = "requests:read"
    # Of administrators alone.
    TENANTS_READ = "tenants:read"
    TENANTS_WRITE = "tenants:write"
    KEYS_READ = "keys:read"
    KEYS_WRITE = "keys:write"
    ADMIN_KEYS_WRITE = "admin-keys:write"
    LIMITS_WRITE = "limits:write"
    AUDIT_READ = "audit:read"


class Role(StrEnum):
    READ_ONLY = "read-only"
    MEMBER = "member"
    OPERATOR = "operator"
    ADMIN = "admin"


_LOOKING = frozenset(
    {
        Permission.MODELS_READ,
        Permission.FILES_READ,
        Permission.STORES_READ,
        Permission.REQUESTS_READ,
    }
)
_USING = _LOOKING | {
    Permission.INFERENCE,
    Permission.FILES_WRITE,
    Permission.STORES_SEARCH,
    Permission.STORES_WRITE,
}
GRANTS: dict[Role, frozenset[Permission]] = {
    Role.READ_ONLY: _LOOKING,
    Role.MEMBER: _USING,
    Role.OPERATOR: _USING,
    Role.ADMIN: _USING,
}
"""In a tenant, at the public API: there an administrator is a member like others."""

_OVERSEEING = frozenset(
    {
        Permission.TENANTS_READ,
        Permission.KEYS_READ,
        Permission.MODELS_READ,
    }
)
_OPERATING = _OVERSEEING | {
    Permission.KEYS_WRITE,
    Permission.LIMITS_WRITE,
    Permission.AUDIT_READ,
}
ADMIN_GRANTS: dict[Role, frozenset[Permission]] = {
    Role.READ_ONLY: _OVERSEEING,
    Role.MEMBER: frozenset(),
    Role.OPERATOR: _OPERATING,
    Role.ADMIN: _OPERATING | {Permission.TENANTS_WRITE, Permission.ADMIN_KEYS_WRITE},
}
"""Of the whole installation, at the admin listener."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. All of it comes from what was verified, nothing from the request."""

    tenant: str
    user: str
    """Whoever it is in the tenant: an API key's id ("key_12ab…"), or "oidc:" and a token's subject.
    Fit for a Redis key."""
    roles: frozenset[Role] = frozenset()
    permissions: frozenset[Permission] = frozenset()
    models: frozenset[str] | None = None
    """None: all."""
    priority: Priority = "normal"
    weight: float = 1.0
    limits: tuple[Bound, ...] = field(default=(), repr=False)
    """All that bound it: its own, and its tenant's."""
    expires: float | None = None
    """Unix seconds; None: never."""
    token: str | None = None
    """The `jti` of the token that was shown, if it has one."""

    def caller(self, request_id: str) -> common_pb2.Caller:
        return common_pb2.Caller(
            request_id=request_id,
            tenant=self.tenant,
            priority=_PRIORITIES[self.priority],
            weight=self.weight,
        )

    @property
    def expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires

    def covers(self, model: str) -> bool:
        return self.models is None or model in self.models

    def authorize(self, model: str) -> None:
        """Raises PERMISSION_DENIED when `model` is not among those that it may use."""
        if not self.covers(model):
            raise _denied(
                f"this API key may not use the model '{model}'", "model_not_allowed", param="model"
            )

    def authorize_embedding(self, model: str) -> None:
        """The same of the model that vector stores are embedded and searched with."""
        if not self.covers(model):
            raise _denied(
                f"this API key may not use the model '{model}', which vector stores are embedded "
                "and searched with",
                "model_not_allowed",
            )

    def require(self, permission: Permission) -> None:
        """Raises PERMISSION_DENIED without it."""
        if permission not in self.permissions:
            raise _denied(f"this needs the permission '{permission}'", "permission_missing")


class Refused(Exception):
    """A verifier's no. `why` is for the metrics; "revoked" is for good."""

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why = why


class IssuerAway(Exception):
    """The issuer's keys cannot be had, so that no token can be told from a wrong one."""


def granted(
    tenant: TenantRecord,
    user: str,
    *,
    roles: Iterable[Role],
    scopes: Iterable[Permission] | None = None,
    models: Iterable[str] | None = None,
    priority: Priority | None = None,
    weight: float | None = None,
    limits: Limits = (),
    expires: float | None = None,
) -> Principal:
    """A caller of the tenant with what is his own, within what is the tenant's. `scopes`: of the
    roles' permissions those alone; None: all. Raises Refused where the tenant is suspended."""
    if tenant.suspended is not None:
        raise Refused("suspended", f"The tenant '{tenant.name}' is suspended.")
    held = _one(frozenset(roles))
    usable = [frozenset(of) for of in (tenant.models, models) if of is not None]
    own = f"user:{tenant.name}:{user}"
    return Principal(
        tenant=tenant.name,
        user=user,
        roles=held,
        permissions=permissions_of(held, scopes),
        models=_one(frozenset.intersection(*usable)) if usable else None,
        priority=priority or tenant.priority,
        weight=weight or tenant.weight,
        limits=(
            *(Bound(own, limit) for limit in limits),
            *(Bound(f"{own}:each", limit) for limit in tenant.user_limits),
            *tenant.bounds,
        ),
        expires=expires,
    )


def administrator(
    user: str,
    *,
    roles: Iterable[Role],
    scopes: Iterable[Permission] | None = None,
    expires: float | None = None,
) -> Principal:
    """One of no tenant, for the admin listener."""
    held = frozenset(roles)
    permissions = permissions_of(held, scopes, ADMIN_GRANTS)
    return Principal("", user, held, permissions, models=frozenset(), expires=expires)


def permissions_of(
    roles: Iterable[Role],
    scopes: Iterable[Permission] | None,
    grants: dict[Role, frozenset[Permission]] = GRANTS,
) -> frozenset[Permission]:
    """Of the roles; with scopes those of them alone."""
    held = frozenset[Permission]().union(*(grants[role] for role in roles))
    return _one(held if scopes is None else held & frozenset(scopes))


@lru_cache(maxsize=1000)
def _one(names: frozenset[T]) -> frozenset[T]:
    """Alike ones are one in memory: there are few, and many callers."""
    return names


def _denied(message: str, reason: str, param: str = "") -> PenstockError:
    return PenstockError(
        grpc.StatusCode.PERMISSION_DENIED, message, stage="gateway", param=param, reason=reason
    )
