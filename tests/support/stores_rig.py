"""Files and vector stores on a real Redis, with a retrieval that does as a test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from protos.common_pb2 import Caller
from protos.retrieval_pb2 import (
    IndexProgress,
    IndexReply,
    IndexRequest,
    RemoveRequest,
    SetAttributesRequest,
)
from services.common.config import GatewaySettings, JobsSettings, RetrievalSettings, Settings
from services.common.config.retrieval import ServedEmbedder
from services.common.errors import PenstockError
from services.common.redis import Redis
from services.common.telemetry.telemetry import Telemetry
from services.gateway.identity.principal import Principal, Refused
from services.gateway.identity.standing import Grantee
from services.gateway.identity.tenants import Priority
from services.gateway.jobs import jobs
from services.gateway.jobs.jobs import Jobs
from services.gateway.stores.files.file_record import FileRecord
from services.gateway.stores.files.files import Files
from services.gateway.stores.indexing.indexing import Indexing
from services.gateway.stores.indexing.reindexing import Reindexing
from services.gateway.stores.indexing.served_embedders import ServedEmbedders
from services.gateway.stores.vector_stores.store_files import AttachedFile
from services.gateway.stores.vector_stores.store_record import StoreRecord
from services.gateway.stores.vector_stores.store_records import StoreRecords
from services.gateway.stores.vector_stores.vector_stores import Attach, VectorStores
from tests.support.blob_folder import memory_blobs, pieces
from tests.support.gateway_parts import SharedMeter, Tokenizers, meter, principal
from tests.support.waiting import until

WHO, THEIRS = principal("acme"), principal("rival")
CALLER, RIVAL = (who.caller("r") for who in (WHO, THEIRS))


class ScriptedRetrieval:
    """Takes all; while `gate` is not set, it waits over each file."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.let_go = asyncio.Event()
        self.let_go.set()  # cleared: what is cancelled ends only then
        self.cancelled = 0
        self.failure: Exception | None = None  # of indexing
        self.remove_failures: list[PenstockError] = []  # of the next removals
        self.documents: dict[tuple[str, str, str], IndexRequest] = {}
        self.removed: list[tuple[str, str, str]] = []
        self.blobs = memory_blobs()
        self.progress: list[IndexProgress] = []  # that is told of each file
        self.note = ""
        self.embedding_model = ""
        self.embedder = "e1"
        self.further: dict[str, str] = {}  # fingerprints of further models, by name
        self.by: dict[tuple[str, str, str], str] = {}  # who embedded a document
        self.embedded: list[tuple[str, str]] = []  # by whom, whose file; each time
        self.failures: dict[str, Exception] = {}  # of a file
        self.last = IndexRequest()
        self.vectors: list[Any] = []  # TextVectors that were told
        self.rounds = 1  # in which it asks for those of a file
        self.begun = 0
        self.indexing = 0
        self.most_at_once = 0

    @property
    def fingerprints(self) -> dict[str, str]:
        return {**self.further, "": self.embedder}

    async def model(self, patience_s: float = 0.0) -> str:
        self.embedding_model = "tiny-embed"
        return self.embedding_model

    async def index(
        self, request: IndexRequest, span: Any, tell: Any, embed: Any = None
    ) -> IndexReply:
        self.begun += 1
        self.last = request
        self.indexing += 1
        self.most_at_once = max(self.most_at_once, self.indexing)
        try:
            await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            if request.source_id in self.failures:
                raise self.failures[request.source_id]
            place = (request.caller.tenant, request.collection, request.source_id)
            embedder = self.fingerprints[request.embedder]
            if request.reindexing and self.by.get(place) == embedder:
                return IndexReply(embedder=embedder)
            self.by[place] = embedder
            self.embedded.append((embedder, request.source_id))
            there = self.documents.get(place)
            if there is None or there.revision <= request.revision:
                self.documents[place] = request
            for progress in self.progress:
                await tell(progress)
            text = b"".join([piece async for piece in self.blobs.read(request.blob)])
            if embed is not None:
                for _ in range(self.rounds):
                    self.vectors.append(await embed([text.decode()], span))
                return IndexReply(tokens=self.vectors[-1].tokens, embedder=embedder)
            return IndexReply(tokens=len(text.split()), note=self.note, embedder=embedder)
        except asyncio.CancelledError:
            self.cancelled += 1
            await self.let_go.wait()
            raise
        finally:
            self.indexing -= 1

    async def remove(self, request: RemoveRequest, span: Any) -> None:
        if self.remove_failures:
            raise self.remove_failures.pop(0)
        tenant, store, file = request.caller.tenant, request.collection, request.source_id
        self.removed.append((tenant, store, file))
        for place, document in list(self.documents.items()):
            is_meant = place[:2] == (tenant, store) and file in ("", place[2])
            if is_meant and (not request.revision or document.revision <= request.revision):
                del self.documents[place]

    async def set_attributes(self, request: SetAttributesRequest, span: Any) -> None:
        place = (request.caller.tenant, request.collection, request.source_id)
        if place in self.documents:
            document = self.documents[place]
            document.ClearField("attributes")
            document.MergeFrom(IndexRequest(attributes=request.attributes))


