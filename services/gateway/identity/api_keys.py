"""Who shows an API key."""

from services.gateway.identity.auth import Refused
from services.gateway.identity.keys import KEY_PATTERN, KeyRecord, KeyStore, key_hash
from services.gateway.identity.principal import Principal, Role, granted
from services.gateway.identity.tenants import TenantRecord, TenantStore


class KeyVerifier:
    def __init__(self, keys: KeyStore, tenants: TenantStore) -> None:
        self._keys = keys
        self._tenants = tenants

    def takes(self, shown: str) -> bool:
        return KEY_PATTERN.fullmatch(shown) is not None

    async def verify(self, shown: str) -> Principal:
        record = await self._keys.find(key_hash(shown))
        if record is None:
            raise Refused("wrong", "Incorrect API key provided.")
        if record.revoked is not None:
            raise Refused("revoked", "Incorrect API key provided.")
        # A key may be older than tenants' records.
        tenant = await self._tenants.find(record.tenant) or TenantRecord(name=record.tenant)
        return _principal(record, tenant)


def _principal(record: KeyRecord, tenant: TenantRecord) -> Principal:
    return granted(
        tenant,
        record.id,
        roles=(Role.MEMBER,),
        models=record.models,
        priority=record.priority,
        weight=record.weight,
        limits=record.limits,
        expires=record.expires,
    )
