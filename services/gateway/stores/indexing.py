"""Files on their way into vector stores: each is read, sent to retrieval, and its outcome noted.

They are durable jobs: a gateway that ends, or is killed, leaves its own to others. A file may be
taken out of its store while it is on its way, here or at another gateway. Whatever became of it
then, what retrieval may hold of it is removed last.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

import grpc
from pydantic import BaseModel

from protos.common_pb2 import Caller, Usage
from protos.retrieval_pb2 import IndexReply, IndexRequest, RemoveRequest
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
from services.gateway.stores.retrieval_client import INDEX_TIMEOUT_S, RetrievalClient
from services.gateway.stores.store_files import AttachedFile, StoreFiles

log = logging.getLogger(__name__)

ROUTE = "index"  # in the ledger
QUEUEING_S = 1800.0  # a file waits so long for room in limits, or has failed
INDEXING_S = 600.0  # its indexing ends within this
_AT_ONCE = 2
_QUEUE = 256  # files of one tenant; tenants are those to whom the operator gave keys
_RETRY_S = 1.0
_RETRIES = 30
_FOR_NOW = ("rate_limit_exceeded", "limits_unavailable")  # for which a file waits


class Task(BaseModel):
    """What is to be indexed, and for whom. An attachment is charged once, whoever settles it."""

    who: Grantee
    request_id: str
    store: str
    file: str
    attachment: str


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
        store_files: StoreFiles,
        retrieval: RetrievalClient,
        meter: Meter,
        telemetry: Telemetry,
        jobs: Jobs,
        standing: Standing,
    ) -> None:
        self.places = Places(_AT_ONCE)
        self._files = files
        self._store_files = store_files
        self._retrieval = retrieval
        self._meter = meter
        self._telemetry = telemetry
        self._jobs = jobs
        self._standing = standing
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
        self, who: Principal, caller: Caller, store: str, file: FileRecord
    ) -> AttachedFile:
        """Attaches the file and indexes it in the background, at the cost of `who`. Raises as
        `expect` does."""
        tenant, now = caller.tenant, int(time.time())
        await self.expect(who, 1)
        await self.cancel(tenant, store, file.id)
        attached = AttachedFile(
            id=file.id, store=store, filename=file.filename, created_at=now, bytes=file.bytes
        )
        task = Task(
            who=Grantee.of(who, now),
            request_id=caller.request_id,
            store=store,
            file=file.id,
            attachment=attached.attachment,
        )
        async with self._jobs.promised(self._queue(tenant), task.model_dump_json()):
            await self._files.note_store(tenant, file.id, store, held=True)
            await self._store_files.put(tenant, attached)
        return attached

    async def remove(self, caller: Caller, store: str, file_id: str = "") -> None:
        """Takes a file, or all of the store, out of what is searchable, and off its way there."""
        await self.cancel(caller.tenant, store, file_id)
        await self._unindex(caller, store, file_id)

    async def remove_if_gone(self, caller: Caller, store: str, file_id: str) -> bool:
        """Whether it is in the store no more; then nothing of it is searchable either."""
        try:
            await self._store_files.get(caller.tenant, store, file_id)
        except PenstockError:
            await self._unindex(caller, store, file_id)
            return True
        return False

    async def cancel(self, tenant: str, store: str, file_id: str = "") -> None:
        """Ends what is on its way at this gateway; without a file, all of the store."""
        tasks = list(self._on_the_way(tenant, store, file_id))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- jobs.Kind ----------------------------------------------------------------------------

    async def run(self, job: Claimed) -> None:
        task, tenant = Task.model_validate_json(job.body), job.queue.tenant
        attached = await self._attached(tenant, task)
        if attached is None:
            if job.claims > 1:  # whoever had it may have been in the middle of it
                await self.remove_if_gone(_caller(job, task), task.store, task.file)
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
        if not work.cancelled():  # by `cancel`: nobody wants it any more
            work.result()

    async def give_up(self, job: Claimed, why: str) -> None:
        task = Task.model_validate_json(job.body)
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
            except BaseException as error:
                self._meter.end(metered, error)
                raise
            attached.state = "completed"
        except PenstockError as error:
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
        model = await self._retrieval.model(INDEX_TIMEOUT_S)
        who.authorize_embedding(model)
        id, most = f"{attached.id}:{attached.attachment}", (of_bytes(attached.bytes), 0)
        try:
            return await self._meter.admit(who, id, ROUTE, model, most)
        except PenstockError as error:
            if error.reason not in _FOR_NOW:
                raise
            if time.time() > attached.created_at + QUEUEING_S:
                raise TimeoutError from None
            raise Later(job.body, error.retry_after_s) from None

    async def _index(self, caller: Caller, attached: AttachedFile) -> IndexReply:
        request = IndexRequest(
            caller=caller,
            collection=attached.store,
            source_id=attached.id,
            title=attached.filename,
            text=await self._files.content(caller.tenant, attached.id),
        )
        with self._telemetry.lone_span("index file", file_id=attached.id) as span:
            return await self._retrieval.index(request, span)

    # ---- its outcome --------------------------------------------------------------------------

    async def _attached(self, tenant: str, task: Task) -> AttachedFile | None:
        """None: it was taken out, attached anew, or it is known how it ended."""
        try:
            attached = await self._store_files.get(tenant, task.store, task.file)
        except PenstockError:
            return None
        waits = attached.state == "in_progress" and attached.attachment == task.attachment
        return attached if waits else None

    async def _note_outcome(self, caller: Caller, attached: AttachedFile) -> None:
        for tries in range(1, _RETRIES + 1):
            try:
                if await self._store_files.settle(caller.tenant, attached) == "gone":
                    await self._unindex(caller, attached.store, attached.id)
                return
            except (*RedisAway, PenstockError) as error:
                log.warning("outcome of indexing %s not noted: %s", attached.id, error)
                if tries == _RETRIES:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _unindex(self, caller: Caller, store: str, file_id: str) -> None:
        request = RemoveRequest(caller=caller, collection=store, source_id=file_id)
        with self._telemetry.lone_span("remove") as span:
            await self._retrieval.remove(request, span)

    def _on_the_way(self, tenant: str, store: str, file_id: str) -> Iterator["asyncio.Task[None]"]:
        for task, place in self._running.items():
            if (place.tenant, place.store) == (tenant, store) and file_id in ("", place.file):
                yield task

    def _queue(self, tenant: str) -> Queue:
        return Queue(self.name, tenant, "files")


def _caller(job: Claimed, task: Task) -> Caller:
    return Caller(tenant=job.queue.tenant, request_id=task.request_id)
