"""The retrieval service: its parts, its calls, their deadlines, and drain."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc

from protos import retrieval_pb2 as pb
from protos import retrieval_pb2_grpc
from services.common import retrieval_abilities
from services.common.blobs import Blobs
from services.common.errors import PenstockError, unavailable
from services.common.policy import PolicyFile
from services.common.service import Service
from services.common.telemetry.metrics_server import Page
from services.common.telemetry.spans import Span
from services.common.unary import serving
from services.retrieval import metrics, pipeline
from services.retrieval.assembly import (
    SHARE_OF_TIMEOUT,
    Model,
    of_model,
    points_of,
    refuse_same_names,
    room,
    told,
)
from services.retrieval.cache.revisions import Revisions
from services.retrieval.cache.searches import Searches
from services.retrieval.embedding_model import EmbeddingModel
from services.retrieval.index.calls import Calls
from services.retrieval.index.store import Store
from services.retrieval.pipeline import Parts
from services.retrieval.pipeline.parts import OfModel
from services.retrieval.served_model import ServedModel

_SEARCHING_SHARE = 0.9  # of the time that a search has
_READING_S = 600.0  # of a file, before it is stored
_WRITE_S = 300.0  # at most

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class RetrievalService(Service):
    name = "retrieval"
    grpc_services = ("penstock.v1.Retrieval",)

    _policy: PolicyFile | None = None
    parts: Parts | None = None
    servicer: "Servicer | None" = None

    async def start(self, server: grpc.aio.Server) -> None:
        """Loads the embedding model (seconds, in a thread) and opens the store."""
        own = self.settings.retrieval
        self._policy = PolicyFile.of_settings(self.settings.policy)
        await self._policy.start()
        models = [await asyncio.to_thread(EmbeddingModel.load, own.embedding_model)]
        for name, spec in own.embedders.items():
            models.append(await asyncio.to_thread(EmbeddingModel.load, spec, name))
        served = [ServedModel(*one, models[0]) for one in own.served_embedders.items()]
        all_of_them: list[Model] = [*models, *served]
        refuse_same_names(all_of_them)
        calls = Calls(points_of(self.settings, all_of_them), own.timeout_s * SHARE_OF_TIMEOUT)
        revisions = Revisions(self.redis, self.settings.namespace, _WRITE_S)
        blobs = Blobs.of(self.settings)
        await blobs.claim(self.redis)
        first, *others = [of_model(own, model, calls, revisions) for model in models]
        others += [
            replace(first, model=model, store=Store(calls, revisions, model.fingerprint))
            for model in served
        ]
        self.parts = Parts(
            own,
            blobs,
            self.telemetry,
            first.model,
            first.chunkers,
            first.embedder,
            calls,
            first.store,
            self._policy,
            first.prototypes,
            Searches(own, revisions),
            {one.model.name: one for one in others},
        )
        for one in self._of_models(here=True):
            one.embedder.start()
            # The first pass is the slowest.
            await one.embedder.embed("", [one.model.reader.query("ready?").ids])
        starting = [one.chunkers.start() for one in self._of_models(here=True)]
        await asyncio.gather(calls.open(), *starting)
        self.servicer = Servicer(self.parts)
        retrieval_pb2_grpc.add_RetrievalServicer_to_server(self.servicer, server)

    def describe(self) -> dict[str, str]:
        if self.parts is None:
            return {}
        model = self.parts.model
        return {
            "embedding_model": model.name,
            "embedder": model.fingerprint,
            "embedders": json.dumps({one.model.name: told(one) for one in self._of_models()}),
            "dimension": str(model.dimension),
            "max_tokens": str(model.reader.max_tokens),
            "max_chunk_tokens": str(room(model)),
            "store": self.parts.calls.kind,
            **retrieval_abilities.told(),
        }

    def check(self) -> None:
        for one in self._of_models(here=True):
            one.embedder.check()

    def _of_models(self, *, here: bool = False) -> "list[Parts | OfModel]":
        """`here`: without those that are served, which have nothing of their own that runs."""
        each: list[Parts | OfModel] = []
        if self.parts is not None:
            each = [self.parts, *self.parts.others.values()]
        return [one for one in each if not (here and isinstance(one.model, ServedModel))]

    async def drain(self, grace_s: float) -> None:
        if self.servicer is not None:
            await self.servicer.drain(grace_s)

    def pages(self) -> Mapping[str, Page]:
        return self._policy.pages() if self._policy is not None else {}

    async def stop(self) -> None:
        if self._policy is not None:
            await self._policy.stop()
        if self.parts is not None:
            for one in self._of_models(here=True):
                await one.chunkers.stop()
                await one.embedder.stop()
            for one in self._of_models():
                await one.store.finish()
            await self.parts.calls.close()
            self.parts.questions.stop()
            self.parts.texts.stop()


class Servicer(retrieval_pb2_grpc.RetrievalServicer):
    """The calls of retrieval.proto: one deadline, one span, one line of metrics each."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedReply:
        return await self._serve("embed", pipeline.embed, request, context)

    async def Search(self, request: pb.SearchRequest, context: Any) -> pb.SearchReply:
        """It ends in time for an earlier result to be told in its place."""
        within_s = _SEARCHING_SHARE * self._limit_s("search", context)
        work = partial(pipeline.search, within_s=within_s)
        return await self._serve("search", work, request, context)

    async def Index(self, request: pb.IndexRequest, context: Any) -> None:
        async def work(parts: Parts, request: pb.IndexRequest, span: Span) -> None:
            await pipeline.index(parts, request, span, context.write)

        await self._serve("index", work, request, context)

    async def IndexServed(self, turns: Any, context: Any) -> None:
        first = await context.read()
        request = first.request if first is not grpc.aio.EOF else pb.IndexRequest()

        async def ask(texts: Sequence[str]) -> pb.TextVectors:
            await context.write(pb.IndexNews(wanted=pb.WantedVectors(texts=texts)))
            turn = await context.read()
            if turn is grpc.aio.EOF:
                why = "who asked for the document to be indexed tells no more vectors"
                raise unavailable(why, stage="retrieval", reason="caller_left")
            told: pb.TextVectors = turn.vectors
            return told

        async def work(parts: Parts, request: pb.IndexRequest, span: Span) -> None:
            await pipeline.index(parts, request, span, context.write, ask)

        await self._serve("index", work, request, context)

    async def Read(self, request: pb.ReadRequest, context: Any) -> None:
        async def work(parts: Parts, request: pb.ReadRequest, span: Span) -> None:
            await pipeline.read(parts, request, span, context.write)

        await self._serve("read", work, request, context)

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveReply:
        return await self._serve("remove", pipeline.remove, request, context)

    async def SetAttributes(
        self, request: pb.SetAttributesRequest, context: Any
    ) -> pb.SetAttributesReply:
        return await self._serve("set_attributes", pipeline.set_attributes, request, context)

    async def Judge(self, request: pb.JudgeRequest, context: Any) -> pb.JudgeReply:
        return await self._serve("judge", pipeline.judge, request, context)

    async def drain(self, grace_s: float) -> None:
        """Refuses new calls; returns when the running ones ended, or after `grace_s`."""
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()

    async def _serve(
        self,
        method: str,
        work: Callable[[Parts, Request, Span], Awaitable[Reply]],
        request: Request,
        context: Any,
    ) -> Reply:
        limit_s = self._limit_s(method, context)
        async with serving(self._parts.telemetry, context, method) as span, self._counted(method):
            try:
                async with asyncio.timeout(limit_s):
                    return await work(self._parts, request, span)
            except TimeoutError:
                raise unavailable(
                    f"{method} took longer than {limit_s:g} s", stage="retrieval", reason="timeout"
                ) from None

    def _limit_s(self, method: str, context: Any) -> float:
        settings = self._parts.settings
        limit_s = settings.timeout_s if method in ("search", "judge") else settings.index_timeout_s
        if method == "index":  # reading the file comes before what this is the limit of
            limit_s += _READING_S
        if (remaining_s := context.time_remaining()) is not None:
            limit_s = min(limit_s, 0.95 * remaining_s)  # the answer has to travel back in time
        return limit_s

    @asynccontextmanager
    async def _counted(self, method: str) -> AsyncIterator[None]:
        if self._draining:
            raise unavailable("this replica is stopping", stage="retrieval", reason="draining")
        began, outcome = time.monotonic(), "internal"
        self._running += 1
        self._idle.clear()
        try:
            yield
            outcome = "ok"
        except PenstockError as error:
            outcome = error.code.name.lower()
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
            metrics.REQUESTS.labels(method, outcome).inc()
            metrics.REQUEST_SECONDS.labels(method).observe(time.monotonic() - began)
