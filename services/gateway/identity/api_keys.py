"""Who shows an API key."""

from services.gateway.identity.key_record import ADMIN_KEY_PATTERN, KEY_PATTERN, KeyRecord, key_hash
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.principal import Principal, Refused, administrator, granted
from services.gateway.identity.tenants import TenantRecord, TenantStore


class KeyVerifier:
    def __init__(self, keys: KeyStore, tenants: TenantStore) -> None:
        self._keys = keys
        self._tenants = tenants

    def takes(self, shown: str) -> bool:
        return KEY_PATTERN.fullmatch(shown) is not None

    async def verify(self, shown: str) -> Principal:
        hashed = key_hash(shown)
        record = await self._keys.find(hashed)
        if record is None and await self._keys.is_of_before(hashed):
            raise Refused("of_before", "This API key is of an older Penstock; make a new one.")
        if record is None or record.tenant is None:
            raise Refused("wrong", "Incorrect API key provided.")
        if record.revoked is not None:
            raise Refused("revoked", "Incorrect API key provided.")
        # Keys may be made without a tenant's record.
        tenant = await self._tenants.find(record.tenant) or TenantRecord(name=record.tenant)
        return principal_of(record, tenant)


def principal_of(record: KeyRecord, tenant: TenantRecord) -> Principal:
    return granted(
        tenant,
        record.id,
        roles=(record.role,),
        scopes=record.scopes,
        models=record.models,
        priority=record.priority,
        weight=record.weight,
        limits=record.limits,
        expires=record.expires,
    )


class AdminKeyVerifier:
    """Of administrators' keys, which are none for the public door, and the other way round."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys

    def takes(self, shown: str) -> bool:
        return ADMIN_KEY_PATTERN.fullmatch(shown) is not None

    async def verify(self, shown: str) -> Principal:
        record = await self._keys.find(key_hash(shown))
        if record is None or record.tenant is not None:
            raise Refused("wrong", "Incorrect admin key provided.")
        if record.revoked is not None:
            raise Refused("revoked", "Incorrect admin key provided.")
        return administrator(
            record.id, roles=(record.role,), scopes=record.scopes, expires=record.expires
        )
