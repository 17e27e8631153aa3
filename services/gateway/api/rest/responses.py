"""/v1/responses, as OpenAI has it."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from protos.runs_pb2 import StoredRun
from services.common.errors import PenstockError, invalid
from services.gateway.api.resources.pages import PageQuery, page
from services.gateway.api.responses_schema import Include
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.lasting import Resume, idempotency_key, last_event, resume_query
from services.gateway.api.rest.queries import included, page_query
from services.gateway.api.rest.responses_front import ResponsesFront
from services.gateway.api.rest.stored_responses import input_items, snapshot, stored_response
from services.gateway.api.schema import bad_value, validated
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway
from services.gateway.runs.lasting.following import follow, serve_lasting


class RetrieveQuery(Resume):
    NEUTRAL: ClassVar = {"include_obfuscation": (False,)}

    include: Include | None = Field(None, description="logprobs are told if the request asked so")
    starting_after: Annotated[int, Field(ge=0)] | None = None


class ItemsQuery(PageQuery):
    include: Include | None = Field(None, description="no effect: what is kept is told")


async def create_response(gateway: Gateway, exchange: Exchange) -> None:
    front = ResponsesFront(gateway, exchange)
    front.outlives(idempotency_key(exchange.headers), last_event(exchange.headers))
    try:
        await serve_lasting(gateway, front, exchange.principal)
    except PenstockError as error:
        await front.failed(error)
    finally:
        front.close()


async def _found(
    gateway: Gateway, exchange: Exchange, principal: Principal
) -> tuple[StoredRun, Any]:
    id, hold = exchange.path["response"], exchange.place.hold
    return await stored_response(gateway, principal, id, hold)


async def get_response(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """As far as it is; with `stream` its events, behind `starting_after` or from the first."""
    query = validated(RetrieveQuery, included(exchange.query, resume_query(exchange)))
    stored, told = await _found(gateway, exchange, principal)
    after, field = query.behind(exchange.headers)
    if not query.stream:
        return await exchange.reply_json(await snapshot(gateway, principal, stored, told))
    if not told["lasts"]:
        why = "only of a response that was made in the background, or with an Idempotency-Key"
        raise bad_value("stream", why)
    front = ResponsesFront(gateway, exchange)
    front.tells_again(stored.request_id, told, -1 if after is None else after, field)
    try:
        await exchange.body.skim()
        exchange.watch_client()
        await follow(gateway, principal, stored.request_id, front)
    except PenstockError as error:
        await front.failed(error)
    finally:
        front.close()


async def delete_response(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    stored, _ = await _found(gateway, exchange, principal)
    await gateway.runs.drop(principal.tenant, stored.request_id)
    id = exchange.path["response"]
    await exchange.reply_json({"id": id, "object": "response", "deleted": True})


async def cancel_response(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """Ends what runs in the background; what has ended stays as it is."""
    stored, told = await _found(gateway, exchange, principal)
    if not told["response"]["background"]:
        raise invalid(
            "Only a response in the background can be cancelled.", "response_id", stage="gateway"
        )
    await gateway.runs.cancel(principal.tenant, stored.request_id)
    await exchange.reply_json(await snapshot(gateway, principal, stored, told))


async def list_input_items(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """Of its own request, not of those before it."""
    query = page_query(included(exchange.query), ItemsQuery)
    stored, told = await _found(gateway, exchange, principal)
    items: list[dict[str, Any]] = input_items(stored, told)
    order = {item["id"]: number for number, item in enumerate(items)}
    await exchange.reply_json(page(items, query, key=lambda item: order[item["id"]]))
