"""/admin/v1/keys: tenants' keys and administrators'.

No one gives more than he has: an administrator's key is made, changed, rotated and revoked by who
has all of its permissions, and the one to do so. Rotating a key shows a text with its grants.
"""

from typing import Any

from pydantic import Field

from services.gateway.api.admin.forms import (
    ChangeGrants,
    LimitForms,
    actor,
    changed,
    known_tenant,
    limits_of,
    listed,
    named_wrong,
    new_limits,
)
from services.gateway.api.resources.pages import PageQuery
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.queries import page_query
from services.gateway.api.schema import Body, bad_value, parse_body
from services.gateway.identity.key_record import KeyRecord
from services.gateway.identity.principal import (
    ADMIN_GRANTS,
    Permission,
    Principal,
    Role,
    permissions_of,
)
from services.gateway.ids import KEY, not_found
from services.gateway.parts import Gateway

_CENTURY_S = 100 * 365 * 86_400
_DAY_S = 86_400


class ChangeKey(ChangeGrants):
    name: str | None = None
    role: str | None = None
    scopes: list[str] | None = None


class KeyLimits(Body):
    limits: LimitForms


class CreateKey(ChangeKey):
    limits: LimitForms = Field(default_factory=list)
    tenant: str | None = None
    admin: bool = False
    expires_in_s: int | None = None


class KeyList(PageQuery):
    tenant: str | None = None


class RotateKey(Body):
    overlap_s: int = _DAY_S


async def list_keys(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """All, or those of `?tenant=`, in pages."""
    query = page_query(exchange.query, KeyList)
    keys, of = gateway.identity.keys, query.tenant
    records = await (keys.list() if of is None else keys.list_of(of)) if of != "" else []
    await exchange.reply_json(listed(records, lambda one: one.id, _told, query))


async def get_key(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    await exchange.reply_json(_told(await _found(gateway, exchange)))


async def create_key(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(CreateKey, await exchange.json_body())
    await known_tenant(gateway, body.tenant, body.admin)
    if body.expires_in_s is not None and not 1 <= body.expires_in_s <= _CENTURY_S:
        raise bad_value("expires_in_s", f"must be from 1 to {_CENTURY_S}")
    fields = changed(body, KeyRecord, but={"tenant", "admin", "expires_in_s", "role", "limits"})
    fields |= {"tenant": body.tenant, "role": body.role or _default_role(body.tenant)}
    fields |= new_limits(principal, body, "limits")
    if body.admin and body.limits:
        raise bad_value("limits", _NO_LIMITS)
    with named_wrong():
        record = KeyRecord.model_validate({"id": KEY.new(), "created": 0, **fields})
        _may(principal, record)
        key, record = await gateway.identity.keys.create(
            record.tenant,
            record.name,
            role=record.role,
            scopes=record.scopes,
            priority=record.priority,
            weight=record.weight,
            models=record.models,
            limits=record.limits,
            expires_in_s=body.expires_in_s,
            by=actor(exchange, principal),
        )
    await exchange.reply_json({**_told(record), "key": key}, headers=_SECRET)


async def change_key(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(ChangeKey, await exchange.json_body())
    fields = changed(body, KeyRecord, but={"role"})

    def new(record: KeyRecord) -> dict[str, Any]:
        """Asked of what is there when it is changed."""
        given = fields
        if "role" in body.model_fields_set:
            given = {**fields, "role": body.role or _default_role(record.tenant)}
        _may(principal, record)
        _may(principal, KeyRecord.model_validate({**record.model_dump(), **given}))
        return given

    with named_wrong():
        changed_one = await gateway.identity.keys.change(
            exchange.path["key"], "key.change", new, actor(exchange, principal)
        )
    if changed_one is None:
        raise not_found("API key", exchange.path["key"])
    await exchange.reply_json(_told(await _found(gateway, exchange)))


async def set_limits(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """All of them. An administrator's key uses nothing, and has none."""
    body = await parse_body(KeyLimits, await exchange.json_body())
    limits = limits_of(body.limits, "limits")
    if (await _found(gateway, exchange)).tenant is None:
        raise bad_value("limits", _NO_LIMITS)
    with named_wrong():
        await gateway.identity.keys.change(
            exchange.path["key"],
            "key.limits",
            lambda _: {"limits": limits},
            actor(exchange, principal),
        )
    await exchange.reply_json(_told(await _found(gateway, exchange)))


async def rotate_key(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(RotateKey, await exchange.json_body())
    if not 0 <= body.overlap_s <= _CENTURY_S:
        raise bad_value("overlap_s", f"must be from 0 to {_CENTURY_S}")
    by = actor(exchange, principal)
    with named_wrong():
        made = await gateway.identity.keys.rotate(
            exchange.path["key"], body.overlap_s, by, lambda record: _may(principal, record)
        )
    if made is None:
        raise not_found("API key", exchange.path["key"])
    key, record = made
    await exchange.reply_json({**_told(record), "key": key}, headers=_SECRET)


async def revoke_key(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    _may(principal, await _found(gateway, exchange))
    await gateway.identity.keys.revoke(exchange.path["key"], actor(exchange, principal))
    await exchange.reply_json(_told(await _found(gateway, exchange)))


_SECRET = {"cache-control": "no-store"}
_NO_LIMITS = "an administrator's key has none"


def _default_role(tenant: str | None) -> Role:
    return Role.READ_ONLY if tenant is None else Role.MEMBER


def _may(principal: Principal, record: KeyRecord) -> None:
    """Raises PERMISSION_DENIED where it is an administrator's key with more than the caller has."""
    if record.tenant is not None:
        return
    principal.require(Permission.ADMIN_KEYS_WRITE)
    for permission in sorted(permissions_of((record.role,), record.scopes, ADMIN_GRANTS)):
        principal.require(permission)


async def _found(gateway: Gateway, exchange: Exchange) -> KeyRecord:
    id = KEY.checked(exchange.path["key"])
    record = await gateway.identity.keys.find_id(id)
    if record is None:
        raise not_found("API key", id)
    return record


def _told(record: KeyRecord) -> dict[str, Any]:
    told = record.model_dump(mode="json", exclude={"replaced"})
    return {"object": "key", "admin": record.tenant is None, **told}
