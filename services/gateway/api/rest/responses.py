"""/v1/responses, as OpenAI has it."""

import json
from contextlib import aclosing
from typing import Annotated, Any, ClassVar

from pydantic import Field

from services.common.errors import PenstockError, invalid
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.lasting import Resume, idempotency_key, last_event, resume_query
from services.gateway.api.rest.pages import page, page_query
from services.gateway.api.rest.responses_front import ResponsesFront
from services.gateway.api.rest.stored_responses import input_items, snapshot, stored_response
from services.gateway.api.schema import bad_value, validated
from services.gateway.identity.permissions import admit
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway
from services.gateway.runs.lasting.following import follow
from services.gateway.runs.pipeline import serve


class RetrieveQuery(Resume):
    NEUTRAL: ClassVar = {"include_obfuscation": (False,)}

    starting_after: Annotated[int, Field(ge=0)] | None = None


async def create_response(gateway: Gateway, exchange: Exchange) -> None:
    front = ResponsesFront(gateway, exchange, idempotency_key(exchange.headers))
    principal = exchange.principal
    if principal is None:
        principal = admit(await gateway.auth.identify(front.authorization), front.endpoint)
    try:
        with gateway.intake.slot(principal.tenant) as place:
            prompts = await front.read(place)
        if (last := last_event(exchange.headers)) is not None:
            front.goes_on_behind(last)
        if not front.lasts:
            return await serve(gateway, front, principal, watched=exchange.principal is None)
        run = await gateway.runs.begin(front, principal, prompts)
        front.joins(run)
        if front.background and not front.stream:
            stored = await gateway.runs.find(principal.tenant, run)
            if stored is not None:
                told = json.loads(stored.told)  # a retry's may be older than this request
                whole = await snapshot(gateway, principal.tenant, stored, told)
                return await exchange.reply_json(whole)
        await follow(gateway, principal.tenant, run, front)
    except PenstockError as error:
        await front.failed(error)
    finally:
        front.close()


async def get_response(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """As far as it is; with `stream` its events, behind `starting_after` or from the first."""
    query = validated(RetrieveQuery, resume_query(exchange))
    tenant, id = principal.tenant, exchange.path["response"]
    stored, told = await stored_response(gateway, tenant, id)
    after = (
        query.starting_after if query.starting_after is not None else last_event(exchange.headers)
    )
    if not query.stream:
        if after is not None:
            raise bad_value("starting_after", "only allowed when 'stream' is true")
        return await exchange.reply_json(await snapshot(gateway, tenant, stored, told))
    if not told["lasts"]:
        why = "only of a response that was made in the background, or with an Idempotency-Key"
        raise bad_value("stream", why)
    front = ResponsesFront(gateway, exchange)
    front.tells_again(stored.request_id, told, -1 if after is None else after)
    try:
        await exchange.body.skim()
        exchange.watch_client()
        await follow(gateway, tenant, stored.request_id, front)
    except PenstockError as error:
        await front.failed(error)
    finally:
        front.close()


async def delete_response(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    id = exchange.path["response"]
    stored, _ = await stored_response(gateway, principal.tenant, id)
    await gateway.runs.drop(principal.tenant, stored.request_id)
    await exchange.reply_json({"id": id, "object": "response", "deleted": True})


async def cancel_response(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """Ends what runs in the background; what has ended stays as it is."""
    tenant, id = principal.tenant, exchange.path["response"]
    stored, told = await stored_response(gateway, tenant, id)
    if not told["response"]["background"]:
        raise invalid(
            "Only a response in the background can be cancelled.", "response_id", stage="gateway"
        )
    if await gateway.runs.cancel(tenant, stored.request_id) == "cancelled":
        async with aclosing(gateway.runs.events(tenant, stored.request_id)) as events:
            async for _ in events:
                pass  # its owner ends it
    await exchange.reply_json(await snapshot(gateway, tenant, stored, told))


async def list_input_items(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """Of its own request, not of those before it."""
    query = page_query(exchange.query)
    stored, told = await stored_response(gateway, principal.tenant, exchange.path["response"])
    items: list[dict[str, Any]] = input_items(stored, told)
    order = {item["id"]: number for number, item in enumerate(items)}
    await exchange.reply_json(page(items, query, key=lambda item: order[item["id"]]))
