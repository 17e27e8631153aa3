"""Unary calls between services: the trace context travels in, spans and errors travel out.

    request metadata    traceparent            W3C trace context of the caller's span
    trailing metadata   penstock-record-bin    common_pb2.Record: the server's spans of this call
                        penstock-status-bin    common_pb2.Status, when the call failed

A unary reply has no `End` as a request on a link has, hence the metadata.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from protos import common_pb2
from services.common.errors import PenstockError, unavailable
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import Telemetry, remote_parent, traceparent

TRACEPARENT_KEY = "traceparent"
RECORD_KEY = "penstock-record-bin"
STATUS_KEY = "penstock-status-bin"

log = logging.getLogger(__name__)


@asynccontextmanager
async def serving(
    telemetry: Telemetry, context: Any, name: str, **attributes: Any
) -> AsyncIterator[Span]:
    """Around a handler's work: a span `name` below the caller's, the record in the trailers.

    A PenstockError raised inside ends the call with its code and travels whole; anything else
    is logged and ends it as INTERNAL, without the exception's text.
    """
    metadata = dict(context.invocation_metadata() or ())
    failure: PenstockError | None = None
    with telemetry.span(name, remote_parent(metadata.get(TRACEPARENT_KEY, "")), **attributes) as s:
        try:
            yield s
        except PenstockError as error:
            failure = error
        except Exception:
            log.exception("%s failed", name)
            failure = PenstockError(grpc.StatusCode.INTERNAL, f"{name} failed")
        if failure is not None:
            failure.stage = failure.stage or telemetry.service
            s.set_attribute("error", failure.reason or failure.code.name.lower())
    trailers = [(RECORD_KEY, telemetry.record(s).SerializeToString())]
    if failure is None:
        context.set_trailing_metadata(tuple(trailers))
        return
    trailers.append((STATUS_KEY, failure.to_status().SerializeToString()))
    await context.abort(failure.code, failure.message, tuple(trailers))


async def call(
    method: Any,
    request: Any,
    *,
    span: Span,
    timeout_s: float,
    stage: str,
    record: common_pb2.Record | None = None,
) -> Any:
    """Calls a stub's unary method below `span` and returns its reply.

    `record` takes the server's spans, whether the call succeeds or not.
    Raises PenstockError: the server's own, or one that names `stage` when it cannot be reached or
    does not answer within `timeout_s`.
    """
    rpc = method(request, timeout=timeout_s, metadata=((TRACEPARENT_KEY, traceparent(span)),))
    try:
        reply = await rpc
    except grpc.aio.AioRpcError as error:
        _keep_record(error.trailing_metadata(), record)
        raise _error(error, stage) from None
    _keep_record(await rpc.trailing_metadata(), record)
    return reply


async def follow(
    method: Any,
    request: Any,
    tell: Callable[[Any], Awaitable[None]],
    *,
    span: Span,
    timeout_s: float,
    stage: str,
    record: common_pb2.Record | None = None,
) -> None:
    """The same of a method whose reply is a stream: `tell` is called with each message of it."""
    rpc = method(request, timeout=timeout_s, metadata=((TRACEPARENT_KEY, traceparent(span)),))
    try:
        async for message in rpc:
            await tell(message)
        _keep_record(await rpc.trailing_metadata(), record)
    except grpc.aio.AioRpcError as error:
        _keep_record(error.trailing_metadata(), record)
        raise _error(error, stage) from None
    finally:
        rpc.cancel()  # where `tell` raised


async def converse(
    method: Any,
    first: Any,
    answer: Callable[[Any], Awaitable[Any]],
    *,
    span: Span,
    timeout_s: float,
    stage: str,
) -> None:
    """The same of a method that is told a stream, too: first this, then what `answer` says to each
    message; None: nothing."""
    rpc = method(timeout=timeout_s, metadata=((TRACEPARENT_KEY, traceparent(span)),))
    try:
        await _write(rpc, first, stage)
        while (message := await rpc.read()) is not grpc.aio.EOF:
            if (said := await answer(message)) is not None:
                with suppress(asyncio.InvalidStateError):  # it has ended: reading tells how
                    await _write(rpc, said, stage)
    except grpc.aio.AioRpcError as error:
        raise _error(error, stage) from None
    finally:
        rpc.cancel()  # where `answer` raised


async def _write(rpc: Any, message: Any, stage: str) -> None:
    """Where the call ends with this on its way, gRPC says INTERNAL of itself, and how it ended is
    not to be known: the other end is lost."""
    try:
        await rpc.write(message)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and not error.trailing_metadata():
            raise _unreachable(stage) from None
        raise


def _bytes_of(trailers: Iterable[Any] | None, key: str) -> bytes:
    return next((value for name, value in trailers or () if name == key), b"")


def _keep_record(trailers: Iterable[Any] | None, record: common_pb2.Record | None) -> None:
    if record is not None:
        record.MergeFromString(_bytes_of(trailers, RECORD_KEY))


def _unreachable(stage: str) -> PenstockError:
    return unavailable(f"{stage} cannot be reached", stage=stage, reason="unreachable")


def _error(error: grpc.aio.AioRpcError, stage: str) -> PenstockError:
    if data := _bytes_of(error.trailing_metadata(), STATUS_KEY):
        try:
            return PenstockError.from_status(common_pb2.Status.FromString(data))
        except DecodeError:
            log.warning("%s sent an unreadable status", stage)
    code = error.code()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return PenstockError(code, f"{stage} did not answer in time", stage=stage, reason="timeout")
    if code == grpc.StatusCode.UNAVAILABLE:
        return _unreachable(stage)
    return PenstockError(code, f"{stage} failed: {code.name.lower()}", stage=stage)
