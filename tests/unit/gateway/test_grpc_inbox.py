"""gRPC messages are looked over before they are parsed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos.common_pb2 import TokenIds
from protos.gateway_conversations_pb2 import AddConversationItemsRequest
from protos.gateway_pb2 import ChatRequest, CompleteRequest, PublicEmbedRequest, SamplingOptions
from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.common.fairness.shares import Shares
from services.common.text.content import said
from services.gateway.api.grpc import inbox as grpc_inbox
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.intake import Place
from tests.support.waiting import until

INBOX = Inbox(GatewaySettings(max_messages=10))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ChatRequest, b"\x12\x00" * 5000),  # messages
        (ChatRequest, b"\x2a\x88\x27" + b"\x32\x00" * 2500 * 2),  # sampling's stops
        (CompleteRequest, b"\x38\x01" * 5000),  # a field that there is not
        (CompleteRequest, b"\x3d\x01\x01\x01\x01" * 5000),
        (PublicEmbedRequest, b"\x12\x00" * 5000),
    ],
)
def test_more_fields_than_any_request_has_are_refused_unparsed(kind, message):
    with pytest.raises(PenstockError) as refused:
        INBOX.parse(kind, message)
    assert refused.value.reason == "body_too_large"


@pytest.mark.parametrize(
    "message", [b"\xff", b"\x12\x05a", b"\x12" + b"\xff" * 11, b"\x0b", b"\x3c", b"\x0a\x01\xff"]
)
def test_what_is_none_is_refused(message):
    with pytest.raises(PenstockError) as refused:
        INBOX.parse(ChatRequest, message)
    assert refused.value.reason == "invalid_message"
    assert "ChatRequest" in refused.value.message


def items_in_each_other(depth: int) -> bytes:
    """Of a conversation's request: lists in lists, which take two messages each."""
    value = b"\x20\x01"  # true
    for _ in range(depth):
        value = _told(6, _told(1, value))  # Value.list_value, ListValue.values
    return _told(2, _told(1, _told(1, b"a") + _told(2, value)))  # items, fields


def _told(field: int, content: bytes) -> bytes:
    size, told = len(content), bytearray([field << 3 | 2])
    while size > 0x7F:
        told.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*told, size]) + content


def test_what_lies_too_deep_is_no_message():
    """Nor does it take a call of Python's for each of its levels."""
    for depth in (*range(44, 52), 2000):
        message = items_in_each_other(depth)
        try:
            expected: Any = AddConversationItemsRequest.FromString(message)
        except DecodeError:
            with pytest.raises(PenstockError, match="not a AddConversationItemsRequest"):
                INBOX.parse(AddConversationItemsRequest, message)
        else:
            assert depth < 2000
            assert INBOX.parse(AddConversationItemsRequest, message) == expected


@given(st.lists(st.text(), max_size=10), st.floats(0, 2), st.integers(0, 2**64 - 1))
def test_what_is_one_comes_through(texts, temperature, seed):
    sampling = SamplingOptions(temperature=temperature, seed=seed, stop=texts[:4])
    for request in (
        ChatRequest(messages=[said("user", t) for t in texts], sampling=sampling),
        CompleteRequest(token_ids=TokenIds(ids=range(5000)), sampling=sampling),
        PublicEmbedRequest(model="m", texts=texts * 200),
    ):
        assert INBOX.parse(type(request), request.SerializeToString()) == request


LIMIT = 1000


class Calls:
    """Calls of several tenants, each of which sends its message when it is let."""

    def __init__(self) -> None:
        self.inbox = Inbox(GatewaySettings(body_limit_bytes=LIMIT))
        self.memory = Shares(10**6)
        self.go_on = asyncio.Event()
        self.asked: list[str] = []

    async def take(self, tenant: str, message: Any = b"x" * 30) -> bytes:
        async def read() -> Any:
            self.asked.append(tenant)
            await self.go_on.wait()
            return message

        return await self.inbox.take(Place(tenant, self.memory), SimpleNamespace(read=read))


async def test_a_few_messages_of_a_tenant_come_in_at_a_time() -> None:
    """Each has the place of the largest until its size is known, and none before its turn."""
    calls = Calls()
    many = [asyncio.create_task(calls.take("flood")) for _ in range(30)]
    other = asyncio.create_task(calls.take("other"))
    await until(lambda: "other" in calls.asked)
    at_once = calls.asked.count("flood")
    assert 1 < at_once < 30
    assert calls.memory.taken == (at_once + 1) * LIMIT
    calls.go_on.set()
    messages = await asyncio.gather(*many, other)
    assert set(messages) == {b"x" * 30}
    assert calls.memory.taken == 31 * 30, "their own sizes are held on"


async def test_a_call_without_a_message_is_refused_and_so_is_a_late_one(monkeypatch) -> None:
    calls = Calls()
    calls.go_on.set()
    with pytest.raises(PenstockError) as told:
        await calls.take("t", grpc.aio.EOF)
    assert told.value.reason == "no_message"
    calls.go_on.clear()
    monkeypatch.setattr(grpc_inbox, "MESSAGE_TIMEOUT_S", 0.01)
    for _ in range(20):  # more than come in at a time
        with pytest.raises(PenstockError) as told:
            await calls.take("t")
        assert told.value.reason == "body_timeout"
    monkeypatch.setattr(grpc_inbox, "MESSAGE_TIMEOUT_S", 30.0)
    calls.go_on.set()
    assert await calls.take("t") == b"x" * 30
