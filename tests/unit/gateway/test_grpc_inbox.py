"""gRPC messages are looked over before they are parsed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.common_pb2 import Message
from protos.gateway_pb2 import ChatRequest, CompleteRequest, PublicEmbedRequest, SamplingOptions
from protos.tokenizer_pb2 import TokenIds
from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.gateway.grpc_inbox import Inbox

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


@given(st.lists(st.text(), max_size=10), st.floats(0, 2), st.integers(0, 2**64 - 1))
def test_what_is_one_comes_through(texts, temperature, seed):
    sampling = SamplingOptions(temperature=temperature, seed=seed, stop=texts[:4])
    for request in (
        ChatRequest(messages=[Message(role="user", content=t) for t in texts], sampling=sampling),
        CompleteRequest(token_ids=TokenIds(ids=range(5000)), sampling=sampling),
        PublicEmbedRequest(model="m", texts=texts * 200),
    ):
        assert INBOX.parse(type(request), request.SerializeToString()) == request
