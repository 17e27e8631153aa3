"""The parts of identity together, as a gateway has them."""

from typing import Protocol

from services.common.config import Settings
from services.common.redis import Redis
from services.gateway.identity.api_keys import AdminKeyVerifier, KeyVerifier
from services.gateway.identity.audit import AuditLog
from services.gateway.identity.auth import Authenticator, Verifier
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.last_use import LastUse
from services.gateway.identity.news import News, channel
from services.gateway.identity.revoked_tokens import TokenRevocations
from services.gateway.identity.standing import Standing
from services.gateway.identity.tenants import TenantStore


class Part(Protocol):
    """What works in the background."""

    def start(self) -> None: ...
    async def stop(self) -> None: ...


class Identity:
    def __init__(self, settings: Settings, redis: Redis) -> None:
        own, namespace = settings.identity, settings.namespace
        self.audit = AuditLog(redis, namespace, own.audit_kept_days * 86_400)
        self.keys = KeyStore(redis, namespace, self.audit, own.max_keys)
        self.tenants = TenantStore(redis, namespace, self.audit)
        self.revoked_tokens = TokenRevocations(redis, namespace, own, self.audit)
        self.standing = Standing(self.keys, self.tenants, self.revoked_tokens)
        last_use = LastUse(self.keys)
        parts: list[Part] = [last_use]
        verifiers: list[Verifier] = [KeyVerifier(self.keys, self.tenants)]
        admin_verifiers: list[Verifier] = [AdminKeyVerifier(self.keys)]
        if own.oidc_issuer:
            # 5 MB of the process, and most have no issuer.
            from services.gateway.identity.issuer_keys import IssuerKeys
            from services.gateway.identity.tokens import AdminTokenVerifier, TokenVerifier

            issuer = IssuerKeys(own)
            parts.append(issuer)
            verifiers.append(TokenVerifier(own, issuer, self.revoked_tokens, self.tenants))
            if own.oidc_admin_audience:
                admin_verifiers.append(AdminTokenVerifier(own, issuer, self.revoked_tokens))
        self.auth = Authenticator(verifiers, self.keys, settings.gateway, last_use.note)
        self.admin_auth = Authenticator(admin_verifiers, self.keys, settings.gateway, last_use.note)
        parts.append(News(redis, channel(namespace), self._told, self._recheck))
        self._parts = parts

    def _told(self, message: str) -> None:
        self.auth.told(message)
        self.admin_auth.told(message)

    async def _recheck(self) -> None:
        await self.auth.recheck()
        await self.admin_auth.recheck()

    def start(self) -> None:
        for part in self._parts:
            part.start()

    async def stop(self) -> None:
        for part in self._parts:
            await part.stop()
