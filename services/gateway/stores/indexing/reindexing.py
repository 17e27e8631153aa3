"""Files that another embedding model has indexed, on their way to the present one.

What of a store it has not embedded is found by its words alone (decision 0057). A durable job goes
over such a store, a file at a time, and begins by itself when the store is searched (decision
0058). A file is embedded anew beside what searches find of it, which it replaces when it is whole.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial

import grpc
from pydantic import BaseModel

from protos.common_pb2 import Caller, Usage
from protos.retrieval_pb2 import IndexProgress, IndexReply
from services.common.errors import PenstockError, unavailable
from services.common.redis import RedisAway
from services.gateway import metrics
from services.gateway.identity.principal import Refused
from services.gateway.identity.standing import Standing
from services.gateway.jobs.jobs import Jobs, Later
from services.gateway.jobs.places import Places
from services.gateway.jobs.queue import Claimed, Queue
from services.gateway.metering.estimate import of_bytes
from services.gateway.metering.meter import Meter
from services.gateway.stores.indexing.on_the_way import OnTheWay, Place
from services.gateway.stores.indexing.searchable import Searchable
from services.gateway.stores.retrieval.client import RetrievalClient, Tell
from services.gateway.stores.vector_stores.store_files import AttachedFile, Attachment, Progress
from services.gateway.stores.vector_stores.store_records import StoreRecords

log = logging.getLogger(__name__)

ROUTE = "reindex"  # in the ledger
_AT_ONCE = 1
_SOME = 50  # files, of one look at a store's
INDEXING_S = 2700.0  # of one file
_HELD_S = INDEXING_S + 600.0  # without a word of it a job was lost
_FAILED_S = 3600.0  # then it begins by itself again
_AGAIN_S = 2.0
_AWAY_S = 5.0  # between two tries while something is away
_LONGEST_S = 3600.0
_OTHERS_S = 30.0  # while replicas of retrieval have several models
_LOOKED_EVERY_S = 1.0  # whether the file is there still
_TIMEOUT = "timeout"
# What a file may have done to whoever was at it.
_LOSSES = frozenset({"index_lost", "document_changed", _TIMEOUT})
_MOST_LOSSES = 2
_PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


class Round(BaseModel):
    """The job: files of a store that are to be indexed anew, the first of them now."""

    store: str
    embedder: str
    model: str = ""  # its name, as the store's record has it
    token: str  # whose it is: the records have another one as soon as this one is not to go on
    request_id: str
    files: list[Attachment] = []
    losses: int = 0  # of retrieval, while it was at the first
    done: int = 0  # chunks of the first, when its time was over

    def without_first(self) -> "Round":
        return self.model_copy(update={"files": self.files[1:], "losses": 0, "done": 0})

    def after_loss(self, done: int) -> "Round":
        """A long file behind others' comes on a bit each time, and is not at fault."""
        if done > self.done:
            return self.model_copy(update={"done": done})
        return self.model_copy(update={"losses": self.losses + 1})


class _Gone(Exception):
    """The file was taken out meanwhile, or attached anew."""


class _Stopped(Exception):
    """None of the store's files may be indexed, for a reason of the tenant's."""


