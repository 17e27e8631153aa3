"""Vector stores: named sets of files that retrieval keeps as embedded passages.

    {ns}:{tenant}:stores        hash   store id → JSON of StoreRecord

A store is a collection of the retrieval service, a file in it a source. What is searchable is
changed first and the record of it after, so an operation that broke off can be repeated: a removal
is a job's (removals.py).
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import BaseModel

from protos.common_pb2 import Caller
from services.common.errors import PenstockError, invalid, unavailable
from services.common.redis import Redis, RedisAway, Script
from services.gateway.identity.principal import Principal
from services.gateway.ids import STORE, not_found
from services.gateway.jobs.jobs import Jobs
from services.gateway.stores.files import FileRecord, Files, too_many
from services.gateway.stores.indexing import Indexing
from services.gateway.stores.removals import Removal, Removals
from services.gateway.stores.store_files import AttachedFile, StoreFiles, Unready, tenant_key

log = logging.getLogger(__name__)

# Count and store together: stores made at the same time must not pass the limit side by side.
_CREATE = """
local stores, id, record, max_stores = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('HLEN', stores) >= max_stores then return 0 end
return redis.call('HSET', stores, id, record)
"""


class StoreRecord(BaseModel):
    id: str
    name: str
    created_at: int
    metadata: dict[str, str] = {}


def _store_json(record: StoreRecord, files: list[AttachedFile]) -> dict[str, Any]:
    statuses: list[str] = [file.state for file in files]
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
        "usage_bytes": sum(file.bytes for file in files if file.state == "completed"),
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
        store_files: StoreFiles,
        indexing: Indexing,
        jobs: Jobs,
        max_stores: int,
    ) -> None:
        self._redis = redis
        self._namespace = namespace
        self._files = files
        self._store_files = store_files
        self.indexing = indexing
        self.removals = Removals(jobs, self._redo)
        self._max_stores = max_stores
        self._create = Script(redis, _CREATE)

    # ---- stores -----------------------------------------------------------------------------

    async def create(
        self,
        who: Principal,
        caller: Caller,
        name: str,
        metadata: dict[str, str],
        file_ids: list[str],
    ) -> dict[str, Any]:
        """With these files on their way into it, at the cost of `who`. Raises RESOURCE_EXHAUSTED
        ("too_many_vector_stores", "index_queue_full", "storage_full"), and NOT_FOUND for an
        unknown file.
        """
        tenant = caller.tenant
        files = [
            await self._to_index(tenant, id, f"file_ids[{index}]")
            for index, id in enumerate(file_ids)
        ]
        await self.indexing.expect(who, len(files))
        record = StoreRecord(
            id=STORE.new(), name=name, created_at=int(time.time()), metadata=metadata
        )
        told = [record.id, record.model_dump_json(), self._max_stores]
        if not await self._create([self._stores(tenant)], told):
            raise too_many("vector stores", self._max_stores)
        for file in files:
            await self.indexing.begin(who, caller, record.id, file)
        return await self.get(tenant, record.id)

    async def get(self, tenant: str, id: str) -> dict[str, Any]:
        record = await self._record(tenant, id)
        return _store_json(record, await self.files(tenant, id))

    async def ids(self, tenant: str) -> list[str]:
        return [str(id) for id in await self._redis.hkeys(self._stores(tenant))]

    async def some(self, tenant: str, ids: Iterable[str]) -> list[dict[str, Any]]:
        """Those of them that there are. Each is counted out of its files, up to a thousand."""
        found = []
        for id in ids:
            with suppress(PenstockError):  # deleted a moment ago
                found.append(await self.get(tenant, id))
        return found

    async def delete(self, caller: Caller, id: str) -> None:
        await self._record(caller.tenant, id)
        removal = Removal(request_id=caller.request_id, store=id)
        async with self.removals.insured(caller.tenant, removal):
            await self._delete(caller, id)

    async def _delete(self, caller: Caller, id: str) -> None:
        tenant = caller.tenant
        attached = await self.files(tenant, id)
        await self.indexing.remove(caller, id)
        for file in attached:
            await self._files.note_store(tenant, file.id, id, held=False)
        await self._store_files.drop_all(tenant, id)
        await self._remove_again(caller, attached)
        await self._redis.hdel(self._stores(tenant), id)

    async def require(self, tenant: str, ids: Sequence[str]) -> Unready:
        """Raises NOT_FOUND for the first that is not the tenant's; returns which files of them a
        search does not find.

        While Redis is away all pass: retrieval looks at the tenant's own collections only.
        """
        if not ids:
            return Unready()
        params = [f"tools[0].vector_store_ids[{index}]" for index in range(len(ids))]
        for id, param in zip(ids, params, strict=True):
            STORE.checked(id, param)
        try:
            found = await self._redis.hmget(self._stores(tenant), list(ids))
            for id, param, record in zip(ids, params, found, strict=True):
                if record is None:
                    raise not_found("vector store", id, param)
            return await self._store_files.unready(tenant, ids)
        except RedisAway as away:
            log.warning("vector stores not checked, Redis is away: %s", away)
            return Unready()

    # ---- files in a store -------------------------------------------------------------------

    async def unready(self, tenant: str, id: str) -> Unready:
        """Which files of the store a search does not find."""
        await self._record(tenant, id)
        return await self._store_files.unready(tenant, [id])

    async def attach(self, who: Principal, caller: Caller, id: str, file_id: str) -> AttachedFile:
        """Begins to index a file; `file` tells how it went."""
        await self.get(caller.tenant, id)
        file = await self._to_index(caller.tenant, file_id, "file_id")
        return await self.indexing.begin(who, caller, id, file)

    async def files(self, tenant: str, id: str) -> list[AttachedFile]:
        return await self._store_files.all(tenant, id)

    async def file(self, tenant: str, id: str, file_id: str) -> AttachedFile:
        return await self._store_files.get(tenant, id, file_id)

    async def detach(self, caller: Caller, id: str, file_id: str) -> None:
        attached = await self.file(caller.tenant, id, file_id)
        removal = Removal(
            request_id=caller.request_id, store=id, file=file_id, attachment=attached.attachment
        )
        async with self.removals.insured(caller.tenant, removal):
            await self._detach(caller, id, file_id)

    async def _detach(self, caller: Caller, id: str, file_id: str) -> None:
        attached: list[AttachedFile] = []
        with _whole():
            attached.append(await self.file(caller.tenant, id, file_id))
        await self.indexing.remove(caller, id, file_id)
        await self._store_files.drop(caller.tenant, id, file_id)
        await self._remove_again(caller, attached)
        await self._files.note_store(caller.tenant, file_id, id, held=False)

    async def _remove_again(self, caller: Caller, attached: Iterable[AttachedFile]) -> None:
        """What another gateway may have indexed behind its removal, while it was still listed."""
        for file in attached:
            if file.state == "in_progress":
                await self.indexing.remove(caller, file.store, file.id)

    async def delete_file(self, caller: Caller, file_id: str) -> None:
        """Takes it out of every store first."""
        if not await self._files.stores_of(caller.tenant, file_id):
            return await self._files.delete(caller.tenant, file_id)
        removal = Removal(request_id=caller.request_id, file=file_id)
        async with self.removals.insured(caller.tenant, removal):
            await self._delete_file(caller, file_id)

    async def _delete_file(self, caller: Caller, file_id: str) -> None:
        for store in await self._files.stores_of(caller.tenant, file_id):
            await self._detach(caller, store, file_id)
        await self._files.delete(caller.tenant, file_id)

    async def _redo(self, caller: Caller, removal: Removal) -> None:
        """What of it a gateway that was lost had not done."""
        tenant, store, file = caller.tenant, removal.store, removal.file
        with _whole():
            if not store:
                await self._files.get(tenant, file)
                await self._delete_file(caller, file)
            elif not file:
                await self._record(tenant, store)
                await self._delete(caller, store)
            elif await self.indexing.remove_if_gone(caller, store, file):
                return  # it may have been indexed between its removal and the end of its record
            elif (await self.file(tenant, store, file)).attachment == removal.attachment:
                await self._detach(caller, store, file)

    async def _to_index(self, tenant: str, id: str, param: str) -> FileRecord:
        file = await self._files.get(tenant, id, param)
        if file.purpose != "assistants":
            message = f"The file '{id}' is of purpose '{file.purpose}', not 'assistants'."
            raise invalid(message, param, stage="gateway", reason="wrong_purpose")
        return file

    async def _record(self, tenant: str, id: str) -> StoreRecord:
        stored = await self._redis.hget(self._stores(tenant), STORE.checked(id))
        if stored is None:
            raise not_found("vector store", id)
        return StoreRecord.model_validate_json(stored)

    def _stores(self, tenant: str) -> str:
        return tenant_key(self._namespace, tenant, "stores")


@contextmanager
def _whole() -> Iterator[None]:
    """Of what is not there any more nothing is left to do."""
    try:
        yield
    except PenstockError as error:
        if error.reason != "not_found":
            raise


def storage_away() -> PenstockError:
    return unavailable(
        "files and vector stores cannot be reached now: Redis is away",
        stage="gateway",
        reason="storage_unavailable",
    )
