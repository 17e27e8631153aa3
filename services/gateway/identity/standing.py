"""What somebody may now whose request waited. What he showed then is kept nowhere."""

from pydantic import BaseModel

from services.gateway.identity.api_keys import principal_of
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.principal import Principal, Refused, Role, granted
from services.gateway.identity.revoked_tokens import TokenRevocations
from services.gateway.identity.tenants import Priority, TenantRecord, TenantStore
from services.gateway.ids import KEY


class Grantee(BaseModel):
    """Who asked, as it is stored with what he asked for."""

    tenant: str
    user: str
    at: int  # Unix seconds
    roles: tuple[Role, ...] = ()
    models: tuple[str, ...] | None = None
    token: str | None = None  # the `jti` of what he showed

    @classmethod
    def of(cls, principal: Principal, at: int) -> "Grantee":
        models = principal.models
        return cls(
            tenant=principal.tenant,
            user=principal.user,
            at=at,
            roles=tuple(sorted(principal.roles)),
            models=None if models is None else tuple(sorted(models)),
            token=principal.token,
        )


class Standing:
    """Raises one of `RedisAway`."""

    def __init__(self, keys: KeyStore, tenants: TenantStore, revoked: TokenRevocations) -> None:
        self._keys = keys
        self._tenants = tenants
        self._revoked = revoked

    async def of(self, who: Grantee) -> Principal:
        """Raises Refused for a key that holds no more, a suspended tenant, and a token that was
        revoked, by its `jti` or with all of its user's of that time. That one has expired since is
        no reason: it held when he asked, and is asked for nothing else."""
        if KEY.fits(who.user):
            return await self._of_key(who)
        tenant = await self._tenants.find(who.tenant)
        if tenant is None:
            raise Refused("tenant", "This token's tenant is not known here.")
        if await self._revoked.hold(who.tenant, who.user, {"iat": who.at, "jti": who.token}):
            raise Refused("revoked", "This token was revoked.")
        return granted(tenant, who.user, roles=who.roles, models=who.models)

    async def of_tenant(self, name: str, user: str, priority: Priority) -> Principal:
        """For what nobody of the tenant asked for, and is done for all of it: within what is the
        tenant's, charged as `user`'s. Raises Refused where it is suspended."""
        tenant = await self._tenants.find(name) or TenantRecord(name=name)
        return granted(tenant, user, roles=(), priority=priority)

    async def _of_key(self, who: Grantee) -> Principal:
        record = await self._keys.find_id(who.user)
        if record is None or record.tenant != who.tenant or record.revoked is not None:
            raise Refused("revoked", "The API key was revoked.")
        if record.expired:
            raise Refused("expired", "The API key has expired.")
        tenant = await self._tenants.find(who.tenant) or TenantRecord(name=who.tenant)
        return principal_of(record, tenant)
