"""The parts of identity together, as a gateway has them."""

from services.common.config import Settings
from services.common.redis import Redis
from services.gateway.identity.api_keys import KeyVerifier
from services.gateway.identity.audit import AuditLog
from services.gateway.identity.auth import Authenticator
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.last_use import LastUse
from services.gateway.identity.news import News, channel
from services.gateway.identity.tenants import TenantStore


class Identity:
    def __init__(self, settings: Settings, redis: Redis) -> None:
        namespace = settings.namespace
        days = settings.identity.audit_kept_days
        self.audit = AuditLog(redis, namespace, days * 86_400)
        self.keys = KeyStore(redis, namespace, self.audit)
        self.tenants = TenantStore(redis, namespace, self.audit)
        self._last_use = LastUse(self.keys)
        self.auth = Authenticator(
            [KeyVerifier(self.keys, self.tenants)],
            self.keys,
            settings.gateway,
            self._last_use.note,
        )
        self._news = News(redis, channel(namespace), self.auth.told, self.auth.recheck)

    def start(self) -> None:
        self._news.start()
        self._last_use.start()

    async def stop(self) -> None:
        await self._news.stop()
        await self._last_use.stop()
