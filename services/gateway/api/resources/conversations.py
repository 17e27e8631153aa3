"""Conversations and their items."""

import secrets
from typing import Annotated, Any

import orjson
from pydantic import Field

from services.gateway.api.resources.pages import PageQuery, told_page
from services.gateway.api.responses_items import PREFIXES, Item
from services.gateway.api.responses_schema import Include
from services.gateway.api.schema import Body, Metadata, parsed_bytes, read_aside
from services.gateway.intake import Holding
from services.gateway.parts import Gateway

MAX_ADDED = 20  # items in one call, as OpenAI's
_IDLE = ("parsed", "parsed_arguments")  # OpenAI's client's own

_Items = Annotated[list[Item], Field(max_length=MAX_ADDED)]


class CreateConversation(Body):
    items: _Items | None = None
    metadata: Metadata | None = None


class UpdateConversation(Body):
    metadata: Metadata | None


class AddItems(Body):
    items: Annotated[list[Item], Field(min_length=1, max_length=MAX_ADDED)]


class ItemQuery(Body):
    include: Include | None = Field(None, description="no effect: what is kept is told")


async def create_conversation(
    gateway: Gateway, tenant: str, body: CreateConversation
) -> dict[str, Any]:
    items = [as_kept(item) for item in body.items or ()]
    return (await gateway.conversations.create(tenant, body.metadata or {}, items)).as_json()


async def add_items(gateway: Gateway, tenant: str, id: str, body: AddItems) -> dict[str, Any]:
    items = [as_kept(item) for item in body.items]
    await gateway.conversations.add(tenant, id, items)
    return told_page(items, more=False)


async def list_items(
    gateway: Gateway, tenant: str, id: str, query: PageQuery, hold: Holding
) -> dict[str, Any]:
    """Of each its `id`, and as `told` its JSON."""
    stored = await gateway.conversations.page(
        tenant, id, hold, query.after, query.limit + 1, newest_first=query.order == "desc"
    )
    items: list[dict[str, Any]] = [{"id": item, "told": json} for item, json in stored.items()]
    return told_page(items[: query.limit], len(items) > query.limit)


async def parsed_item(json: bytes, hold: Holding) -> Any:
    """`hold` is told before what it takes beside its texts."""
    hold(parsed_bytes(json))
    return await read_aside(len(json), lambda: orjson.loads(json))


async def delete_conversation(gateway: Gateway, tenant: str, id: str) -> dict[str, Any]:
    await gateway.conversations.delete(tenant, id)
    return {"id": id, "object": "conversation.deleted", "deleted": True}


def as_kept(item: Item, id: str = "") -> dict[str, Any]:
    """With all that OpenAI's client expects of an item; `id`: a new one if none is given."""
    told = item.model_dump(exclude_none=True, exclude={"id", *_IDLE})
    told = {"id": id or f"{PREFIXES[item.type]}_{secrets.token_hex(16)}", **told}
    told.setdefault("status", "completed")
    for part in (*told.get("content", ()), *told.get("output", ())):
        part.pop("parsed", None)
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    if item.type == "reasoning":
        told.setdefault("summary", [])
    if item.type == "file_search_call":
        told.setdefault("queries", [])
    return told