class Reindexing:
    """jobs.Kind."""

    name = "reindex"

    def __init__(
        self,
        records: StoreRecords,
        searchable: Searchable,
        on_the_way: OnTheWay,
        retrieval: RetrievalClient,
        meter: Meter,
        jobs: Jobs,
        standing: Standing,
        max_chars: int,
    ) -> None:
        """`max_chars`: of one file's text, which retrieval takes."""
        self.places = Places(_AT_ONCE)
        self._records = records
        self._searchable = searchable
        self._on_the_way = on_the_way
        self._retrieval = retrieval
        self._meter = meter
        self._jobs = jobs
        self._standing = standing
        self._most_chars = max_chars
        self._beginning: dict[tuple[str, str], asyncio.Task[None]] = {}

    @property
    def embedders(self) -> Mapping[str, str]:
        """The present ones by the models' names, '' the installation's; empty while one is not
        known."""
        return self._retrieval.fingerprints

    def notice(self, tenant: str, stores: Iterable[str]) -> None:
        """They were searched, and have files that are due: it begins, in the background."""
        for store in stores:
            if (place := (tenant, store)) not in self._beginning:
                task = asyncio.create_task(self._begin_by_itself(*place), name=f"reindex {store}")
                self._beginning[place] = task
                task.add_done_callback(partial(self._has_begun, place))

    async def begin(self, tenant: str, store: str, *, asked: bool) -> None:
        """If files are due, and nobody is at them. `asked`: also where it was cancelled, or failed.
        Raises NOT_FOUND, INVALID_ARGUMENT for a store that expired, UNAVAILABLE while the present
        embedding model is not known."""
        model = (await self._records.store(tenant, store)).record.embedding_model
        token = secrets.token_hex(8)
        about = {"embedder": self._present(model), "model": model, "token": token}
        round = Round(store=store, request_id=f"{store}:{token}", **about)
        queue, job = self._queue(tenant), round.model_dump_json()
        async with self._jobs.promised(queue, job):
            told = (tenant, store, round.embedder, round.token, _HELD_S)
            if not await self._records.begin_reindexing(*told, asked=asked):
                await self._jobs.queues.withdraw(queue, job)

    async def cancel(self, tenant: str, store: str) -> None:
        """The file under way is the last. Raises as `begin`."""
        model = (await self._records.store(tenant, store)).record.embedding_model
        await self._records.stop_reindexing(tenant, store, self._present(model))

    # ---- jobs.Kind ----------------------------------------------------------------------------

    async def run(self, job: Claimed) -> None:
        """One file, or a look at which are due."""
        round, tenant = Round.model_validate_json(job.body), job.queue.tenant
        first = next(iter(round.files), None)
        held = await self._records.hold_reindexing(tenant, round.store, round.token, _HELD_S)
        model = await self._records.embedding_model(tenant, round.store)
        present = self.embedders.get(model, "")
        if not held or present not in (round.embedder, ""):
            if first is not None and job.claims > 1:  # whoever had it may have been amid the file
                await self._searchable.forget(_caller(tenant, round), first)
            await self._records.end_reindexing(tenant, round.store, round.token, "pending")
            return
        if not present:
            raise await self._later(tenant, round, _OTHERS_S, "the embedding model is changing")
        if first is None:
            due = await self._due(tenant, round)
            if not due:
                ended = (tenant, round.store, round.token, "completed")
                return await self._records.end_reindexing(*ended)
            round = round.model_copy(update={"files": due})
        else:
            try:
                await self._carry(job, round, first)
            except _Stopped as stopped:
                return await self._fail(tenant, round, str(stopped))
            round = round.without_first()
        raise Later(round.model_dump_json(), 0.0)

    async def give_up(self, job: Claimed, why: str) -> None:
        round = Round.model_validate_json(job.body)
        await self._fail(job.queue.tenant, round, why)

    async def _carry(self, job: Claimed, round: Round, first: Attachment) -> None:
        """Raises Later where it is to be tried again."""
        tenant, caller = job.queue.tenant, _caller(job.queue.tenant, round)
        attached = await self._there(tenant, first)
        if attached is None or not attached.is_due(round.embedder):
            if attached is None and job.claims > 1:
                await self._searchable.forget(caller, first)
            return
        work = self._renew(tenant, round, attached)
        place = Place(tenant, round.store, first.file)
        try:
            if not await self._on_the_way.carry(place, work):
                await self._searchable.forget(caller, first)
        except _Gone:
            await self._searchable.forget(caller, first)

    # ---- one file -----------------------------------------------------------------------------

    async def _renew(self, tenant: str, round: Round, attached: AttachedFile) -> None:
        """Raises Later, _Gone, _Stopped."""
        try:
            reply = await self._index(tenant, round, attached)
        except (Refused, PenstockError, TimeoutError) as error:
            return await self._failed(tenant, round, attached, error)
        except (Later, _Gone, *RedisAway):
            raise
        except Exception:
            log.exception("indexing %s anew failed", attached.id)
            return await self._note(tenant, round, attached, refused="internal error")
        if reply.embedder != round.embedder:  # of a replica that is about to go, or just came
            raise await self._later(tenant, round, _OTHERS_S, "the embedding model is changing")
        metrics.reindexed_files.labels("embedded" if reply.tokens else "there").inc()
        was_there = not (reply.tokens or attached.refused_by)
        await self._note(tenant, round, attached, note=attached.note if was_there else reply.note)

    async def _index(self, tenant: str, round: Round, attached: AttachedFile) -> IndexReply:
        """At the tenant's cost: who attached it may have left."""
        who = await self._standing.of_tenant(tenant, round.store, "low")
        model = round.model or await self._retrieval.model()
        who.authorize_embedding(model)
        id = f"{attached.id}:{attached.attachment}:{round.embedder}"
        most = (of_bytes(min(attached.bytes, self._most_chars)), 0)
        async with self._meter.run(who, id, ROUTE, model, most) as metered:
            used = Usage()
            metered.usage = lambda: used
            async with asyncio.timeout(INDEXING_S):
                tell = self._looking(tenant, attached)
                caller = who.caller(round.request_id)
                reply = await self._searchable.index(
                    caller, attached, tell, used, round.model, reindexing=True
                )
            metered.usage = lambda: Usage(prompt_tokens=reply.tokens)
            await self._meter.settle(metered)
        return reply

    async def _failed(
        self,
        tenant: str,
        round: Round,
        attached: AttachedFile,
        error: Refused | PenstockError | TimeoutError,
    ) -> None:
        """What time heals is waited for; what is the file's own is noted, and the next one's turn
        comes."""
        why = str(error) or "indexing took too long"
        if isinstance(error, Refused):
            raise _Stopped(why)
        if isinstance(error, TimeoutError) or error.reason in _LOSSES:
            is_late = isinstance(error, TimeoutError) or error.reason == _TIMEOUT
            come = attached.progress.done if is_late and attached.progress else 0
            again = round.after_loss(come)
            if again.losses <= _MOST_LOSSES:
                raise await self._later(tenant, again, _AGAIN_S, why)
        elif error.code in _PASSING:
            wait_s = min(max(error.retry_after_s, _AWAY_S), _LONGEST_S)
            raise await self._later(tenant, round, wait_s, why)
        elif error.code is grpc.StatusCode.PERMISSION_DENIED:
            raise _Stopped(why)
        metrics.reindexed_files.labels("refused").inc()
        await self._note(tenant, round, attached, refused=why)

    def _looking(self, tenant: str, attached: AttachedFile) -> Tell:
        """Whether the file is there still, while it is indexed, and how far it is."""
        looked = time.monotonic()

        async def tell(progress: IndexProgress) -> None:
            nonlocal looked
            attached.progress = Progress(done=progress.done, chunks=progress.chunks)
            if time.monotonic() - looked < _LOOKED_EVERY_S:
                return
            looked = time.monotonic()
            with suppress(*RedisAway):
                if await self._there(tenant, attached.as_attachment()) is None:
                    raise _Gone

        return tell

    async def _note(
        self,
        tenant: str,
        round: Round,
        attached: AttachedFile,
        *,
        note: str = "",
        refused: str = "",
    ) -> None:
        """Unless it was taken out or attached anew meanwhile: raises _Gone."""
        how = {"embedder": round.embedder, "refused_by": "", "note": note}
        if refused:
            words = f"is found by its words alone, as it could not be indexed anew: {refused}"
            how = {"refused_by": round.embedder, "note": words}

        def renewed(file: AttachedFile) -> AttachedFile | None:
            same = file.attachment == attached.attachment and file.state == "completed"
            return file.model_copy(update=how) if same else None

        try:
            file = await self._records.change_file(tenant, round.store, attached.id, renewed)
        except PenstockError:
            raise _Gone from None
        if file.attachment != attached.attachment:
            raise _Gone
        if file.attributes != attached.attributes:  # since it was begun
            await self._searchable.describe(_caller(tenant, round), round.store, attached.id)

    # ---- the store's --------------------------------------------------------------------------

    async def _due(self, tenant: str, round: Round) -> list[Attachment]:
        """Some, the latest first: what was put there last is most likely asked for."""
        files = await self._records.all_files(tenant, round.store)
        due = [file for file in files if file.is_due(round.embedder)]
        due.sort(key=lambda file: (-file.created_at, file.id))
        return [file.as_attachment() for file in due[:_SOME]]

    async def _there(self, tenant: str, one: Attachment) -> AttachedFile | None:
        for file in await self._records.files(tenant, one.store, [one.file]):
            if file.attachment == one.attachment:
                return file
        return None

    def _has_begun(self, place: tuple[str, str], task: "asyncio.Task[None]") -> None:
        del self._beginning[place]

    async def _begin_by_itself(self, tenant: str, store: str) -> None:
        try:
            await self.begin(tenant, store, asked=False)
        except (PenstockError, *RedisAway) as error:  # the next search may fare better
            log.warning("%s is not indexed anew yet: %s", store, error)

    async def _fail(self, tenant: str, round: Round, why: str) -> None:
        ended = (tenant, round.store, round.token, "failed")
        await self._records.end_reindexing(*ended, why, _FAILED_S)

    async def _later(self, tenant: str, round: Round, wait_s: float, why: str) -> Later:
        """For its caller to raise."""
        held_s = wait_s + _HELD_S
        await self._records.hold_reindexing(tenant, round.store, round.token, held_s, why)
        return Later(round.model_dump_json(), wait_s)

    def _present(self, model: str) -> str:
        if not (present := self.embedders.get(model, "")):
            why = "the present embedding model is not known, or changing"
            raise unavailable(why, stage="gateway", reason="no_replica", retry_after_s=_AGAIN_S)
        return present

    def _queue(self, tenant: str) -> Queue:
        return Queue(self.name, tenant, "stores")


def _caller(tenant: str, round: Round) -> Caller:
    return Caller(tenant=tenant, request_id=round.request_id)
