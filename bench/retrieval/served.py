"""A retrieval service of the bench's own, reached as the gateway reaches it: over gRPC."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.retrieval.sets import Document
from protos import common_pb2, retrieval_pb2_grpc
from protos import retrieval_pb2 as pb
from services.common.config import RetrievalSettings, Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.service import Host
from services.common.transport import Transport
from services.retrieval.server import RetrievalService

_CALLER = common_pb2.Caller(request_id="bench", tenant="bench")
_INDEXED_AT_ONCE = 4
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Served:
    service: RetrievalService
    stub: Any

    async def index(self, collection: str, documents: Iterable[Document]) -> tuple[int, float]:
        """How many chunks they made, and in how many seconds."""
        places, began = asyncio.Semaphore(_INDEXED_AT_ONCE), time.perf_counter()

        async def one(document: Document) -> int:
            request = pb.IndexRequest(
                caller=_CALLER, collection=collection, source_id=document.id,
                title=document.title, text=document.text,
            )  # fmt: skip
            async with places:
                reply = await self.stub.Index(request, timeout=_PATIENCE_S)
            return int(reply.chunks)

        chunks = sum(await asyncio.gather(*map(one, documents)))
        return chunks, time.perf_counter() - began

    async def search(
        self, collection: str, query: str, limit: int, **ranking: Any
    ) -> list[common_pb2.Passage]:
        request = pb.SearchRequest(
            caller=_CALLER, collections=[collection], query=query, limit=limit, **ranking
        )
        reply = await self.stub.Search(request, timeout=_PATIENCE_S)
        return list(reply.passages)


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    """With an empty store, gone at the end; `settings` are retrieval's own."""
    patient = RetrievalSettings(timeout_s=_PATIENCE_S, index_timeout_s=_PATIENCE_S, **settings)
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as redis:
        own = Settings(
            redis_url=redis.url, data_dir=Path(folder), namespace="bench", retrieval=patient
        )
        host = Host(RetrievalService, own)
        replica = await host.start()
        try:
            async with Transport.of(own, "gateway").dial(replica.address, "retrieval") as channel:
                assert isinstance(host.service, RetrievalService)
                yield Served(host.service, retrieval_pb2_grpc.RetrievalStub(channel))
        finally:
            await host.stop(grace_s=0)
