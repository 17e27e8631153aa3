"""Vector stores: named sets of files that retrieval keeps as embedded passages.

A store is a collection of the retrieval service, a file in it a source. What of them is kept where
is store_records.py's. What is searchable is taken out first and the record of it after, so a
removal that broke off can be repeated: it is a job's (removals.py).
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from protos.common_pb2 import Caller
from services.common.errors import PenstockError, invalid, unavailable
from services.common.redis import RedisAway
from services.gateway.identity.principal import Principal
from services.gateway.ids import FILE_BATCH, STORE, not_found
from services.gateway.jobs.jobs import Jobs, Kind
from services.gateway.stores.files.file_record import INDEXED, FileRecord
from services.gateway.stores.files.files import Files
from services.gateway.stores.files.storage_room import too_many
from services.gateway.stores.indexing.indexing import Indexing, Wanted
from services.gateway.stores.indexing.reindexing import Reindexing
from services.gateway.stores.vector_stores.attributes import AttributeChanges
from services.gateway.stores.vector_stores.cancellations import Cancellations
from services.gateway.stores.vector_stores.expiry import Expiry
from services.gateway.stores.vector_stores.removals import Removal, Removals
from services.gateway.stores.vector_stores.store_files import (
    NO_ATTRIBUTES,
    AttachedFile,
    Attributes,
    Chunking,
    Unready,
)
from services.gateway.stores.vector_stores.store_record import FileBatch, Store, StoreRecord
from services.gateway.stores.vector_stores.store_records import StoreRecords, expired

log = logging.getLogger(__name__)


class Attach(NamedTuple):
    """A file that is to go into a store. `param`: what named it."""

    file_id: str
    param: str
    attributes: Attributes = NO_ATTRIBUTES
    chunking: Chunking | None = None


class VectorStores:
    """Methods raise `RedisAway` when Redis is away, NOT_FOUND for an unknown id, INVALID_ARGUMENT
    for a store that expired where it must not have."""

    def __init__(
        self,
        files: Files,
        records: StoreRecords,
        indexing: Indexing,
        reindexing: Reindexing,
        jobs: Jobs,
        max_stores: int,
    ) -> None:
        self._files = files
        self.records = records
        self.indexing = indexing
        self.reindexing = reindexing
        self.attributes = AttributeChanges(jobs, records, indexing.searchable)
        self.expiry = Expiry(jobs, records, self._empty)
        self.removals = Removals(jobs, self._redo)
        self.cancellations = Cancellations(jobs, self._cancel_batch)
        self._max_stores = max_stores

    @property
    def kinds(self) -> Sequence[Kind]:
        """Of jobs."""
        return (
            self.indexing,
            self.reindexing,
            self.removals,
            self.cancellations,
            self.attributes,
            self.expiry,
        )

    # ---- stores -----------------------------------------------------------------------------

    async def create(
        self,
        who: Principal,
        caller: Caller,
        about: Callable[[StoreRecord], StoreRecord],
        files: Sequence[Attach] = (),
    ) -> Store:
        """With these files on their way into it, at the cost of `who`. `about`: says what it is.
        Raises RESOURCE_EXHAUSTED ("too_many_vector_stores", "too_many_files_in_vector_stores",
        "index_queue_full", "storage_full"), and NOT_FOUND for an unknown file.
        """
        tenant = caller.tenant
        wanted = await self._wanted(tenant, files)
        record = about(StoreRecord(id=STORE.new(), name="", created_at=int(time.time())))
        await self.indexing.expect(who, len(wanted), record.embedding_model)
        await self.records.expect(tenant, len(wanted))
        await self.expiry.expect(tenant, record.id, record.expires_days)
        if not await self.records.create(tenant, record, self._max_stores):
            raise too_many("vector stores", self._max_stores)
        if wanted:
            model = record.embedding_model
            await self.indexing.begin(who, caller, record.id, wanted, model=model)
        return await self.records.store(tenant, record.id)

    async def update(
        self, tenant: str, id: str, edit: Callable[[StoreRecord], StoreRecord]
    ) -> Store:
        """Raises INVALID_ARGUMENT for one that expired. What another embedding model than the one
        that it has then indexed is so anew from now on."""
        before = (await self.records.store(tenant, id)).record
        await self.expiry.expect(tenant, id, edit(before).expires_days)
        await self.records.change(tenant, id, edit)
        after = await self.records.store(tenant, id)
        if after.record.embedding_model != before.embedding_model:
            self.reindexing.notice(tenant, [id])
        return after

    async def delete(self, caller: Caller, id: str) -> None:
        """Of several at once one has deleted it."""
        await self.records.store(caller.tenant, id)
        removal = Removal(request_id=caller.request_id, store=id)
        async with self.removals.insured(caller.tenant, removal):
            if not await self._delete(caller, id):
                raise not_found("vector store", id)

    async def _delete(self, caller: Caller, id: str) -> bool:
        before = await self.records.all_files(caller.tenant, id)
        await self.indexing.remove(caller, id)
        was_there, last = await self.records.delete(caller.tenant, id)
        await self._forget(caller, id, before, last)
        return was_there

    async def _empty(self, caller: Caller, id: str) -> None:
        """Of one that expired."""
        before = await self.records.all_files(caller.tenant, id)
        await self.indexing.remove(caller, id)
        await self._forget(caller, id, before, await self.records.clear(caller.tenant, id))

    async def _forget(
        self, caller: Caller, id: str, before: Sequence[AttachedFile], last: Sequence[AttachedFile]
    ) -> None:
        """What was in a store until a moment ago; `before`: when it was last taken out of what is
        searchable."""
        await self._files.note_store(caller.tenant, [file.id for file in last], id, held=False)
        arrived = {file.attachment for file in before if file.state != "in_progress"}
        if any(file.attachment not in arrived for file in last):  # it may be indexed since
            await self.indexing.remove(caller, id)

    async def require(self, tenant: str, ids: Sequence[str]) -> Unready:
        """Raises NOT_FOUND for the first that is not the tenant's, INVALID_ARGUMENT for one that
        expired; returns which files of them a search does not find.

        While Redis is away all pass: retrieval looks at the tenant's own collections only.
        """
        if not ids:
            return Unready()
        params = [f"tools[0].vector_store_ids[{index}]" for index in range(len(ids))]
        try:
            return await self.searched(tenant, ids, params)
        except RedisAway as away:
            log.warning("vector stores not checked, Redis is away: %s", away)
            return Unready()

    async def searched(
        self, tenant: str, ids: Sequence[str], params: Sequence[str] | None = None
    ) -> Unready:
        """`StoreRecords.searched`; what of them another embedding model indexed is so anew from
        now on."""
        found = await self.records.searched(tenant, ids, params, self.reindexing.embedders)
        self.reindexing.notice(tenant, found.aged)
        return found

    # ---- files in a store -------------------------------------------------------------------

    async def attach(self, who: Principal, caller: Caller, id: str, one: Attach) -> AttachedFile:
        """Begins to index a file; its record tells how it went."""
        record = await self.require_usable(caller.tenant, id)
        wanted = await self._wanted(caller.tenant, [one])
        model = record.embedding_model
        (attached,) = await self.indexing.begin(who, caller, id, wanted, model=model)
        return attached

    async def detach(self, caller: Caller, id: str, file_id: str) -> None:
        attached = await self.records.file(caller.tenant, id, file_id)
        removal = Removal(
            request_id=caller.request_id, store=id, file=file_id, attachment=attached.attachment
        )
        async with self.removals.insured(caller.tenant, removal):
            if not await self._detach(caller, attached):
                await self.records.file(caller.tenant, id, file_id)  # another call took it out

    async def _detach(self, caller: Caller, attached: AttachedFile) -> bool:
        """As it was attached: what was attached anew meanwhile stays. False: this took nothing
        out."""
        tenant, place = caller.tenant, (attached.store, attached.id)
        if not await self.indexing.remove_file(caller, *place, attached.attachment):
            return False
        dropped = await self.records.drop(tenant, *place, attached.attachment)
        if attached.state == "in_progress":  # another gateway may have indexed it since
            await self.indexing.remove_file(caller, *place)
        await self._forget_store(tenant, *place)
        return dropped

    async def _forget_store(self, tenant: str, store: str, file_id: str) -> None:
        await self._files.note_store(tenant, [file_id], store, held=False)
        if await self.records.files(tenant, store, [file_id]):  # attached anew
            await self._files.note_store(tenant, [file_id], store, held=True)

    async def delete_file(self, caller: Caller, file_id: str) -> None:
        """Takes it out of every store first. Of several at once one has deleted it."""
        if not await self._files.stores_of(caller.tenant, file_id):
            was_there = await self._files.delete(caller.tenant, file_id)
        else:
            removal = Removal(request_id=caller.request_id, file=file_id)
            async with self.removals.insured(caller.tenant, removal):
                was_there = await self._delete_file(caller, file_id)
        if not was_there:
            raise not_found("file", file_id)

    async def _delete_file(self, caller: Caller, file_id: str) -> bool:
        for store in await self._files.stores_of(caller.tenant, file_id):
            for attached in await self.records.files(caller.tenant, store, [file_id]):
                await self._detach(caller, attached)
            if await self.indexing.remove_file(caller, store, file_id):
                await self._forget_store(caller.tenant, store, file_id)
        return await self._files.delete(caller.tenant, file_id)

    async def _redo(self, caller: Caller, removal: Removal) -> None:
        """What of it a gateway that was lost had not done."""
        tenant, store, file = caller.tenant, removal.store, removal.file
        if not store:
            await self._files.get(tenant, file)
            await self._delete_file(caller, file)
        elif not file:
            await self._delete(caller, store)
        elif await self.indexing.remove_file(caller, store, file):
            await self._forget_store(tenant, store, file)  # its record was gone already
        else:
            attached = await self.records.file(tenant, store, file)
            if attached.attachment == removal.attachment:
                await self._detach(caller, attached)

    # ---- batches of files -------------------------------------------------------------------

    async def attach_all(
        self, who: Principal, caller: Caller, id: str, files: Sequence[Attach]
    ) -> FileBatch:
        record = await self.require_usable(caller.tenant, id)
        wanted = await self._wanted(caller.tenant, files)
        batch = FileBatch(id=FILE_BATCH.new(), store=id, created_at=int(time.time()))
        await self.indexing.begin(who, caller, id, wanted, batch, record.embedding_model)
        return batch

    async def cancel_batch(self, caller: Caller, id: str, batch_id: str) -> None:
        """What has not arrived by now does not. One that has ended stays as it is."""
        await self.records.batch(caller.tenant, id, batch_id)
        await self.cancellations.begin(caller, id, batch_id)

    async def _cancel_batch(self, caller: Caller, id: str, batch_id: str) -> None:
        tenant = caller.tenant
        batch, _ = await self.records.batch(tenant, id, batch_id)
        await self.records.cancel(tenant, batch)

        def cancelled(file: AttachedFile) -> AttachedFile | None:
            if file.batch != batch_id or file.state != "in_progress":
                return None
            return file.model_copy(update={"state": "cancelled"})

        for file in await self.records.all_files(tenant, id):
            if cancelled(file) is not None:
                with _whole():
                    await self.records.change_file(tenant, id, file.id, cancelled)
                    await self.indexing.on_the_way.cancel(tenant, id, [file.id])

    # ---- what a request names ---------------------------------------------------------------

    async def require_usable(self, tenant: str, id: str) -> StoreRecord:
        """Raises NOT_FOUND, INVALID_ARGUMENT for one that expired."""
        store = await self.records.store(tenant, id)
        if store.expired:
            raise expired(id)
        return store.record

    async def _wanted(self, tenant: str, files: Iterable[Attach]) -> list[Wanted]:
        files = list(files)
        found = await self._files.some(tenant, [(one.file_id, one.param) for one in files])
        return [
            Wanted(_to_index(record, one.param), one.attributes, one.chunking)
            for record, one in zip(found, files, strict=True)
        ]


def _to_index(file: FileRecord, param: str) -> FileRecord:
    if file.purpose not in INDEXED:
        message = f"The file '{file.id}' is of purpose '{file.purpose}', not 'assistants'."
        raise invalid(message, param, stage="gateway", reason="wrong_purpose")
    return file


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
