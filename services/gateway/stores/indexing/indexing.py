"""Files on their way into vector stores: each is let in, sent to retrieval (searchable.py), and its
outcome noted (outcomes.py).

They are durable jobs: a gateway that ends, or is killed, leaves its own to others. A file may be
taken out of its store while it is on its way, here or at another gateway. Whatever became of it
then, what retrieval may hold of it is removed last.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import grpc

from protos.common_pb2 import Caller, Usage
from services.common.errors import PenstockError, unavailable
from services.common.redis import RedisAway
from services.common.telemetry.telemetry import Telemetry
from services.gateway.identity.principal import Principal, Refused
from services.gateway.identity.standing import Grantee, Standing
from services.gateway.jobs.jobs import Jobs, Later
from services.gateway.jobs.places import Places
from services.gateway.jobs.queue import Claimed, Queue
from services.gateway.metering.estimate import of_bytes
from services.gateway.metering.meter import Meter, Metered
from services.gateway.stores.files.file_record import FileRecord
from services.gateway.stores.files.files import Files
from services.gateway.stores.indexing.on_the_way import OnTheWay, Place
from services.gateway.stores.indexing.outcomes import Outcomes
from services.gateway.stores.indexing.searchable import Searchable
from services.gateway.stores.indexing.served_embedders import ServedEmbedders
from services.gateway.stores.retrieval.client import INDEX_PATIENCE_S, RetrievalClient
from services.gateway.stores.vector_stores.store_files import (
    NO_ATTRIBUTES,
    AttachedFile,
    Attachment,
    Attributes,
    Chunking,
)
from services.gateway.stores.vector_stores.store_record import FileBatch
from services.gateway.stores.vector_stores.store_records import StoreRecords

log = logging.getLogger(__name__)

ROUTE = "index"  # in the ledger
QUEUEING_S = 1800.0  # a file that does not come on waits so long, or has failed
INDEXING_S = 2700.0  # its indexing ends within this
_AT_ONCE = 2
_QUEUE = 4096  # files of one tenant; tenants are those to whom the operator gave keys
_TIMEOUT = "timeout"
_LOSSES = frozenset({"index_lost", "document_changed"})
_MOST_LOSSES = 2
_AGAIN_S = 2.0
_FOR_NOW = ("rate_limit_exceeded", "limits_unavailable")  # for which a file waits
# Likewise while it is indexed.
_AWAY = frozenset(
    {
        "blobs_unavailable",
        "embedder_away",
        "other_embedders",
        "queue_full",
        "retrieval_outdated",
        "revisions_away",
        "store_away",
        "store_failed",
        "store_slow",
    }
)


class Wanted(NamedTuple):
    """A file that is to go into a store, and what is said of it there."""

    file: FileRecord
    attributes: Attributes = NO_ATTRIBUTES
    chunking: Chunking | None = None


class Task(Attachment):
    """What is to be indexed, and for whom. An attachment is charged once, whoever settles it."""

    who: Grantee
    losses: int = 0  # of retrieval, while it was at it
    done: int = 0  # chunks, as the last try ended
    since: float = 0.0  # when that became more
    model: str = ""  # a served one, if
    embedded: int = 0  # tokens, in tries that something away has ended, which were not charged

    def coming_on(self, done: int) -> "Task":
        """Itself, where no more is done than was."""
        if done <= self.done:
            return self
        return self.model_copy(update={"done": done, "since": time.time()})


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
        embedders: ServedEmbedders,
        max_chars: int,
    ) -> None:
        """`max_chars`: of one file's text, which retrieval takes."""
        self.places = Places(_AT_ONCE)
        self.on_the_way = OnTheWay()
        self.searchable = Searchable(files, records, retrieval, telemetry, embedders)
        self._outcomes = Outcomes(records, self.searchable)
        self._files = files
        self._records = records
        self._retrieval = retrieval
        self._meter = meter
        self._jobs = jobs
        self._standing = standing
        self._embedders = embedders
        self._most_chars = max_chars

    async def expect(self, who: Principal, files: int, model: str = "") -> None:
        """Raises RESOURCE_EXHAUSTED ("index_queue_full") when so many more of the tenant's files
        are too many, or "storage_full"; PERMISSION_DENIED where he may not use the embedding
        model, which is the installation's if none is told."""
        if files and (named := model or self._retrieval.embedding_model):  # else when it is known
            who.authorize_embedding(named)
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
        model: str = "",
    ) -> list[AttachedFile]:
        """Attaches files and indexes them in the background, at the cost of `who`. Raises as
        `expect` does, NOT_FOUND where the store is gone, INVALID_ARGUMENT where it expired."""
        tenant, now = caller.tenant, int(time.time())
        await self.expect(who, len(wanted), model)
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
        await self.on_the_way.cancel(tenant, store, ids)
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
        await self.on_the_way.cancel(caller.tenant, store)
        await self.searchable.remove_store(caller, store)

    async def remove_file(
        self, caller: Caller, store: str, file_id: str, attachment: str = ""
    ) -> bool:
        """The same of a file, as it was attached; without that: of one that is there no more.
        Nothing of what was attached anew meanwhile; then False."""
        await self.on_the_way.cancel(caller.tenant, store, [file_id])
        return await self.searchable.remove_file(caller, store, file_id, attachment)

    # ---- jobs.Kind ----------------------------------------------------------------------------

    async def run(self, job: Claimed) -> None:
        task, tenant = Task.model_validate_json(job.body), job.queue.tenant
        attached = await self._outcomes.waiting(tenant, task)
        if attached is None:
            if job.claims > 1:  # whoever had it may have been in the middle of it
                await self.searchable.forget(_caller(job, task), task)
            return await self._charge_if_taken_out(tenant, task)
        place = Place(tenant, task.store, task.file)
        if await self.on_the_way.carry(place, self._carry(job, task, attached)):
            return
        # By `cancel`: whoever takes it out, or attaches it anew, may fail or be lost before he has.
        await self.searchable.forget(_caller(job, task), task)
        await self._charge_if_taken_out(tenant, task)
        if await self._outcomes.waiting(tenant, task) is not None:
            raise Later(job.body, _AGAIN_S)

    async def give_up(self, job: Claimed, why: str) -> None:
        task = Attachment.model_validate_json(job.body)
        if (attached := await self._outcomes.waiting(job.queue.tenant, task)) is not None:
            attached.fail(why)
            await self._outcomes.note(_caller(job, task), attached)

    async def _carry(self, job: Claimed, task: Task, attached: AttachedFile) -> None:
        caller, named = _caller(job, task), ""
        used = Usage(prompt_tokens=task.embedded)  # which is not free where it is given up
        try:
            who = await self._standing.of(task.who)
            named = await self._records.embedding_model(job.queue.tenant, task.store)
            metered = await self._let_in(who, job, task, attached, named)
            metered.usage = lambda: used
            try:
                async with _in_time():
                    reply = await self.searchable.index(
                        who.caller(task.request_id),
                        attached,
                        self._outcomes.progress(caller, attached),
                        used,
                        named,
                    )
                metered.usage = lambda: Usage(prompt_tokens=reply.tokens)
                await self._meter.settle(metered)
                attached.note, attached.embedder = reply.note, reply.embedder
            except BaseException as error:
                self._meter.end(metered, error)
                raise
            attached.state = "completed"
        except PenstockError as error:
            if (again := self._again(task, attached, named, error)) is not None:
                again.model, again.embedded = named, used.prompt_tokens
                wait_s = error.retry_after_s if error.reason in _AWAY else 0.0
                raise Later(again.model_dump_json(), wait_s or _AGAIN_S) from None
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
        await self._outcomes.note(caller, attached)

    async def _charge_if_taken_out(self, tenant: str, task: Task) -> None:
        """Nobody tries it again, and the model has worked for it."""
        if task.embedded and await self._outcomes.is_taken_out(tenant, task):
            with suppress(Refused):  # his key is gone, too
                who, id = await self._standing.of(task.who), f"{task.file}:{task.attachment}"
                self._meter.charge(who, id, ROUTE, task.model, Usage(prompt_tokens=task.embedded))

    def _again(
        self, task: Task, attached: AttachedFile, named: str, error: PenstockError
    ) -> Task | None:
        """As what it is to be tried again; None: it has failed. A served model computes others
        first: a long file comes on a bit each time, and is not at fault."""
        again = task.coming_on(attached.progress.done if attached.progress else 0)
        is_late = error.reason == _TIMEOUT and self._embedders.serves(named)
        if error.reason in _LOSSES or (is_late and again is task):
            again = again.model_copy(update={"losses": task.losses + 1})
            return again if again.losses <= _MOST_LOSSES else None
        waits = is_late or (error.reason in _AWAY and _may_wait(attached, again))
        return again if waits else None

    async def _let_in(
        self, who: Principal, job: Claimed, task: Task, attached: AttachedFile, named: str
    ) -> Metered:
        """With room in all limits. Raises Later where one has none for now."""
        model = named or await self._retrieval.model(INDEX_PATIENCE_S)
        who.authorize_embedding(model)
        id = f"{attached.id}:{attached.attachment}"
        most = (of_bytes(min(attached.bytes, self._most_chars)), 0)
        try:
            return await self._meter.admit(who, id, ROUTE, model, most)
        except PenstockError as error:
            if error.reason not in _FOR_NOW:
                raise
            if not _may_wait(attached, task):
                raise TimeoutError from None
            raise Later(job.body, error.retry_after_s) from None

    def _queue(self, tenant: str) -> Queue:
        return Queue(self.name, tenant, "files")


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Raises UNAVAILABLE ("timeout")."""
    try:
        async with asyncio.timeout(INDEXING_S):
            yield
    except TimeoutError:
        why = "indexing took too long"
        raise unavailable(why, stage="gateway", reason=_TIMEOUT) from None


def _may_wait(file: AttachedFile, task: Task) -> bool:
    return time.time() <= max(file.created_at, task.since) + QUEUEING_S


def _caller(job: Claimed, task: Attachment) -> Caller:
    return Caller(tenant=job.queue.tenant, request_id=task.request_id)