class Standings:
    """standing.Standing, of principals that a test has."""

    def __init__(self, who: dict[str, Principal]) -> None:
        self._who = who

    async def of_tenant(self, name: str, user: str, priority: Priority) -> Principal:
        if name not in self._who:
            raise Refused("suspended", "The tenant is suspended.")
        return replace(self._who[name], user=user, priority=priority)

    async def of(self, who: Grantee) -> Principal:
        if who.tenant not in self._who:
            raise Refused("revoked", "The API key was revoked.")
        return self._who[who.tenant]


class StoresRig:
    """What of one gateway holds files; several on one Redis and one retrieval are several gateways.

    Limits: ten vector stores a tenant, and twenty files in them.
    """

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        retrieval: ScriptedRetrieval | None = None,
        name: str = "gateway-1",
    ) -> None:
        self.redis = redis
        self.namespace = namespace
        self.retrieval = retrieval or ScriptedRetrieval()
        self.files = Files(redis, namespace, GatewaySettings(), self.retrieval.blobs)
        self.records = StoreRecords(redis, namespace, max_files=20, max_attribute_bytes=2**20)
        self.metered = SharedMeter()
        self.jobs = Jobs(redis, namespace, name, JobsSettings(lease_s=60))
        self.who = {one.tenant: one for one in (WHO, THEIRS)}  # as they stand
        self.tokenizers = Tokenizers()  # of served embedding models
        telemetry = Telemetry("gateway", name)
        served = {"axes": ServedEmbedder(dimension=3)}
        settings = Settings(retrieval=RetrievalSettings(served_embedders=served))
        self.embedders = ServedEmbedders(settings, cast(Any, self.tokenizers), telemetry)
        self.indexing = Indexing(
            self.files,
            self.records,
            cast(Any, self.retrieval),
            meter(self.metered),
            telemetry,
            self.jobs,
            cast(Any, Standings(self.who)),
            self.embedders,
            max_chars=1000,
        )
        self.reindexing = Reindexing(
            self.records,
            self.indexing.searchable,
            self.indexing.on_the_way,
            cast(Any, self.retrieval),
            self.indexing._meter,
            self.jobs,
            cast(Any, Standings(self.who)),
            max_chars=1000,
        )
        self.stores = VectorStores(
            self.files, self.records, self.indexing, self.reindexing, self.jobs, max_stores=10
        )

    @asynccontextmanager
    async def another(self) -> AsyncIterator["StoresRig"]:
        """Another gateway."""
        other = StoresRig(self.redis, self.namespace, self.retrieval, "gateway-2")
        async with other.running():
            yield other

    @asynccontextmanager
    async def running(self) -> AsyncIterator["StoresRig"]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jobs, "_LOOK_EVERY_S", 0.05)  # tests wait for what is to come later
            self.jobs.start(self.stores.kinds, lambda: False)
            try:
                yield self
            finally:
                await self.jobs.stop()

    async def arrived(self) -> None:
        """All files, wherever they were to go."""

        async def all_have() -> bool:
            kinds = ("index", "reindex")
            return [await self.jobs.queues.counts(kind) for kind in kinds] == [(0, 0)] * 2

        await until(all_have, 10, "all are indexed")

    async def file(self, text: str = "text", tenant: str = "acme") -> FileRecord:
        return await self.files.create(tenant, "a.txt", pieces(text.encode()))

    async def store(self, *files: FileRecord, caller: Caller = CALLER, **about: Any) -> str:
        who = THEIRS if caller is RIVAL else WHO

        def named(record: StoreRecord) -> StoreRecord:
            return record.model_copy(update={"name": "s", **about})

        wanted = [Attach(file.id, f"file_ids[{n}]") for n, file in enumerate(files)]
        return (await self.stores.create(who, caller, named, wanted)).record.id

    async def attach(self, store: str, file: FileRecord, **more: Any) -> AttachedFile:
        return await self.stores.attach(WHO, CALLER, store, Attach(file.id, "file_id", **more))

    async def told(self, store: str) -> dict[str, Any]:
        return (await self.records.store("acme", store)).as_json()

    async def statuses(self, store: str) -> list[str]:
        return [file.state for file in await self.records.all_files("acme", store)]
