"""What the public gRPC port answers without a key, health and reflection, within bounds of its own.

Such calls have places apart from the tenants', which the peers' addresses share, and a message is
read only in its peer's turn, a few at a time: it may be as large as a tenant's. While others have
all turns, a health check is answered unread, with the health of the whole server.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from services.common.fairness.shares import Shares
from services.common.fairness.turns import Turns

Context = Any  # grpc.aio.ServicerContext, which has no type stubs
M = TypeVar("M", bound=Message)

PLACES = 256  # calls; a health check that watches has one for as long as it does
_READS_AT_ONCE = 4  # messages
MESSAGE_TIMEOUT_S = 2.0  # for a message to arrive, or to be taken


class Strangers:
    """grpc.health.v1.Health and grpc.reflection.v1alpha.ServerReflection."""

    def __init__(self, watched: health.aio.HealthServicer, shown: tuple[str, ...] | None) -> None:
        """`shown`: full names that reflection lists, beside these two; None: no reflection."""
        self._health = watched
        self._reflection: Any = None
        if shown is not None:
            names = (*shown, health.SERVICE_NAME, reflection.SERVICE_NAME)
            self._reflection = reflection.aio.ReflectionServicer(names)
        self._places = Shares(PLACES)
        self._turns = Turns(_READS_AT_ONCE)

    def handlers(self) -> tuple[Any, ...]:
        """For streams of requests, so that gRPC reads a message only when it is asked for."""
        streaming, single = (
            grpc.stream_stream_rpc_method_handler,
            grpc.stream_unary_rpc_method_handler,
        )
        status = HealthCheckResponse.SerializeToString
        told = ServerReflectionResponse.SerializeToString
        checks = {
            "Check": single(self.check, response_serializer=status),
            "Watch": streaming(self.watch, response_serializer=status),
        }
        handlers = [grpc.method_handlers_generic_handler(health.SERVICE_NAME, checks)]
        if self._reflection is not None:
            reflects = {"ServerReflectionInfo": streaming(self.reflect, response_serializer=told)}
            handlers.append(grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, reflects))
        return tuple(handlers)

    async def check(self, _: object, context: Context) -> HealthCheckResponse | None:
        async with self._place(context) as peer:
            if not self._turns.free:  # a probe does not wait for those who withhold their messages
                whole: HealthCheckResponse = await self._health.Check(HealthCheckRequest(), context)
                return whole
            async for request in self._messages(HealthCheckRequest, peer, context):
                reply: HealthCheckResponse | None = await self._health.Check(request, context)
                return reply
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The call has no message.")
        return None

    async def watch(self, _: object, context: Context) -> None:
        async with self._place(context) as peer:
            async for request in self._messages(HealthCheckRequest, peer, context):
                await self._health.Watch(request, context)

    async def reflect(self, _: object, context: Context) -> None:
        async with self._place(context) as peer:
            requests = self._messages(ServerReflectionRequest, peer, context)
            async for reply in self._reflection.ServerReflectionInfo(requests, context):
                async with asyncio.timeout(MESSAGE_TIMEOUT_S):
                    await context.write(reply)

    @contextlib.asynccontextmanager
    async def _place(self, context: Context) -> AsyncIterator[str]:
        """Its peer's address. Ends the call where that has its share of places."""
        peer = context.peer().rpartition(":")[0]
        if not self._places.take(peer):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls without a key")
        try:
            yield peer
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the client is too slow")
        finally:
            self._places.give_back(peer)

    async def _messages(self, kind: type[M], peer: str, context: Context) -> AsyncIterator[M]:
        """Those of a call, as they come. Raises TimeoutError."""
        while (message := await self._next(peer, context)) is not grpc.aio.EOF:
            try:
                request = kind.FromString(message)
            except DecodeError:
                said = f"This is not a {kind.DESCRIPTOR.name}."
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, said)
            yield request

    async def _next(self, peer: str, context: Context) -> Any:
        await self._turns.take(peer)
        try:
            async with asyncio.timeout(MESSAGE_TIMEOUT_S):
                return await context.read()
        finally:
            self._turns.give_back()
