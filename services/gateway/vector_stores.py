"""Vector stores: named sets of files that retrieval keeps as embedded passages.

    {ns}:{tenant}:stores        hash   store id → JSON of StoreRecord
    {ns}:{tenant}:store:<id>    hash   file id → JSON of AttachedFile

A store is a collection of the retrieval service, a file in it a source. What is searchable is
changed first and the record of it after, so an operation that broke off can be repeated.
"""

import asyncio
import logging
import time
from typing import Any, Literal

import grpc
from pydantic import BaseModel

from protos.common_pb2 import Caller
from protos.retrieval_pb2 import IndexRequest, RemoveRequest
from services.common.errors import PenstockError, unavailable
from services.common.redis import Redis, RedisAway, Script
from services.common.telemetry import Telemetry
from services.gateway.files import FileRecord, Files, tenant_key, too_many
from services.gateway.ids import FILE, STORE, not_found
from services.gateway.retrieval_client import RetrievalClient
from services.gateway.turns import Turns

log = logging.getLogger(__name__)

QUEUEING_S = 1800.0  # a file's indexing begins within this, or has failed
INDEXING_S = 600.0  # and ends within this
_INDEX_AT_ONCE = 2
_INDEX_QUEUE = 256  # files of one tenant; tenants are those to whom the operator gave keys
_RETRY_S = 1.0

# Notes the outcome of indexing, unless the file was taken out of the store meanwhile.
_SET_IF_THERE = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""


class StoreRecord(BaseModel):
    id: str
    name: str
    created_at: int
    metadata: dict[str, str] = {}


class AttachedFile(BaseModel):
    """A file in a store."""

    id: str
    store: str
    created_at: int
    bytes: int
    indexing_until: float  # Unix time; an indexing that is not done by then was interrupted
    state: Literal["in_progress", "completed", "failed"] = "in_progress"
    error: str = ""

    @property
    def status(self) -> str:
        if self.state == "in_progress" and time.time() > self.indexing_until:
            return "failed"
        return self.state

    def as_json(self) -> dict[str, Any]:
        failed = self.status == "failed"
        message = self.error or "indexing was interrupted"
        return {
            "id": self.id,
            "object": "vector_store.file",
            "created_at": self.created_at,
            "vector_store_id": self.store,
            "status": self.status,
            "usage_bytes": self.bytes if self.status == "completed" else 0,
            "last_error": {"code": "server_error", "message": message} if failed else None,
            "attributes": {},
        }


def _store_json(record: StoreRecord, files: list[AttachedFile]) -> dict[str, Any]:
    statuses = [file.status for file in files]
    counts = {
        status: statuses.count(status)
        for status in ("in_progress", "completed", "failed", "cancelled")
    }
    return {
        "id": record.id,
        "object": "vector_store",
        "created_at": record.created_at,
        "last_active_at": record.created_at,
        "name": record.name,
        "metadata": record.metadata,
        "status": "in_progress" if counts["in_progress"] else "completed",
        "file_counts": {**counts, "total": len(files)},
        "usage_bytes": sum(file.bytes for file in files if file.status == "completed"),
        "expires_after": None,
        "expires_at": None,
    }


