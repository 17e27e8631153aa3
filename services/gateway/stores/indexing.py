"""Files on their way into vector stores: each is read, sent to retrieval, and its outcome noted.

They are durable jobs: a gateway that ends, or is killed, leaves its own to others. A file may be
taken out of its store while it is on its way, here or at another gateway. Whatever became of it
then, what retrieval may hold of it is removed last.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import grpc
from pydantic import BaseModel

from protos import retrieval_pb2
from protos.common_pb2 import Caller, Usage
from protos.retrieval_pb2 import (
    IndexProgress,
    IndexReply,
    IndexRequest,
    RemoveRequest,
    SetAttributesRequest,
)
from services.common.errors import PenstockError
from services.common.redis import RedisAway
from services.common.telemetry import Telemetry
from services.gateway.identity.principal import Principal, Refused
from services.gateway.identity.standing import Grantee, Standing
from services.gateway.jobs.jobs import Jobs, Later
from services.gateway.jobs.places import Places
from services.gateway.jobs.queue import Claimed, Queue
from services.gateway.metering.estimate import of_bytes
from services.gateway.metering.meter import Meter, Metered
from services.gateway.stores.files import FileRecord, Files
from services.gateway.stores.retrieval_client import INDEX_PATIENCE_S, RetrievalClient
from services.gateway.stores.store_files import (
    NO_ATTRIBUTES,
    AttachedFile,
    Attributes,
    Chunking,
    Progress,
    attribute_values,
)
from services.gateway.stores.store_record import FileBatch
from services.gateway.stores.store_records import StoreRecords

log = logging.getLogger(__name__)

ROUTE = "index"  # in the ledger
QUEUEING_S = 1800.0  # a file waits so long for room in limits, or has failed
INDEXING_S = 2700.0  # its indexing ends within this
_AT_ONCE = 2
_QUEUE = 4096  # files of one tenant; tenants are those to whom the operator gave keys
_RETRY_S = 1.0
_RETRIES = 30
_NOTED_EVERY_S = 1.0  # how far it is
_LOSSES = frozenset({"index_lost", "document_changed"})
_MOST_LOSSES = 2
_AGAIN_S = 2.0
_FOR_NOW = ("rate_limit_exceeded", "limits_unavailable")  # for which a file waits
# Likewise while it is indexed; each is found out before much of it is embedded.
_AWAY = frozenset({"blobs_unavailable", "revisions_away", "store_away", "queue_full"})


Tell = Callable[[IndexProgress], Awaitable[None]]


class Wanted(NamedTuple):
    """A file that is to go into a store, and what is said of it there."""

    file: FileRecord
    attributes: Attributes = NO_ATTRIBUTES
    chunking: Chunking | None = None


class Attachment(BaseModel):
    """Which file, where. What else a task tells may be unknown to this version; this never is."""

    store: str
    file: str
    attachment: str
    request_id: str = ""


class Task(Attachment):
    """What is to be indexed, and for whom. An attachment is charged once, whoever settles it."""

    who: Grantee
    losses: int = 0  # of retrieval, while it was at it


class _Place(NamedTuple):
    """Where a file is going."""

    tenant: str
    store: str
    file: str


class Indexing:
    """jobs.Kind."""

    name = "index"

    def __init__(
        self,
        files: Files,
        records: StoreRecords,
        retrieval: RetrievalClient,
        meter: Meter,
        telemetry: Telemetry,
        jobs: Jobs,
        standing: Standing,
        max_chars: int,
    ) -> None:
        """`max_chars`: of one file's text, which retrieval takes."""
        self.places = Places(_AT_ONCE)
        self._files = files
        self._records = records
        self._retrieval = retrieval
        self._meter = meter
        self._telemetry = telemetry
        self._jobs = jobs
        self._standing = standing
        self._most_chars = max_chars
        self._running: dict[asyncio.Task[None], _Place] = {}

    async def expect(self, who: Principal, files: int) -> None:
        """Raises RESOURCE_EXHAUSTED ("index_queue_full") when so many more of the tenant's files
        are too many, or "storage_full"; PERMISSION_DENIED where he may not use the embedding
        model."""
        if files and (model := self._retrieval.embedding_model):  # else asked when it is known
            who.authorize_embedding(model)
        self._files.room.check()
        if files and await self._jobs.queues.size(self._queue(who.tenant)) + files > _QUEUE:
            raise PenstockError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "too many of your files wait to be indexed",
                stage="gateway",
                reason="index_queue_full",
                retry_after_s=5.0,
            )

    async def begin(
        self,
        who: Principal,
        caller: Caller,
        store: str,
        wanted: Sequence[Wanted],
        batch: FileBatch | None = None,
    ) -> list[AttachedFile]:
        """Attaches files and indexes them in the background, at the cost of `who`. Raises as
        `expect` does, NOT_FOUND where the store is gone, INVALID_ARGUMENT where it expired."""
        tenant, now = caller.tenant, int(time.time())
        await self.expect(who, len(wanted))
        attached = [
            AttachedFile(
                id=file.id,
                store=store,
                filename=file.filename,
                created_at=now,
                bytes=file.bytes,
                attributes=attributes,
                chunking=chunking,
                batch=batch.id if batch is not None else "",
            )
            for file, attributes, chunking in wanted
        ]
        ids = [file.id for file in attached]
        await self.cancel(tenant, store, ids)
        tasks = [
            Task(
                who=Grantee.of(who, now),
                request_id=caller.request_id,
                store=store,
                file=file.id,
                attachment=file.attachment,
            ).model_dump_json()
            for file in attached
        ]
        async with self._jobs.promised(self._queue(tenant), *tasks):
            await self._files.note_store(tenant, ids, store, held=True)
            try:
                await self._records.put(tenant, store, attached, batch)
            except PenstockError:  # the store was deleted a moment ago
                await self._files.note_store(tenant, ids, store, held=False)
                raise
            # A removal of an earlier attachment may have forgotten the store in between.
            await self._files.note_store(tenant, ids, store, held=True)
        return attached

    async def remove(self, caller: Caller, store: str) -> None:
        """Takes all of the store out of what is searchable, and off its way there."""
        await self.cancel(caller.tenant, store)
        await self._remove(RemoveRequest(caller=caller, collection=store))

    async def remove_file(
        self, caller: Caller, store: str, file_id: str, attachment: str = ""
    ) -> bool:
        """The same of a file, as it was attached; without that: of one that is there no more.
        Nothing of what was attached anew meanwhile; then False."""
        await self.cancel(caller.tenant, store, [file_id])
        return await self._unindex(caller, store, file_id, attachment)

    async def describe(self, caller: Caller, store: str, file_id: str) -> None:
        """Searches find the file by the attributes that its record has."""
        told: Attributes | None = None
        while True:
            file = await self._records.file(caller.tenant, store, file_id)
            if file.state != "completed" or file.attributes == told:
                return  # one on its way is told of as it arrives
            told = file.attributes
            await self._describe(caller, file)

    async def cancel(self, tenant: str, store: str, files: Collection[str] = ()) -> None:
        """Ends what is on its way at this gateway; without files, all of the store."""
        tasks = list(self._on_the_way(tenant, store, files))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- jobs.Kind ----------------------------------------------------------------------------

    async def run(self, job: Claimed) -> None:
        task, tenant = Task.model_validate_json(job.body), job.queue.tenant
        attached = await self._attached(tenant, task)
        if attached is None:
            if job.claims > 1:  # whoever had it may have been in the middle of it
                await self._forget(_caller(job, task), task)
            return
        work = asyncio.create_task(self._carry(job, task, attached), name=f"index {task.file}")
        self._running[work] = _Place(tenant, task.store, task.file)
        work.add_done_callback(self._running.pop)
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise
        if not work.cancelled():
            return work.result()
        # By `cancel`: whoever takes it out, or attaches it anew, may fail or be lost before he has.
        await self._forget(_caller(job, task), task)
        if await self._attached(tenant, task) is not None:
            raise Later(job.body, _AGAIN_S)

    async def give_up(self, job: Claimed, why: str) -> None:
        task = Attachment.model_validate_json(job.body)
        if (attached := await self._attached(job.queue.tenant, task)) is not None:
            attached.fail(why)
            await self._note_outcome(_caller(job, task), attached)

    async def _carry(self, job: Claimed, task: Task, attached: AttachedFile) -> None:
        caller = _caller(job, task)
        try:
            who = await self._standing.of(task.who)
            metered = await self._let_in(who, job, attached)
            try:
                async with asyncio.timeout(INDEXING_S):
                    reply = await self._index(who.caller(task.request_id), attached)
                metered.usage = lambda: Usage(prompt_tokens=reply.tokens)
                await self._meter.settle(metered)
                attached.note = reply.note
            except BaseException as error:
                self._meter.end(metered, error)
                raise
            attached.state = "completed"
        except PenstockError as error:
            if error.reason in _LOSSES and task.losses < _MOST_LOSSES:
                again = task.model_copy(update={"losses": task.losses + 1})
                raise Later(again.model_dump_json(), _AGAIN_S) from None
            if error.reason in _AWAY and _may_wait(attached):
                raise Later(job.body, error.retry_after_s or _AGAIN_S) from None
            attached.fail(error)
        except Refused as refused:
            attached.fail(str(refused))
        except TimeoutError:
            attached.fail("indexing took too long")
        except (Later, *RedisAway):
            raise
        except Exception:
            log.exception("indexing %s failed", task.file)
            attached.fail("internal error")
        await self._note_outcome(caller, attached)

    async def _let_in(self, who: Principal, job: Claimed, attached: AttachedFile) -> Metered:
        """With room in all limits. Raises Later where one has none for now."""
        model = await self._retrieval.model(INDEX_PATIENCE_S)
        who.authorize_embedding(model)
        id = f"{attached.id}:{attached.attachment}"
        most = (of_bytes(min(attached.bytes, self._most_chars)), 0)
        try:
            return await self._meter.admit(who, id, ROUTE, model, most)
        except PenstockError as error:
            if error.reason not in _FOR_NOW:
                raise
            if not _may_wait(attached):
                raise TimeoutError from None
            raise Later(job.body, error.retry_after_s) from None

    async def _index(self, caller: Caller, attached: AttachedFile) -> IndexReply:
        place = (attached.store, attached.id)
        revision = await self._records.revise(caller.tenant, *place, attached.attachment)
        if not revision:  # nobody wants it any more
            raise asyncio.CancelledError
        request = IndexRequest(
            caller=caller,
            collection=attached.store,
            source_id=attached.id,
            title=attached.filename,
            blob=await self._files.in_blob(caller.tenant, attached.id),
            chunking=_chunking(attached),
            revision=revision,
            attributes=attribute_values(attached.attributes),
        )
        with self._telemetry.lone_span("index file", file_id=attached.id) as span:
            return await self._retrieval.index(request, span, self._progress(caller, attached))

    def _progress(self, caller: Caller, attached: AttachedFile) -> Tell:
        """How far it is, noted in its record, though not each time that it is told."""
        place, noted = (caller.tenant, attached.store, attached.id), -_NOTED_EVERY_S

        async def tell(progress: IndexProgress) -> None:
            nonlocal noted
            if time.monotonic() - noted < _NOTED_EVERY_S:
                return
            noted = time.monotonic()
            now = Progress(done=progress.done, chunks=progress.chunks)

            def going_on(file: AttachedFile) -> AttachedFile | None:
                if not _waits(file, attached.attachment):
                    return None
                return file.model_copy(update={"progress": now})

            with suppress(PenstockError, *RedisAway):  # how it ends is noted in any case
                await self._records.change_file(*place, going_on)

        return tell

    # ---- its outcome --------------------------------------------------------------------------

    async def _attached(self, tenant: str, task: Attachment) -> AttachedFile | None:
        """None: it was taken out, attached anew, or it is known how it ended."""
        for attached in await self._records.files(tenant, task.store, [task.file]):
            if _waits(attached, task.attachment):
                return attached
        return None

    async def _note_outcome(self, caller: Caller, ended: AttachedFile) -> None:
        for tries in range(1, _RETRIES + 1):
            try:
                return await self._settle(caller, ended)
            except (*RedisAway, PenstockError) as error:
                log.warning("outcome of indexing %s not noted: %s", ended.id, error)
                if tries == _RETRIES:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _settle(self, caller: Caller, ended: AttachedFile) -> None:
        """Unless it was taken out, cancelled or attached anew meanwhile: then nothing of it
        stays."""
        place = (caller.tenant, ended.store, ended.id)
        told = ended.attributes

        def settled(file: AttachedFile) -> AttachedFile | None:
            if not _waits(file, ended.attachment) or file.attributes != told:
                return None
            how = ("state", "error", "error_code", "note")
            told_of = {name: getattr(ended, name) for name in how}
            return file.model_copy(update={**told_of, "progress": None})

        while True:
            try:
                file = await self._records.change_file(*place, settled)
            except PenstockError:  # it is there no more
                await self._unindex(caller, ended.store, ended.id)
                return
            if file.attachment != ended.attachment:
                return
            if file.state == "cancelled":
                await self._unindex(caller, ended.store, ended.id, ended.attachment)
                return
            if file.state != "in_progress":
                return
            told = file.attributes  # others than those that it was indexed with
            if ended.state == "completed":
                await self._describe(caller, file)

    async def _unindex(
        self, caller: Caller, store: str, file_id: str, attachment: str = ""
    ) -> bool:
        """`remove_file`, where nothing is on its way."""
        revision = await self._records.revise(caller.tenant, store, file_id, attachment)
        if revision:
            place = {"collection": store, "source_id": file_id}
            await self._remove(RemoveRequest(caller=caller, revision=revision, **place))
        return revision > 0

    async def _forget(self, caller: Caller, task: Attachment) -> None:
        """What may have been indexed of a file that is no longer in the store, or cancelled."""
        for file in await self._records.files(caller.tenant, task.store, [task.file]):
            if file.attachment == task.attachment and file.state == "cancelled":
                await self._unindex(caller, task.store, task.file, task.attachment)
            return
        await self._unindex(caller, task.store, task.file)

    async def _remove(self, request: RemoveRequest) -> None:
        with self._telemetry.lone_span("remove") as span:
            await self._retrieval.remove(request, span)

    async def _describe(self, caller: Caller, file: AttachedFile) -> None:
        request = SetAttributesRequest(
            caller=caller,
            collection=file.store,
            source_id=file.id,
            attributes=attribute_values(file.attributes),
        )
        with self._telemetry.lone_span("set attributes", file_id=file.id) as span:
            await self._retrieval.set_attributes(request, span)

    def _on_the_way(
        self, tenant: str, store: str, files: Collection[str]
    ) -> Iterator["asyncio.Task[None]"]:
        for task, place in self._running.items():
            if (place.tenant, place.store) == (tenant, store) and (
                not files or place.file in files
            ):
                yield task

    def _queue(self, tenant: str) -> Queue:
        return Queue(self.name, tenant, "files")


def _waits(file: AttachedFile, attachment: str) -> bool:
    return file.state == "in_progress" and file.attachment == attachment


def _may_wait(file: AttachedFile) -> bool:
    return time.time() <= file.created_at + QUEUEING_S


def _chunking(attached: AttachedFile) -> retrieval_pb2.Chunking | None:
    cut = attached.chunking
    if cut is None:
        return None
    return retrieval_pb2.Chunking(max_tokens=cut.max_tokens, overlap_tokens=cut.overlap_tokens)


def _caller(job: Claimed, task: Attachment) -> Caller:
    return Caller(tenant=job.queue.tenant, request_id=task.request_id)
