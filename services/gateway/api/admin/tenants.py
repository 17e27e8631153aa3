"""/admin/v1/tenants: what tenants are granted, and their limits."""

import time
from typing import Any

import grpc
from pydantic import Field

from services.common.errors import PenstockError
from services.gateway.api.admin.forms import (
    ChangeGrants,
    LimitForms,
    actor,
    changed,
    limits_of,
    listed,
    named_wrong,
    new_limits,
)
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.queries import page_query
from services.gateway.api.schema import Body, parse_body
from services.gateway.identity.principal import Principal
from services.gateway.identity.tenants import TenantRecord
from services.gateway.ids import not_found
from services.gateway.parts import Gateway


class ChangeTenant(ChangeGrants):
    note: str | None = None
    suspended: bool | None = None


class TenantLimits(Body):
    limits: LimitForms = Field(default_factory=list)
    user_limits: LimitForms = Field(default_factory=list)


class CreateTenant(ChangeTenant, TenantLimits):
    name: str


async def list_tenants(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """All, in pages."""
    query = page_query(exchange.query)
    records = await gateway.identity.tenants.list()
    await exchange.reply_json(listed(records, lambda one: one.name, _told, query))


async def get_tenant(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    name = exchange.path["tenant"]
    await _reply(exchange, await gateway.identity.tenants.find(name))


async def create_tenant(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(CreateTenant, await exchange.json_body())
    fields = _fields(body) | new_limits(principal, body, *_LIMITS)
    with named_wrong():
        record = await gateway.identity.tenants.add(body.name, fields, actor(exchange, principal))
    if record is None:
        raise PenstockError(
            grpc.StatusCode.ALREADY_EXISTS,
            f"There is a tenant '{body.name}' already.",
            stage="gateway",
            param="name",
            reason="already_exists",
        )
    await _reply(exchange, record)


async def change_tenant(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(ChangeTenant, await exchange.json_body())
    fields = _fields(body)
    with named_wrong():
        record = await gateway.identity.tenants.change(
            exchange.path["tenant"], "tenant.change", lambda _: fields, actor(exchange, principal)
        )
    await _reply(exchange, record)


async def set_limits(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """All of them; a list that is not given stays."""
    body = await parse_body(TenantLimits, await exchange.json_body())
    fields = {name: limits_of(getattr(body, name), name) for name in body.model_fields_set}
    with named_wrong():
        record = await gateway.identity.tenants.change(
            exchange.path["tenant"], "tenant.limits", lambda _: fields, actor(exchange, principal)
        )
    await _reply(exchange, record)


_LIMITS = tuple(TenantLimits.model_fields)


def _fields(body: ChangeTenant) -> dict[str, Any]:
    """What the record's fields are to be, but for limits."""
    fields = changed(body, TenantRecord, but={"name", "suspended", *_LIMITS})
    if body.suspended is not None:
        fields["suspended"] = int(time.time()) if body.suspended else None
    return fields


async def _reply(exchange: Exchange, record: TenantRecord | None) -> None:
    if record is None:
        raise not_found("tenant", exchange.path["tenant"])
    await exchange.reply_json(_told(record))


def _told(record: TenantRecord) -> dict[str, Any]:
    return {"object": "tenant", **record.model_dump(mode="json")}
