"""Unary calls: spans and whole errors reach the caller."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos import common_pb2, retrieval_pb2, retrieval_pb2_grpc
from services.common import unary
from services.common.errors import PenstockError, invalid
from services.common.telemetry.telemetry import Telemetry
from services.common.transport import listen
from tests.support.transport import TRANSPORT


class Scripted(retrieval_pb2_grpc.RetrievalServicer):
    """Answers, refuses or breaks by the collection's name."""

    def __init__(self) -> None:
        self.telemetry = Telemetry("retrieval", "retrieval-1")

    async def Remove(self, request: Any, context: Any) -> Any:
        async with unary.serving(self.telemetry, context, "remove", wanted=request.collection) as s:
            with self.telemetry.span("store", s):
                if request.collection == "refused":
                    raise invalid("no such thing", "collection", reason="unknown")
                if request.collection == "broken":
                    raise ValueError("secret text of a user")
            return retrieval_pb2.RemoveReply(chunks=3)


@pytest.fixture
async def stub() -> AsyncIterator[Any]:
    server = TRANSPORT.server()
    retrieval_pb2_grpc.add_RetrievalServicer_to_server(Scripted(), server)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    async with TRANSPORT.dial(f"127.0.0.1:{port}", "retrieval") as channel:
        yield retrieval_pb2_grpc.RetrievalStub(channel)
    await server.stop(0)


async def call(stub: Any, collection: str, record: Any = None) -> tuple[Any, str]:
    telemetry = Telemetry("gateway", "gateway-1")
    with telemetry.span("request") as span:
        reply = await unary.call(
            stub.Remove,
            retrieval_pb2.RemoveRequest(collection=collection),
            span=span,
            timeout_s=5,
            stage="retrieval",
            record=record,
        )
    return reply, f"{span.span_id:016x}"


async def test_reply_and_spans_below_the_callers(stub: Any) -> None:
    record = common_pb2.Record()
    reply, caller = await call(stub, "kept", record)
    assert reply.chunks == 3
    spans = {s.name: s for s in record.spans}
    assert set(spans) == {"remove", "store"}
    assert spans["remove"].parent_id == caller
    assert spans["store"].parent_id == spans["remove"].span_id
    assert spans["remove"].attributes["wanted"] == "kept"


async def test_an_error_arrives_whole_and_with_its_spans(stub: Any) -> None:
    record = common_pb2.Record()
    with pytest.raises(unary.PenstockError) as raised:
        await call(stub, "refused", record)
    error = raised.value
    assert (error.code, error.param, error.reason, error.stage) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "collection",
        "unknown",
        "retrieval",
    )
    assert error.message == "no such thing"
    assert {s.name for s in record.spans} == {"remove", "store"}


async def test_an_unforeseen_exception_does_not_leak_its_text(stub: Any) -> None:
    with pytest.raises(unary.PenstockError) as raised:
        await call(stub, "broken")
    assert raised.value.code == grpc.StatusCode.INTERNAL
    assert raised.value.stage == "retrieval"
    assert "secret" not in raised.value.message


async def test_an_unreachable_server_is_named_by_its_stage() -> None:
    async with TRANSPORT.dial("127.0.0.1:1", "retrieval") as channel:
        with pytest.raises(unary.PenstockError) as raised:
            await call(retrieval_pb2_grpc.RetrievalStub(channel), "any")
    assert raised.value.code == grpc.StatusCode.UNAVAILABLE
    assert (raised.value.stage, raised.value.reason) == ("retrieval", "unreachable")
    assert raised.value.retry_after_s > 0, "it may be back soon"


class Ended:
    """A call that is over while a message of ours is on its way."""

    def __init__(self, trailers: Any) -> None:
        self._trailers = trailers

    async def write(self, message: Any) -> None:
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), self._trailers, "error from Core"
        )

    def cancel(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("trailers", "code", "reason"),
    [
        (grpc.aio.Metadata(), grpc.StatusCode.UNAVAILABLE, "unreachable"),
        (None, grpc.StatusCode.UNAVAILABLE, "unreachable"),
        (grpc.aio.Metadata(("theirs", "own")), grpc.StatusCode.INTERNAL, ""),
    ],
)
async def test_a_conversation_that_ends_while_it_is_told_something_is_lost(
    trailers: Any, code: grpc.StatusCode, reason: str
) -> None:
    """gRPC says INTERNAL of itself: what the other end says comes with trailers."""

    async def answer(_: Any) -> Any:
        raise AssertionError("nothing was read")

    telemetry = Telemetry("gateway", "gateway-1")
    with telemetry.span("request") as span, pytest.raises(PenstockError) as raised:
        await unary.converse(
            lambda **_: Ended(trailers), b"", answer, span=span, timeout_s=5, stage="a"
        )
    assert (raised.value.code, raised.value.reason, raised.value.stage) == (code, reason, "a")


class Odd(retrieval_pb2_grpc.RetrievalServicer):
    """Ends calls as no handler of ours would."""

    async def Remove(self, request: Any, context: Any) -> Any:
        if request.collection == "silent":
            await asyncio.Event().wait()
        if request.collection == "unreadable":
            context.set_trailing_metadata(((unary.STATUS_KEY, b"\xff\xff"),))
        await context.abort(grpc.StatusCode.ABORTED, "at 10.0.0.7:1234")


@pytest.mark.parametrize(
    ("collection", "timeout_s", "code", "reason"),
    [
        ("silent", 0.05, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout"),
        ("unreadable", 5, grpc.StatusCode.ABORTED, ""),
        ("odd", 5, grpc.StatusCode.ABORTED, ""),
    ],
)
async def test_an_end_without_an_error_of_ours_names_the_stage_and_keeps_its_code(
    collection: str, timeout_s: float, code: grpc.StatusCode, reason: str
) -> None:
    server = TRANSPORT.server()
    retrieval_pb2_grpc.add_RetrievalServicer_to_server(Odd(), server)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    telemetry = Telemetry("gateway", "gateway-1")
    async with TRANSPORT.dial(f"127.0.0.1:{port}", "retrieval") as channel:
        with telemetry.span("request") as span, pytest.raises(unary.PenstockError) as raised:
            await unary.call(
                retrieval_pb2_grpc.RetrievalStub(channel).Remove,
                retrieval_pb2.RemoveRequest(collection=collection),
                span=span,
                timeout_s=timeout_s,
                stage="retrieval",
                record=common_pb2.Record(),
            )
    await server.stop(0)
    error = raised.value
    assert (error.code, error.stage, error.reason) == (code, "retrieval", reason)
    assert "10.0.0.7" not in error.message
