"""A retrieval service of the bench's own, reached as the gateway reaches it: over gRPC."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.retrieval.sets import Document
from protos import common_pb2, retrieval_pb2_grpc
from protos import retrieval_pb2 as pb
from services.common.config import RetrievalSettings, Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.service import Host
from services.common.telemetry.telemetry import Telemetry
from services.common.transport import Transport
from services.common.unary import call
from services.gateway.stores.retrieval.joining import chunks_of, joined
from services.retrieval.index import edge_process
from services.retrieval.pipeline import Parts
from services.retrieval.server import RetrievalService

TENANT = "bench"
_CALLER = common_pb2.Caller(request_id="bench", tenant=TENANT)
_INDEXED_AT_ONCE = 4
_PATIENCE_S = 600.0


class File(NamedTuple):
    id: str
    title: str
    content: bytes


class Searched(NamedTuple):
    passages: list[common_pb2.Passage]
    stages_s: Mapping[str, float]  # of the service's spans, by name; "search" is the whole


@dataclass(frozen=True)
class Served:
    parts: Parts
    stub: Any
    folder: Path  # its data directory
    telemetry: Telemetry = field(default_factory=lambda: Telemetry("bench", "bench-1"))

    async def index(self, collection: str, files: Iterable[File]) -> tuple[int, float]:
        """How many chunks they made, and in how many seconds."""
        places, began = asyncio.Semaphore(_INDEXED_AT_ONCE), time.perf_counter()

        async def one(file: File) -> int:
            key = self.parts.blobs.key(_CALLER.tenant, file.id)
            await self.parts.blobs.put(key, _pieces(file.content))
            request = pb.IndexRequest(
                caller=_CALLER, collection=collection, source_id=file.id, title=file.title,
                blob=key,
            )  # fmt: skip
            async with places:
                call = self.stub.Index(request, timeout=_PATIENCE_S)
                (*_, last) = [news async for news in call]
            return int(last.reply.chunks)

        chunks = sum(await asyncio.gather(*map(one, files)))
        return chunks, time.perf_counter() - began

    async def search(self, collection: str, query: str, limit: int, **ranking: Any) -> Searched:
        request = pb.SearchRequest(
            caller=_CALLER, collections=[collection], query=query, limit=limit, **ranking
        )
        record = common_pb2.Record()
        with self.telemetry.span("bench") as span:
            reply = await call(
                self.stub.Search, request, span=span, timeout_s=_PATIENCE_S, stage="retrieval",
                record=record,
            )  # fmt: skip
        stages = {one.name: one.duration_ns / 1e9 for one in record.spans}
        return Searched(joined(chunks_of(reply)), stages)

    def store_memory(self) -> int:
        """Bytes that the embedded store's process holds for itself."""
        (store,) = (one for one in _processes() if edge_process.__name__ in one.cmdline())
        return int(store.memory_full_info().uss)

    def cpu_s(self) -> float:
        """That they have spent so far."""
        spent = 0.0
        for process in _processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                spent += times.user + times.system
        return spent


def file_of(document: Document) -> File:
    return File(document.id, document.title, document.text.encode())


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    yield content


def _processes() -> list[psutil.Process]:
    own = psutil.Process(os.getpid())
    return [own, *own.children(recursive=True)]


@asynccontextmanager
async def served(kept: Path | None = None, **settings: Any) -> AsyncIterator[Served]:
    """With an empty store, gone at the end, or with that of the folder `kept`; `settings` are
    retrieval's own."""
    patient = {"timeout_s": _PATIENCE_S, "index_timeout_s": _PATIENCE_S}
    own = RetrievalSettings.model_validate(patient | settings)
    with tempfile.TemporaryDirectory() as own_folder, EmbeddedRedis() as redis:
        folder = kept or Path(own_folder)
        all_ = Settings(redis_url=redis.url, data_dir=folder, namespace="bench", retrieval=own)
        host = Host(RetrievalService, all_)
        replica = await host.start()
        try:
            async with Transport.of(all_, "gateway").dial(replica.address, "retrieval") as channel:
                assert isinstance(host.service, RetrievalService)
                assert host.service.parts is not None
                stub = retrieval_pb2_grpc.RetrievalStub(channel)
                yield Served(host.service.parts, stub, folder)
        finally:
            await host.stop(grace_s=0)
