"""Calls to the retrieval service: one channel per replica that the registry lists."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import grpc

from protos import common_pb2, retrieval_pb2, retrieval_pb2_grpc
from services.common import unary
from services.common.config import Settings
from services.common.discovery import Directory, Replica
from services.common.errors import PenstockError, unavailable
from services.common.grpc_options import MESSAGE_LIMITS
from services.common.policy import PolicyFile
from services.common.redis import Redis
from services.common.retrieval_abilities import of as abilities_of
from services.common.telemetry.metrics import from_zero
from services.common.telemetry.spans import Span
from services.common.transport import Channel, Transport
from services.gateway import metrics
from services.gateway.stores.indexing.served_embedders import Embed
from services.gateway.stores.retrieval.needs import connected, needs, outdated

INDEX_TIMEOUT_S = 2400.0  # a whole file is read, cut and embedded
INDEX_PATIENCE_S = 300.0  # until a replica is there
EMBED_TIMEOUT_S = 60.0
REMOVE_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 300.0  # who asks waits, behind documents that are indexed
_JUDGE_S = 2.0
_LOOK_AGAIN_S = 0.25  # at replicas that did not take a call, while no other appears
_CLOSE_GRACE_S = 30.0
_OUTAGES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
from_zero(metrics.retrieval_skipped, (code.name.lower() for code in _OUTAGES))
# Of a replica's search: another may find what this one did not in its part of the time.
_ELSEWHERE = frozenset({"timeout", "store_slow", "store_away", "store_failed", "embedder_slow"})
# Of a replica: another may take the call, or the same once it has looked at its policy's file.
_LOST = frozenset({"unreachable", "draining", "other_policy", "other_embedders"})


Hear = Callable[[Any], Awaitable[Any]]
Tell = Callable[[retrieval_pb2.IndexProgress], Awaitable[None]]


class _Bounds(NamedTuple):
    """Of one call, in seconds from its beginning."""

    end_s: float
    patience_s: float  # until a replica takes it


class _Embedder(NamedTuple):
    fingerprint: str
    max_chunk_tokens: int


class RetrievalClient:
    """Every call raises PenstockError with stage "retrieval" when it fails.

    A call that a replica does not take goes on to the next, as does a search that one does not
    finish in half of the time that is left; while none takes it, it waits for one:
    the registry tells of a killed replica only when its lease has run out, and of the new one when
    that serves. One of an earlier version is passed over by what it would understand in part
    (UNAVAILABLE, "retrieval_outdated", if there is no other). All calls may be repeated but
    `index`: what a replica was lost over may be what the file did to it.
    """

    def __init__(self, redis: Redis, settings: Settings, policy: PolicyFile | None = None) -> None:
        """`policy`: by which what is asked is judged, if the request does not say."""
        self._policy = policy or PolicyFile(None, 1.0)
        self._search_s = settings.retrieval.timeout_s
        self._patience_s = settings.gateway.retrieval_patience_s
        self._transport = Transport.of(settings, "gateway")
        self._directory = Directory(
            redis, settings.namespace, "retrieval", settings.lease_s, self._changed
        )
        self.embedding_model = ""
        """The name that replicas register, also while they are away; empty before the first."""
        self.embedder = ""
        """Its fingerprint; empty also while replicas have several, as they do while one model takes
        another's place."""
        self._embedders: dict[str, _Embedder] = {}
        """Of all models, by their names."""
        self._channels: dict[str, Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Of all embedding models that are there, by their names; '' is the installation's."""
        known = {name: one.fingerprint for name, one in self._embedders.items()}
        return {**known, "": self.embedder}

    def has(self, model: str) -> bool:
        """Whether a store may choose this one, by its name."""
        return model in self._embedders

    def max_chunk_tokens(self, model: str = "") -> int:
        """Of a chunk that the model reads whole; 0: not told yet."""
        one = self._embedders.get(model or self.embedding_model)
        return one.max_chunk_tokens if one is not None else 0

    async def start(self) -> None:
        await self._directory.start()

    async def stop(self) -> None:
        await self._directory.stop()
        for task in self._closing:
            task.cancel()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def model(self, patience_s: float | None = None) -> str:
        """The embedding model's name; waits for the first replica to tell it. Raises UNAVAILABLE
        ("no_replica")."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s if patience_s is None else patience_s):
                while not self.embedding_model:
                    await self._directory.changed()
        if not self.embedding_model:
            raise _nobody()
        return self.embedding_model

    async def search(
        self, request: retrieval_pb2.SearchRequest, span: Span, record: common_pb2.Record
    ) -> retrieval_pb2.SearchReply:
        """Passages, after some patience."""
        bounds = _Bounds(self._patience_s + self._search_s, self._patience_s)
        reply: retrieval_pb2.SearchReply = await self._call("Search", request, span, bounds, record)
        return reply

    async def search_for_chat(
        self, request: retrieval_pb2.SearchRequest, span: Span, record: common_pb2.Record
    ) -> retrieval_pb2.SearchReply:
        """Passages, within the configured timeout: an answer waits for this, and can do without."""
        bounds = _Bounds(self._search_s, 0.8 * self._search_s)
        reply: retrieval_pb2.SearchReply = await self._call("Search", request, span, bounds, record)
        return reply

    async def embed(
        self, request: retrieval_pb2.EmbedRequest, span: Span, record: common_pb2.Record
    ) -> retrieval_pb2.EmbedReply:
        bounds = _Bounds(EMBED_TIMEOUT_S, self._patience_s)
        reply: retrieval_pb2.EmbedReply = await self._call("Embed", request, span, bounds, record)
        return reply

    async def judge(
        self, request: retrieval_pb2.JudgeRequest, span: Span, record: common_pb2.Record
    ) -> retrieval_pb2.JudgeReply:
        """Which rules match by meaning, soon or not at all: an answer waits for this."""
        bounds = _Bounds(_JUDGE_S, _JUDGE_S / 2)
        reply: retrieval_pb2.JudgeReply = await self._call("Judge", request, span, bounds, record)
        return reply

    async def index(
        self,
        request: retrieval_pb2.IndexRequest,
        span: Span,
        tell: Tell,
        embed: Embed | None = None,
    ) -> retrieval_pb2.IndexReply:
        """Sent once: UNAVAILABLE ("index_lost") when the replica is lost over it. What is indexed
        anew is found meanwhile, and whoever asks for it tells what he waits for. `embed`: by a
        served model, which does that."""
        reply = retrieval_pb2.IndexReply()

        async def hear(news: retrieval_pb2.IndexNews) -> retrieval_pb2.IndexTurn | None:
            if news.HasField("wanted") and embed is not None:
                return retrieval_pb2.IndexTurn(vectors=await embed(news.wanted.texts, span))
            if news.HasField("reply"):
                reply.CopyFrom(news.reply)
            else:
                await tell(news.progress)
            return None

        patience_s = self._patience_s if request.reindexing else INDEX_PATIENCE_S
        bounds = _Bounds(INDEX_TIMEOUT_S, patience_s)
        method = "Index" if embed is None else "IndexServed"
        await self._call(method, request, span, bounds, None, hear)
        return reply

    async def read(
        self, request: retrieval_pb2.ReadRequest, span: Span, hold: Callable[[int], None]
    ) -> str:
        """What a document says. `hold`: room for so many bytes more."""
        pieces: list[str] = []

        async def hear(piece: retrieval_pb2.ReadPiece) -> None:
            if not piece.at:  # by another replica, perhaps
                pieces.clear()
            hold(len(piece.text.encode()))
            pieces.append(piece.text)

        bounds = _Bounds(READ_TIMEOUT_S, self._patience_s)
        await self._call("Read", request, span, bounds, None, hear)
        return "".join(pieces)

    async def remove(
        self, request: retrieval_pb2.RemoveRequest, span: Span
    ) -> retrieval_pb2.RemoveReply:
        bounds = _Bounds(REMOVE_TIMEOUT_S, self._patience_s)
        reply: retrieval_pb2.RemoveReply = await self._call("Remove", request, span, bounds, None)
        return reply

    async def set_attributes(
        self, request: retrieval_pb2.SetAttributesRequest, span: Span
    ) -> retrieval_pb2.SetAttributesReply:
        bounds = _Bounds(REMOVE_TIMEOUT_S, self._patience_s)
        reply: retrieval_pb2.SetAttributesReply = await self._call(
            "SetAttributes", request, span, bounds, None
        )
        return reply

    async def _call(
        self,
        method: str,
        request: Any,
        span: Span,
        bounds: _Bounds,
        record: common_pb2.Record | None,
        hear: Hear | None = None,
    ) -> Any:
        if not getattr(request, "policy", "none"):
            request.policy = self._policy.current.digest
        began = time.monotonic()
        failure = _nobody()
        once, needed = method.startswith("Index"), needs(method, request)
        while True:
            replicas = random.sample(list(self._channels), len(self._channels))
            for replica in replicas:
                has_next = method == "Search" and replica is not replicas[-1]
                channel = self._channel(replica)
                if missing := needed - self._abilities(replica):
                    failure = outdated(missing)
                    continue
                if channel is None or (once and not await connected(channel)):
                    continue
                left_s = began + bounds.end_s - time.monotonic()
                left_s *= 0.5 if has_next else 1
                try:
                    return await _call_one(channel, method, request, span, left_s, record, hear)
                except PenstockError as error:
                    if has_next and error.reason in _ELSEWHERE:
                        failure = error
                        continue
                    if error.code != grpc.StatusCode.UNAVAILABLE or error.reason not in _LOST:
                        raise
                    if once and error.reason == "unreachable":
                        raise _lost_over_it() from None
                    failure = error
            left_s = began + bounds.patience_s - time.monotonic()
            if left_s <= 0:
                raise failure
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _LOOK_AGAIN_S)):
                    await self._directory.changed()

    def _abilities(self, id: str) -> frozenset[str]:
        replica = self._directory.replicas.get(id)
        return abilities_of(replica.facts) if replica is not None else frozenset()

    def _channel(self, id: str) -> Channel | None:
        """The one to a replica, dialled anew when certificates have changed; None: it has left."""
        channel = self._channels.get(id)
        if channel is not None and channel.outdated:
            self._close(channel)
            channel = self._channels[id] = self._dial(self._directory.replicas[id])
        return channel

    def _dial(self, replica: Replica) -> Channel:
        return self._transport.dial(replica.address, "retrieval", MESSAGE_LIMITS)

    def _close(self, channel: Channel) -> None:
        """When its calls have ended, or after some grace."""
        closing = asyncio.create_task(channel.close(_CLOSE_GRACE_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _changed(self, added: list[Replica], removed: list[Replica]) -> None:
        for replica in removed:
            self._close(self._channels.pop(replica.id))
        for replica in added:
            self._channels[replica.id] = self._dial(replica)
            self.embedding_model = replica.facts.get("embedding_model", self.embedding_model)
        replicas = self._directory.replicas.values()
        if replicas:  # else what there was may come back
            self._embedders = _embedders(replicas)
        if embedders := {replica.facts.get("embedder", "") for replica in replicas}:
            self.embedder = embedders.pop() if len(embedders) == 1 else ""


def _embedders(replicas: Iterable[Replica]) -> dict[str, _Embedder]:
    """Those that any replica has; without a fingerprint where two have several by one name."""
    found: dict[str, _Embedder] = {}
    for replica in replicas:
        for name, told in json.loads(replica.facts.get("embedders", "{}")).items():
            one = _Embedder(told["fingerprint"], told["max_chunk_tokens"])
            if found.setdefault(name, one) != one:
                found[name] = _Embedder("", min(one.max_chunk_tokens, found[name].max_chunk_tokens))
    return found


async def _call_one(
    channel: grpc.aio.Channel,
    method: str,
    request: Any,
    span: Span,
    timeout_s: float,
    record: common_pb2.Record | None,
    hear: Hear | None,
) -> Any:
    stub = retrieval_pb2_grpc.RetrievalStub(channel)
    try:
        told: Any = {"span": span, "timeout_s": timeout_s, "stage": "retrieval"}
        if method == "IndexServed" and hear is not None:
            first = retrieval_pb2.IndexTurn(request=request)
            return await unary.converse(stub.IndexServed, first, hear, **told)
        if hear is not None:
            return await unary.follow(
                getattr(stub, method),
                request,
                hear,
                span=span,
                timeout_s=timeout_s,
                stage="retrieval",
            )
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


def _nobody() -> PenstockError:
    return unavailable("no retrieval is available", stage="retrieval", reason="no_replica")


def _lost_over_it() -> PenstockError:
    return unavailable(
        "retrieval was lost while it indexed the file", stage="retrieval", reason="index_lost"
    )


def is_outage(error: PenstockError) -> bool:
    """Whether retrieval failed by itself, and not because the request is wrong."""
    return error.code in _OUTAGES
