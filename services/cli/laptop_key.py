"""The key of the local tenant, which the commands here use."""

import socket
from pathlib import Path

from services.common.config import Settings
from services.common.redis import connect
from services.gateway.identity.audit import Actor
from services.gateway.identity.key_record import key_hash
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.tenants import TenantStore

_TENANT = "local"


def key_file(settings: Settings) -> Path:
    return settings.data_dir / "key"


async def laptop_key(settings: Settings) -> str:
    """Kept beside the data, made anew when Redis does not know it."""
    path = key_file(settings)
    redis = connect(settings.redis_dsn)
    try:
        store = KeyStore(redis, settings.namespace, most=settings.identity.max_keys)
        if path.exists():
            kept = path.read_text().strip()
            record = await store.find(key_hash(kept))
            if record is not None and record.holds:
                return kept
        by = Actor("penstock up", socket.gethostname())
        await TenantStore(redis, settings.namespace).add(_TENANT, by=by)
        key, _ = await store.create(tenant=_TENANT, name="laptop", by=by)
    finally:
        await redis.aclose()
    path.touch(mode=0o600)
    path.write_text(key)
    return key
