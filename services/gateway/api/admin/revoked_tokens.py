"""/admin/v1/revoked-tokens: those of the OIDC issuer that hold no more, by user or one by one.

Whoever ends an administrator's needs `admin-keys:write`, as for their keys.
"""

from typing import Any

from services.gateway.api.admin.forms import actor, known_tenant, listed, named_wrong
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.queries import page_query
from services.gateway.api.schema import Body, bad_value, parse_body
from services.gateway.identity.principal import Permission, Principal
from services.gateway.identity.revoked_tokens import RevokedTokens
from services.gateway.parts import Gateway


class Revoke(Body):
    tenant: str | None = None
    admin: bool = False
    user: str | None = None
    token: str | None = None


async def list_revoked(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """Those that still end something, in pages."""
    records = await gateway.identity.revoked_tokens.list()
    query = page_query(exchange.query)
    await exchange.reply_json(listed(records, lambda one: one.name, _told, query))


async def revoke(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(Revoke, await exchange.json_body())
    await known_tenant(gateway, body.tenant, body.admin)
    if body.admin:
        principal.require(Permission.ADMIN_KEYS_WRITE)
    if (body.user is None) == (body.token is None):
        raise bad_value("user", "give a user or a token, and not both")
    with named_wrong():
        record = await gateway.identity.revoked_tokens.revoke(
            body.tenant, body.user, body.token, actor(exchange, principal)
        )
    await exchange.reply_json(_told(record))


def _told(record: RevokedTokens) -> dict[str, Any]:
    told = record.model_dump(mode="json")
    return {"object": "revoked_token", "id": record.name, "admin": record.tenant is None, **told}
