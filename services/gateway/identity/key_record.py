"""What a key stands for, and the key itself, which is seen once.

Two kinds: a tenant's ("psk-…"), and an administrator's ("psa-…"), of no tenant and for the admin
listener alone.
"""

import hashlib
import re
import secrets
import string
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from services.gateway.identity.limits import Limits
from services.gateway.identity.principal import Permission, Role
from services.gateway.identity.tenants import ModelNames, Priority, Said, TenantName, Weight

_ALPHABET = string.ascii_letters + string.digits
_LENGTH = 43  # base 62: 256 bits
KEY_PATTERN = re.compile(rf"psk-[A-Za-z0-9]{{{_LENGTH}}}", re.ASCII)
ADMIN_KEY_PATTERN = re.compile(rf"psa-[A-Za-z0-9]{{{_LENGTH}}}", re.ASCII)

_OF_TENANTS = (Role.MEMBER, Role.READ_ONLY)
_OF_ADMINISTRATORS = (Role.ADMIN, Role.OPERATOR, Role.READ_ONLY)
_KEPT_APART = {"revoked", "used", "old_until"}  # not in the record as it is stored


class KeyRecord(BaseModel):
    """What a key stands for. The key itself is not in here and cannot be had again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    tenant: TenantName | None = Field(None, description="None: an administrator's")
    name: Said = Field("", max_length=100, description="for people")
    role: Role = Field(Role.MEMBER, validate_default=True)
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

    @field_validator("role")
    @classmethod
    def _is_of_its_kind(cls, role: Role, others: ValidationInfo) -> Role:
        of_tenant = others.data.get("tenant") is not None
        fitting = _OF_TENANTS if of_tenant else _OF_ADMINISTRATORS
        if role not in fitting and "tenant" in others.data:
            whose = "a tenant's key" if of_tenant else "an administrator's key"
            raise ValueError(f"{whose} is {' or '.join(fitting)}, not {role}")
        return role

    @property
    def holds(self) -> bool:
        """Whether it lets anybody in now."""
        return self.revoked is None and not self.expired

    @property
    def expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires

    @property
    def ended(self) -> int:
        """When one that holds no more ended, Unix seconds."""
        return min(at for at in (self.revoked, self.expires) if at is not None)

    @classmethod
    def of_stored(cls, stored: str, **apart: int | None) -> "KeyRecord":
        """With what is kept apart. Raises ValidationError."""
        record = cls.model_validate_json(stored)
        return record.model_copy(update=apart) if any(apart.values()) else record

    def as_stored(self) -> str:
        return self.model_dump_json(exclude_none=True, exclude=_KEPT_APART)

    def as_told(self) -> dict[str, Any]:
        """For the audit log."""
        return self.model_dump(mode="json", exclude_none=True, exclude=_KEPT_APART | {"id"})

    def ending(self, at: int) -> "KeyRecord":
        """As of one that is replaced: it ends at that time, if not before."""
        replaced = self.replaced or int(time.time())
        ends = at if self.expires is None else min(self.expires, at)
        return self.model_copy(update={"expires": ends, "replaced": replaced})


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def new_key(record: KeyRecord) -> tuple[str, str]:
    """A key for the record: its text and its hash."""
    prefix = "psa-" if record.tenant is None else "psk-"
    key = prefix + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))
    return key, key_hash(key)
