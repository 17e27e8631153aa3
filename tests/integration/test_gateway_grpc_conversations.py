"""Conversations over gRPC: REST's, by the same rules."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from protos import gateway_conversations_pb2 as pb
from protos.gateway_conversations_pb2_grpc import ConversationsStub
from services.gateway.identity.principal import Permission
from tests.support.gateway_rig import MODEL, Rig, gateway_rig

CODE = grpc.StatusCode


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace) as rig:
        yield rig


class Desk:
    """A caller's stub."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._stub = ConversationsStub(channel)
        self._own = (("authorization", f"Bearer {key}"),)

    @classmethod
    async def of(cls, rig: Rig, key: str = "") -> "Desk":
        return cls(await rig.channel(), key or rig.key)

    async def __call__(self, method: str, **fields: Any) -> Any:
        kind = getattr(pb, f"{method}Request")
        return await getattr(self._stub, method)(ParseDict(fields, kind()), metadata=self._own)

    async def refusal(self, method: str, **fields: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self(method, **fields)
        trailers = dict(refused.value.trailing_metadata() or ())
        return refused.value.code(), str(trailers.get("x-param", ""))


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_one_is_the_same_by_both_ways(rig: Rig) -> None:
    desk, http = await Desk.of(rig), await rig.http()
    made = await desk("CreateConversation", items=[said("a")], metadata={"topic": "water"})
    path, own = f"/v1/conversations/{made.id}", {"conversation_id": made.id}
    told = (await http.get(path)).json()
    assert told == {
        "id": made.id,
        "object": "conversation",
        "created_at": made.created_at,
        "metadata": {"topic": "water"},
    }
    added = await desk("AddConversationItems", **own, items=[said("b"), said("c")])
    assert len(added.data) == 2
    asked = {"model": MODEL, "input": "d", "conversation": made.id}
    assert (await http.post("/v1/responses", json=asked)).is_success
    first = await desk("ListConversationItems", **own, order="asc", limit=4)
    assert first.has_more
    rest = await desk("ListConversationItems", **own, order="asc", after=first.last_id)
    items = [MessageToDict(item) for item in (*first.data, *rest.data)]
    assert items == (await http.get(f"{path}/items?order=asc")).json()["data"]
    assert [item["content"][0]["text"] for item in items[:4]] == ["a", "b", "c", "d"]
    (one, *_) = items
    found = await desk("GetConversationItem", **own, item_id=one["id"])
    assert MessageToDict(found.item) == one
    left = await desk("DeleteConversationItem", **own, item_id=one["id"])
    assert left.id == made.id
    gone = await desk.refusal("GetConversationItem", **own, item_id=one["id"])
    assert gone == (CODE.NOT_FOUND, "")
    changed = await desk("UpdateConversation", **own, metadata={"a": "b"})
    assert dict(changed.metadata) == {"a": "b"}
    assert dict((await desk("UpdateConversation", **own)).metadata) == {}
    assert (await desk("DeleteConversation", **own)).deleted
    assert await desk.refusal("GetConversation", **own) == (CODE.NOT_FOUND, "conversation_id")


async def test_what_is_wrong_is_named(rig: Rig) -> None:
    desk = await Desk.of(rig)
    made = await desk("CreateConversation")
    own = {"conversation_id": made.id}
    many = [said("x")] * 21
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("CreateConversation", {"items": many}, "items"),
        ("CreateConversation", {"items": [{"content": "x"}]}, "items[0].role"),
        ("CreateConversation", {"items": [{**said("x"), "odd": 1}]}, "items[0].odd"),
        ("AddConversationItems", own, "items"),
        ("ListConversationItems", {**own, "limit": 101}, "limit"),
        ("ListConversationItems", {**own, "order": "up"}, "order"),
        ("ListConversationItems", {**own, "after": "msg_1"}, "after"),
        ("GetConversation", {}, "conversation_id"),
        ("GetConversationItem", own, "item_id"),
    ]
    for method, fields, param in cases:
        assert await desk.refusal(method, **fields) == (CODE.INVALID_ARGUMENT, param), method


