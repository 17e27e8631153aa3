"""The admin listener's paths, and what comes before each handler: who asks, and what he may."""

import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import grpc
from pydantic import Field
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.config import GatewaySettings, Settings
from services.common.errors import PenstockError, unavailable
from services.common.redis import RedisAway
from services.gateway.api.admin import keys, revoked_tokens, tenants
from services.gateway.api.admin.failures import Failures
from services.gateway.api.admin.forms import actor
from services.gateway.api.rest.http import Endpoint, Exchange, Handler
from services.gateway.api.schema import Body, validated
from services.gateway.faults import spelt
from services.gateway.identity.audit import Act, Conflict
from services.gateway.identity.identity import Identity
from services.gateway.identity.permissions import NEEDS, admit
from services.gateway.identity.principal import Principal
from services.gateway.intake import Intake
from services.gateway.parts import Gateway

log = logging.getLogger(__name__)

_BODY_BYTES = 256 * 1024
Q = TypeVar("Q", bound=Body)
Signed = Callable[[Gateway, Exchange, Principal], Awaitable[None]]


def admin_settings(settings: Settings) -> GatewaySettings:
    """The door's bounds, for few and small requests."""
    most = settings.identity.admin_max_connections
    return settings.gateway.model_copy(
        update={
            "max_connections": most,
            "max_requests": 2 * most,
            "max_held_bytes": 2 * most * _BODY_BYTES,
            "body_limit_bytes": _BODY_BYTES,
        }
    )


def admin_application(gateway: Gateway) -> ASGIApp:
    own = admin_settings(gateway.settings)
    intake = Intake(own.max_requests, own.max_held_bytes)
    failures = Failures(gateway.settings.identity.admin_failures_per_minute)

    def signed(handler: Signed) -> Handler:
        async def run(exchange: Exchange) -> None:
            try:
                principal = await _asks(gateway.identity, exchange, failures)
                with intake.slot(principal.user) as exchange.place:
                    await handler(gateway, exchange, principal)
            except RedisAway:
                raise unavailable(
                    "Redis is away: nothing can be looked up or changed",
                    stage="gateway",
                    reason="storage_unavailable",
                ) from None
            except Conflict:
                raise PenstockError(
                    grpc.StatusCode.ABORTED,
                    "This was changed by others at the same time; try again.",
                    stage="gateway",
                    reason="conflict",
                ) from None

        return run

    async def healthz(exchange: Exchange) -> None:
        await exchange.reply_json({"status": "ok"})

    table: dict[str, dict[str, Handler]] = {
        "/admin/v1/tenants": {
            "GET": signed(tenants.list_tenants),
            "POST": signed(tenants.create_tenant),
        },
        "/admin/v1/tenants/{tenant}": {
            "GET": signed(tenants.get_tenant),
            "PATCH": signed(tenants.change_tenant),
        },
        "/admin/v1/tenants/{tenant}/limits": {"PUT": signed(tenants.set_limits)},
        "/admin/v1/keys": {"GET": signed(keys.list_keys), "POST": signed(keys.create_key)},
        "/admin/v1/keys/{key}": {
            "GET": signed(keys.get_key),
            "PATCH": signed(keys.change_key),
            "DELETE": signed(keys.revoke_key),
        },
        "/admin/v1/keys/{key}/rotate": {"POST": signed(keys.rotate_key)},
        "/admin/v1/keys/{key}/limits": {"PUT": signed(keys.set_limits)},
        "/admin/v1/revoked-tokens": {
            "GET": signed(revoked_tokens.list_revoked),
            "POST": signed(revoked_tokens.revoke),
        },
        "/admin/v1/models": {"GET": signed(list_models)},
        "/admin/v1/audit": {"GET": signed(read_audit)},
        "/admin/v1/jobs/dead": {"GET": signed(list_dead_jobs)},
        "/admin/healthz": {"GET": healthz},
    }
    endpoints = {f"{method} {path}" for path, methods in table.items() for method in methods}
    if unlisted := endpoints - NEEDS.keys():
        raise RuntimeError(f"permissions.py does not say what these need: {', '.join(unlisted)}")
    routes = [Route(path, Endpoint(path, methods, own)) for path, methods in table.items()]
    unknown = Endpoint("unknown", {}, own, otherwise=_no_such_path)

    async def otherwise(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await unknown(scope, receive, send)

    return Router(routes, default=otherwise, redirect_slashes=False)


async def _asks(identity: Identity, exchange: Exchange, failures: Failures) -> Principal:
    """Who asks, where he may. A no to a stranger is noted of his address, one to a known caller of
    himself, and audited."""
    try:
        principal = await identity.admin_auth.identify(exchange.authorization)
    except PenstockError as error:
        if error.code == grpc.StatusCode.UNAUTHENTICATED:
            failures.note(exchange.peer)
            log.warning("an administrator's key or token from %s: %s", exchange.peer, error.message)
        raise
    try:
        return admit(principal, exchange.endpoint)
    except PenstockError:
        failures.note(principal.user)
        act = Act(actor(exchange, principal), "denied", exchange.endpoint)
        await identity.audit.note(act)
        raise


async def list_models(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """What is served, and which tenants may use it."""
    granted = await gateway.identity.tenants.list()
    names = [model.name for model in await gateway.models.all()]
    if embedding := gateway.retrieval.embedding_model:
        names.append(embedding)
    told: list[dict[str, Any]] = [
        {
            "object": "model",
            "id": name,
            "tenants": [one.name for one in granted if one.models is None or name in one.models],
        }
        for name in names
    ]
    await exchange.reply_json({"object": "list", "data": told})


class StreamQuery(Body):
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    before: Annotated[str, spelt(r"^([0-9]{1,19}-[0-9]{1,19})?$", "a line's id")] = ""


class AuditQuery(StreamQuery):
    about: Annotated[str, Field(max_length=200)] = ""


async def read_audit(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """The latest first; `before` is the last line's id of the page before."""
    query = _stream_query(exchange, AuditQuery)
    lines = await gateway.identity.audit.read(query.limit, query.before, query.about)
    await exchange.reply_json({"object": "list", "data": [vars(line) for line in lines]})


async def list_dead_jobs(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """What nobody will try again, the latest first; `before` as of the audit log."""
    query = _stream_query(exchange, StreamQuery)
    dead = await gateway.jobs.queues.dead(query.limit, query.before)
    await exchange.reply_json({"object": "list", "data": [one.as_told() for one in dead]})


def _stream_query(exchange: Exchange, model: type[Q]) -> Q:
    fields: dict[str, Any] = dict(exchange.query)
    if str(fields.get("limit", "")).isdecimal():
        fields["limit"] = int(fields["limit"][:9])
    return validated(model, fields)


async def _no_such_path(exchange: Exchange) -> None:
    raise PenstockError(
        grpc.StatusCode.NOT_FOUND,
        f"Unknown request URL: {exchange.method} {exchange.target[:200]}.",
        stage="gateway",
        reason="unknown_url",
    )
