"""Calls to the retrieval service: one channel per replica that the registry lists."""

import asyncio
import random
import time
from typing import Any

import grpc
from opentelemetry.trace import Span

from protos import common_pb2, retrieval_pb2, retrieval_pb2_grpc
from services.common import unary
from services.common.config import Settings
from services.common.discovery import Directory, Replica
from services.common.errors import PenstockError, unavailable
from services.common.redis import Redis
from services.common.transport import MESSAGE_LIMITS, Transport

INDEX_TIMEOUT_S = 300.0  # a whole file is chunked and embedded
EMBED_TIMEOUT_S = 60.0
REMOVE_TIMEOUT_S = 30.0
_CLOSE_GRACE_S = 30.0
_LOST = frozenset({"unreachable", "draining"})  # of a replica: another may take the call


class RetrievalClient:
    """Every call raises PenstockError with stage "retrieval" when it fails.

    A call that a replica does not take goes on to the next, within its one timeout: all of them
    may be repeated. The registry tells of a killed replica only when its lease has run out.
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._timeout_s = settings.retrieval.timeout_s
        self._transport = Transport.of(settings)
        self._directory = Directory(
            redis, settings.namespace, "retrieval", settings.lease_s, self._changed
        )
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._directory.start()

    async def stop(self) -> None:
        await self._directory.stop()
        for task in self._closing:
            task.cancel()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    @property
    def embedding_model(self) -> str:
        """The name that replicas register, or empty while none is there."""
        models = (r.facts.get("embedding_model", "") for r in self._directory.replicas.values())
        return next(filter(None, models), "")

    async def search(
        self, request: retrieval_pb2.SearchRequest, span: Span, record: common_pb2.Record
    ) -> retrieval_pb2.SearchReply:
        """Passages, within the configured timeout: a chat request waits for this."""
        reply: retrieval_pb2.SearchReply = await self._call(
            "Search", request, span, self._timeout_s, record
        )
        return reply

    async def embed(
        self, request: retrieval_pb2.EmbedRequest, span: Span, record: common_pb2.Record
    ) -> retrieval_pb2.EmbedReply:
        reply: retrieval_pb2.EmbedReply = await self._call(
            "Embed", request, span, EMBED_TIMEOUT_S, record
        )
        return reply

    async def index(
        self, request: retrieval_pb2.IndexRequest, span: Span
    ) -> retrieval_pb2.IndexReply:
        reply: retrieval_pb2.IndexReply = await self._call(
            "Index", request, span, INDEX_TIMEOUT_S, None
        )
        return reply

    async def remove(
        self, request: retrieval_pb2.RemoveRequest, span: Span
    ) -> retrieval_pb2.RemoveReply:
        reply: retrieval_pb2.RemoveReply = await self._call(
            "Remove", request, span, REMOVE_TIMEOUT_S, None
        )
        return reply

    async def _call(
        self,
        method: str,
        request: Any,
        span: Span,
        timeout_s: float,
        record: common_pb2.Record | None,
    ) -> Any:
        deadline = time.monotonic() + timeout_s
        failure = unavailable("no retrieval is available", stage="retrieval", reason="no_replica")
        for replica in random.sample(list(self._channels), len(self._channels)):
            channel = self._channels.get(replica)
            if channel is None:  # left while another was tried
                continue
            left_s = deadline - time.monotonic()
            try:
                return await _call_one(channel, method, request, span, left_s, record)
            except PenstockError as error:
                if error.code != grpc.StatusCode.UNAVAILABLE or error.reason not in _LOST:
                    raise
                failure = error
        raise failure

    def _changed(self, added: list[Replica], removed: list[Replica]) -> None:
        for replica in removed:
            closing = asyncio.create_task(self._channels.pop(replica.id).close(_CLOSE_GRACE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for replica in added:
            self._channels[replica.id] = self._transport.dial(replica.address, MESSAGE_LIMITS)


async def _call_one(
    channel: grpc.aio.Channel,
    method: str,
    request: Any,
    span: Span,
    timeout_s: float,
    record: common_pb2.Record | None,
) -> Any:
    stub = retrieval_pb2_grpc.RetrievalStub(channel)
    try:
        return await unary.call(
            getattr(stub, method),
            request,
            span=span,
            timeout_s=timeout_s,
            stage="retrieval",
            record=record,
        )
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The channel was closed under the call: its replica left.
        raise unavailable("retrieval went away", stage="retrieval", reason="unreachable") from None


def is_outage(error: PenstockError) -> bool:
    """Whether retrieval failed by itself, and not because the request is wrong."""
    return error.code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    )