async def test_a_page_has_no_more_values_than_a_message_may_have(rig: Rig) -> None:
    """What HTTP took in one body may have twenty times as many, and each takes microseconds to be
    told here."""
    desk, http = await Desk.of(rig), await rig.http()
    own = {"conversation_id": (await desk("CreateConversation")).id}
    path = f"/v1/conversations/{own['conversation_id']}/items"
    sizes = (5000, 5000, 5000, 13_000, 1)
    items = [{"type": "file_search_call", "results": [0] * size} for size in sizes]
    assert (await http.post(path, json={"items": items})).is_success
    told = (await http.get(f"{path}?order=asc")).json()["data"]
    assert [len(item["results"]) for item in told] == list(sizes)
    ids = [item["id"] for item in told]

    first = await desk("ListConversationItems", **own, order="asc", limit=100)
    assert [item["id"] for item in first.data] == ids[:2]
    assert (first.first_id, first.last_id, first.has_more) == (ids[0], ids[1], True)
    second = await desk("ListConversationItems", **own, order="asc", after=first.last_id)
    assert ([item["id"] for item in second.data], second.has_more) == (ids[2:3], True)

    refused = (CODE.INVALID_ARGUMENT, "after")
    large = {**own, "order": "asc", "after": second.last_id}
    assert await desk.refusal("ListConversationItems", **large) == refused
    refused = (CODE.INVALID_ARGUMENT, "item_id")
    assert await desk.refusal("GetConversationItem", **own, item_id=ids[3]) == refused
    assert len((await desk("GetConversationItem", **own, item_id=ids[2])).item["results"]) == 5000
    last = await desk("ListConversationItems", **own, order="asc", after=ids[3])
    assert ([item["id"] for item in last.data], last.has_more) == (ids[4:], False)


async def test_they_are_for_who_may(rig: Rig) -> None:
    """A tenant's own, who may use the models that answered in them."""
    mine, _ = await rig.keys.create("one")
    made = await (await Desk.of(rig, mine))("CreateConversation", items=[said("a")])
    own = {"conversation_id": made.id}
    asked = {"model": MODEL, "input": "d", "conversation": made.id}
    http, bearer = await rig.http(), {"authorization": f"Bearer {mine}"}
    assert (await http.post("/v1/responses", json=asked, headers=bearer)).is_success
    other, _ = await rig.keys.create("another")
    few, _ = await rig.keys.create("one", models=["another"])
    reader, _ = await rig.keys.create("one", scopes=[Permission.MODELS_READ])
    item = {**own, "item_id": "msg_1"}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("GetConversation", own),
        ("UpdateConversation", own),
        ("DeleteConversation", own),
        ("AddConversationItems", {**own, "items": [said("x")]}),
        ("ListConversationItems", own),
        ("GetConversationItem", item),
        ("DeleteConversationItem", item),
    ]
    for method, fields in calls:
        assert (await (await Desk.of(rig, other)).refusal(method, **fields))[0] == CODE.NOT_FOUND
        for key in (few, reader):
            code, _ = await (await Desk.of(rig, key)).refusal(method, **fields)
            assert code == CODE.PERMISSION_DENIED, method


async def test_what_rest_takes_grpc_can_tell(rig: Rig) -> None:
    """Messages of gRPC's lie in each other no deeper than so, which a list of items is not to
    stumble over."""
    desk, http = await Desk.of(rig), await rig.http()

    def items(levels: int) -> list[Any]:
        sent: list[Any] = [1]
        for _ in range(levels - 1):
            sent = [{"a": sent}] if levels % 2 else [sent]
        part = {"type": "output_text", "text": "x", "annotations": sent}
        search = {"type": "file_search_call", "results": sent}
        return [{"role": "assistant", "content": [part]}, search]

    made = (await http.post("/v1/conversations", json={"items": items(20)})).json()
    told = await desk("ListConversationItems", conversation_id=made["id"], order="asc")
    stored = (await http.get(f"/v1/conversations/{made['id']}/items?order=asc")).json()["data"]
    assert [MessageToDict(one) for one in told.data] == stored
    for levels in (21, 90):
        refused = await http.post("/v1/conversations", json={"items": items(levels)})
        assert refused.json()["error"]["param"] == "items[0].content[0].annotations"
    deep = await desk.refusal("CreateConversation", items=items(22)[1:])
    assert deep == (CODE.INVALID_ARGUMENT, "items[0].results")
