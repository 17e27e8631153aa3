"""Conversations: REST's requests in gRPC's shape, done by the same code."""

from protos import gateway_conversations_pb2 as pb
from protos.gateway_stores_pb2 import Deleted
from services.common.errors import PenstockError, invalid
from services.gateway.api.grpc.inbox import max_fields
from services.gateway.api.grpc.kept import Call, look_of
from services.gateway.api.grpc.plain import Fields, count_values, fields_of
from services.gateway.api.resources import conversations
from services.gateway.api.resources.conversations import (
    AddItems,
    CreateConversation,
    UpdateConversation,
    parsed_item,
)
from services.gateway.api.resources.pages import PageQuery, told_page
from services.gateway.api.schema import validated
from services.gateway.intake import Intake

_ID = "conversation_id"


async def _allowed(call: Call) -> str:
    """The id of one that the caller may use. Raises NOT_FOUND, PERMISSION_DENIED."""
    id = call.id(_ID)
    await call.gateway.conversations.authorize(call.principal, id, _ID)
    return id


async def _create(call: Call) -> Fields:
    body = validated(CreateConversation, fields_of(call.request))
    return await conversations.create_conversation(call.gateway, call.tenant, body)


async def _get(call: Call) -> Fields:
    id = await _allowed(call)
    return (await call.gateway.conversations.find(call.tenant, id, _ID)).as_json()


async def _update(call: Call) -> Fields:
    body = validated(UpdateConversation, {"metadata": None, **fields_of(call.request, _ID)})
    id = await _allowed(call)
    changed = await call.gateway.conversations.describe(call.tenant, id, body.metadata or {})
    return changed.as_json()


async def _delete(call: Call) -> Fields:
    id = await _allowed(call)
    return await conversations.delete_conversation(call.gateway, call.tenant, id)


async def _add_items(call: Call) -> Fields:
    body = validated(AddItems, {"items": [], **fields_of(call.request, _ID)})
    id = await _allowed(call)
    return await conversations.add_items(call.gateway, call.tenant, id, body)


async def _list_items(call: Call) -> Fields:
    """It ends before the item with which it would have more values than a message may."""
    query = validated(PageQuery, fields_of(call.request, _ID))
    id = await _allowed(call)
    listed = await conversations.list_items(call.gateway, call.tenant, id, query, call.hold)
    items, left = list[Fields](), max_fields(call.gateway.settings.gateway)
    for one in listed["data"]:
        item = await parsed_item(one["told"], call.hold)
        left -= count_values(item, left)
        if left < 0:
            if not items:
                raise _too_many_values(call, one["id"], "after")
            return told_page(items, more=True)
        items.append(item)
    return told_page(items, listed["has_more"])


async def _get_item(call: Call) -> Fields:
    id, wanted = await _allowed(call), call.id("item_id")
    json = await call.gateway.conversations.item(call.tenant, id, call.hold, wanted)
    item = await parsed_item(json, call.hold)
    most = max_fields(call.gateway.settings.gateway)
    if count_values(item, most) > most:
        raise _too_many_values(call, wanted, "item_id")
    return {"item": item}


def _too_many_values(call: Call, item: str, param: str) -> PenstockError:
    most = max_fields(call.gateway.settings.gateway)
    why = f"has more than {most} values: read it over HTTP"
    if param == "after":
        why += "; with its id as 'after' the list goes on behind it"
    return invalid(f"Item '{item}' {why}.", param, reason="item_too_large", stage="gateway")


async def _delete_item(call: Call) -> Fields:
    id, item = await _allowed(call), call.id("item_id")
    return (await call.gateway.conversations.drop(call.tenant, id, item)).as_json()


_SLOT, _VISIT = Intake.slot, Intake.visit
_ONE, _ITEMS = pb.Conversation, pb.ConversationItems
KEPT = {
    "CreateConversation": look_of(pb.CreateConversationRequest, _create, _ONE, _SLOT),
    "GetConversation": look_of(pb.GetConversationRequest, _get, _ONE, _VISIT),
    "UpdateConversation": look_of(pb.UpdateConversationRequest, _update, _ONE, _SLOT),
    "DeleteConversation": look_of(pb.DeleteConversationRequest, _delete, Deleted, _SLOT),
    "AddConversationItems": look_of(pb.AddConversationItemsRequest, _add_items, _ITEMS, _SLOT),
    "ListConversationItems": look_of(pb.ListConversationItemsRequest, _list_items, _ITEMS, _VISIT),
    "GetConversationItem": look_of(
        pb.GetConversationItemRequest, _get_item, pb.ConversationItem, _VISIT
    ),
    "DeleteConversationItem": look_of(pb.DeleteConversationItemRequest, _delete_item, _ONE, _SLOT),
}
