"""/v1/conversations, as OpenAI has them."""

from services.gateway.api.resources import conversations
from services.gateway.api.resources.conversations import (
    AddItems,
    CreateConversation,
    ItemQuery,
    UpdateConversation,
)
from services.gateway.api.resources.pages import page_json
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.queries import included, page_query
from services.gateway.api.rest.responses import ItemsQuery
from services.gateway.api.schema import parse_body, validated
from services.gateway.identity.principal import Principal
from services.gateway.parts import Gateway


async def _allowed(gateway: Gateway, exchange: Exchange, principal: Principal) -> str:
    """The id of one that the caller may use, if there is one."""
    id = exchange.path["conversation"]
    await gateway.conversations.authorize(principal, id)
    return id


async def create_conversation(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(CreateConversation, await exchange.json_body())
    told = await conversations.create_conversation(gateway, principal.tenant, body)
    await exchange.reply_json(told)


async def get_conversation(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    id = await _allowed(gateway, exchange, principal)
    found = await gateway.conversations.find(principal.tenant, id)
    await exchange.reply_json(found.as_json())


async def update_conversation(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(UpdateConversation, await exchange.json_body())
    id = await _allowed(gateway, exchange, principal)
    changed = await gateway.conversations.describe(principal.tenant, id, body.metadata or {})
    await exchange.reply_json(changed.as_json())


async def delete_conversation(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    id = await _allowed(gateway, exchange, principal)
    told = await conversations.delete_conversation(gateway, principal.tenant, id)
    await exchange.reply_json(told)


async def list_items(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    query = page_query(included(exchange.query), ItemsQuery)
    id = await _allowed(gateway, exchange, principal)
    hold = exchange.place.hold
    listed = await conversations.list_items(gateway, principal.tenant, id, query, hold)
    await exchange.reply(page_json(listed), "application/json")


async def add_items(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    validated(ItemQuery, included(exchange.query))
    body = await parse_body(AddItems, await exchange.json_body())
    id = await _allowed(gateway, exchange, principal)
    await exchange.reply_json(await conversations.add_items(gateway, principal.tenant, id, body))


async def get_item(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    validated(ItemQuery, included(exchange.query))
    id, item = await _allowed(gateway, exchange, principal), exchange.path["item"]
    hold = exchange.place.hold
    told = await gateway.conversations.item(principal.tenant, id, hold, item)
    await exchange.reply(told, "application/json")


async def delete_item(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    id, item = await _allowed(gateway, exchange, principal), exchange.path["item"]
    left = await gateway.conversations.drop(principal.tenant, id, item)
    await exchange.reply_json(left.as_json())