class VectorStores:
    """Methods raise `RedisAway` when Redis is away, NOT_FOUND for an unknown id."""

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        files: Files,
        retrieval: RetrievalClient,
        telemetry: Telemetry,
        max_stores: int,
    ) -> None:
        self._redis = redis
        self._namespace = namespace
        self._files = files
        self._retrieval = retrieval
        self._telemetry = telemetry
        self._max_stores = max_stores
        self._set_if_there = Script(redis, _SET_IF_THERE)
        self._indexing: dict[asyncio.Task[None], str] = {}  # and whose it is
        self._turns = Turns(_INDEX_AT_ONCE)

    # ---- stores -----------------------------------------------------------------------------

    async def create(
        self, caller: Caller, name: str, metadata: dict[str, str], file_ids: list[str]
    ) -> dict[str, Any]:
        tenant = caller.tenant
        if await self._redis.hlen(self._stores(tenant)) >= self._max_stores:
            raise too_many("vector stores", self._max_stores)
        files = [
            await self._files.get(tenant, id, f"file_ids[{index}]")
            for index, id in enumerate(file_ids)
        ]
        record = StoreRecord(
            id=STORE.new(), name=name, created_at=int(time.time()), metadata=metadata
        )
        await self._redis.hset(self._stores(tenant), record.id, record.model_dump_json())
        for file in files:
            await self._attach(caller, record.id, file)
        return await self.get(tenant, record.id)

    async def get(self, tenant: str, id: str) -> dict[str, Any]:
        stored = await self._redis.hget(self._stores(tenant), STORE.checked(id))
        if stored is None:
            raise not_found("vector store", id)
        return _store_json(StoreRecord.model_validate_json(stored), await self.files(tenant, id))

    async def all(self, tenant: str) -> list[dict[str, Any]]:
        records = await self._redis.hvals(self._stores(tenant))
        stores = [StoreRecord.model_validate_json(record) for record in records]
        return [_store_json(store, await self.files(tenant, store.id)) for store in stores]

    async def delete(self, caller: Caller, id: str) -> None:
        tenant = caller.tenant
        await self.get(tenant, id)
        attached = await self.files(tenant, id)
        await self._remove(caller, id, "")
        for file in attached:
            await self._files.note_store(tenant, file.id, id, held=False)
        async with self._redis.pipeline(transaction=True) as both:
            both.delete(self._store(tenant, id))
            both.hdel(self._stores(tenant), id)
            await both.execute()

    async def require(self, tenant: str, ids: tuple[str, ...]) -> None:
        """Raises NOT_FOUND for the first that is not the tenant's.

        While Redis is away all pass: retrieval looks at the tenant's own collections only.
        """
        try:
            for index, id in enumerate(ids):
                param = f"tools[0].vector_store_ids[{index}]"
                if not await self._redis.hexists(self._stores(tenant), STORE.checked(id, param)):
                    raise not_found("vector store", id, param)
        except RedisAway as away:
            log.warning("vector stores not checked, Redis is away: %s", away)

    # ---- files in a store -------------------------------------------------------------------

    async def attach(self, caller: Caller, id: str, file_id: str) -> AttachedFile:
        """Begins to index a file; `file` tells how it went."""
        await self.get(caller.tenant, id)
        return await self._attach(
            caller, id, await self._files.get(caller.tenant, file_id, "file_id")
        )

    async def files(self, tenant: str, id: str) -> list[AttachedFile]:
        stored = await self._redis.hvals(self._store(tenant, id))
        return [AttachedFile.model_validate_json(one) for one in stored]

    async def file(self, tenant: str, id: str, file_id: str) -> AttachedFile:
        key = self._store(tenant, id)
        stored = await self._redis.hget(key, file_id) if FILE.fits(file_id) else None
        if stored is None:
            raise not_found("file in this vector store", file_id)
        return AttachedFile.model_validate_json(stored)

    async def detach(self, caller: Caller, id: str, file_id: str) -> None:
        await self.file(caller.tenant, id, file_id)
        await self._remove(caller, id, file_id)
        await self._redis.hdel(self._store(caller.tenant, id), file_id)
        await self._files.note_store(caller.tenant, file_id, id, held=False)

    async def forget_file(self, caller: Caller, file_id: str) -> None:
        """Takes a file out of every store, before it is deleted."""
        for store in await self._files.stores_of(caller.tenant, file_id):
            await self._remove(caller, store, file_id)
            await self._redis.hdel(self._store(caller.tenant, store), file_id)

    # ---- indexing ---------------------------------------------------------------------------

    async def drain(self, grace_s: float) -> None:
        """Lets indexing under way finish for `grace_s`."""
        if self._indexing:
            await asyncio.wait(self._indexing, timeout=grace_s)

    async def stop(self) -> None:
        """Files whose indexing has not finished are marked as failed."""
        for task in self._indexing:
            task.cancel()
        await asyncio.gather(*self._indexing, return_exceptions=True)

    async def _attach(self, caller: Caller, store: str, file: FileRecord) -> AttachedFile:
        if list(self._indexing.values()).count(caller.tenant) >= _INDEX_QUEUE:
            raise PenstockError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "too many of your files wait to be indexed",
                stage="gateway",
                reason="index_queue_full",
                retry_after_s=5.0,
            )
        attached = AttachedFile(
            id=file.id,
            store=store,
            created_at=int(time.time()),
            bytes=file.bytes,
            indexing_until=time.time() + QUEUEING_S + INDEXING_S,
        )
        await self._files.note_store(caller.tenant, file.id, store, held=True)
        await self._redis.hset(
            self._store(caller.tenant, store), file.id, attached.model_dump_json()
        )
        task = asyncio.create_task(self._index(caller, attached, file), name=f"index {file.id}")
        self._indexing[task] = caller.tenant
        task.add_done_callback(self._indexing.pop)
        return attached

    async def _index(self, caller: Caller, attached: AttachedFile, file: FileRecord) -> None:
        try:
            async with asyncio.timeout(QUEUEING_S):
                await self._turns.take(caller.tenant)
            try:
                async with asyncio.timeout(INDEXING_S):
                    await self._index_now(caller, attached, file)
            finally:
                self._turns.give_back()
            attached.state = "completed"
        except PenstockError as error:
            attached.state, attached.error = "failed", error.message
        except TimeoutError:
            attached.state, attached.error = "failed", "indexing took too long"
        except RedisAway:
            attached.state, attached.error = "failed", "the file could not be read"
        except asyncio.CancelledError:
            attached.state, attached.error = "failed", "the gateway was shut down"
            await self._note_outcome(caller, attached, attempts=1)
            raise
        except Exception:
            log.exception("indexing %s failed", file.id)
            attached.state, attached.error = "failed", "internal error"
        await self._note_outcome(caller, attached, attempts=30)

    async def _index_now(self, caller: Caller, attached: AttachedFile, file: FileRecord) -> None:
        request = IndexRequest(
            caller=caller,
            collection=attached.store,
            source_id=file.id,
            title=file.filename,
            text=await self._files.content(caller.tenant, file.id),
        )
        with self._telemetry.span("index file", file_id=file.id) as span:
            await self._retrieval.index(request, span)
        self._telemetry.record(span)  # no request's record is waiting for this span

    async def _note_outcome(self, caller: Caller, attached: AttachedFile, attempts: int) -> None:
        key = self._store(caller.tenant, attached.store)
        for _ in range(attempts):
            try:
                kept = await self._set_if_there([key], [attached.id, attached.model_dump_json()])
                if not kept and attached.state == "completed":
                    await self._remove(caller, attached.store, attached.id)
                return
            except (*RedisAway, PenstockError) as error:
                log.warning("outcome of indexing %s not noted: %s", attached.id, error)
                await asyncio.sleep(_RETRY_S)

    async def _remove(self, caller: Caller, store: str, file_id: str) -> None:
        with self._telemetry.span("remove") as span:
            request = RemoveRequest(caller=caller, collection=store, source_id=file_id)
            await self._retrieval.remove(request, span)
        self._telemetry.record(span)

    def _stores(self, tenant: str) -> str:
        return tenant_key(self._namespace, tenant, "stores")

    def _store(self, tenant: str, id: str) -> str:
        return tenant_key(self._namespace, tenant, "store", STORE.checked(id))


def storage_away() -> PenstockError:
    return unavailable(
        "files and vector stores cannot be reached now: Redis is away",
        stage="gateway",
        reason="storage_unavailable",
    )
