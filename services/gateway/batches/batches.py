"""Batches as their clients have them, and their beginnings and ends, which are jobs themselves."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import grpc
from pydantic import BaseModel

from services.common.config import JobsSettings
from services.common.errors import PenstockError, invalid
from services.common.redis import Redis
from services.gateway import metrics
from services.gateway.batches.lines import LINE, unanswered
from services.gateway.batches.record import Batch, BatchRecord, Ending, Fault
from services.gateway.batches.store import BatchStore, too_many
from services.gateway.batches.validation import Entry, read
from services.gateway.identity.principal import Principal
from services.gateway.identity.standing import Grantee
from services.gateway.ids import BATCH, FILE
from services.gateway.jobs.jobs import Jobs, Later
from services.gateway.jobs.places import Places
from services.gateway.jobs.queue import Claimed, Queue
from services.gateway.stores.files import Files

if TYPE_CHECKING:
    from services.gateway.parts import Gateway

BATCH_KIND = "batch"
_CONTROL = "control"
_LOOK_S = 0.5  # whether what was under way when a batch was stopped has ended
_AT_ONCE = 2
_ENDS = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
    "failed": ("batch_failed", "The batch was ended before this request was executed."),
}


class Batches:
    """Methods raise one of `RedisAway`, and NOT_FOUND for an unknown id."""

    def __init__(
        self, redis: Redis, namespace: str, settings: JobsSettings, jobs: Jobs, files: Files
    ) -> None:
        self.store = BatchStore(redis, namespace, settings)
        self._settings = settings
        self._jobs = jobs
        self._files = files

    async def create(
        self,
        who: Principal,
        endpoint: str,
        input_file_id: str,
        window: tuple[str, int],
        metadata: dict[str, str] | None,
    ) -> Batch:
        """`window`: as the client says it, and in seconds. Raises NOT_FOUND for the file,
        RESOURCE_EXHAUSTED ("too_many_batches", "storage_full")."""
        self._files.room.check()
        await self._files.get(who.tenant, input_file_id, "input_file_id")
        if await self.store.unfinished(who.tenant) >= self._settings.max_unfinished:
            raise too_many(self._settings.max_unfinished)
        now = int(time.time())
        record = BatchRecord(
            id=BATCH.new(),
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window[0],
            created_at=now,
            expires_at=now + window[1],
            metadata=metadata,
            who=Grantee.of(who, now),
            output_file_id=FILE.new(),
            error_file_id=FILE.new(),
        )
        # First, so that it ends whatever becomes of this gateway.
        await self._do("expire", who.tenant, record.id, window[1])
        await self.store.create(record)
        await self._do("validate", who.tenant, record.id)
        return await self.store.find(who.tenant, record.id)

    async def cancel(self, tenant: str, id: str) -> Batch:
        batch = await self.store.find(tenant, id)
        if batch.ended:
            raise invalid(
                f"Cannot cancel a batch with status '{batch.status}'.",
                "batch_id",
                stage="gateway",
                reason="batch_ended",
            )
        await self.stop(tenant, id, "cancelled")
        return await self.store.find(tenant, id)

    async def stop(self, tenant: str, id: str, into: Ending, faults: Sequence[Fault] = ()) -> None:
        """What is under way ends first; nothing else of it begins."""
        await self.store.stop(tenant, id, into, faults)
        await self._do("end", tenant, id)

    async def require_unused(self, tenant: str, file: str) -> None:
        """Raises ABORTED while a batch reads it."""
        if file in await self.store.inputs_in_use(tenant):
            raise PenstockError(
                grpc.StatusCode.ABORTED,
                f"The file '{file}' is the input of a batch that has not ended: cancel that first.",
                stage="gateway",
                reason="file_in_use",
            )

    async def _do(
        self, what: Literal["validate", "expire", "end"], tenant: str, id: str, delay_s: float = 0
    ) -> None:
        task = Task(do=what, batch=id)
        await self._jobs.queues.add(
            Queue(BATCH_KIND, tenant, _CONTROL), task.model_dump_json(), delay_s
        )
        self._jobs.look(BATCH_KIND)


class Task(BaseModel):
    do: Literal["validate", "expire", "end"]
    batch: str


class Control:
    """jobs.Kind: what a batch begins and ends with."""

    name = BATCH_KIND

    def __init__(self, gateway: "Gateway") -> None:
        self.places = Places(_AT_ONCE)
        self._gateway = gateway
        self._store = gateway.batches.store
        self._queues = gateway.jobs.queues

    async def run(self, job: Claimed) -> None:
        task, tenant = Task.model_validate_json(job.body), job.queue.tenant
        try:
            batch = await self._store.find(tenant, task.batch)
        except PenstockError:
            return
        if batch.ended:
            return
        if task.do == "validate":
            return await self._validate(tenant, batch)
        if task.do == "expire":
            await self._store.stop(tenant, task.batch, "expired")
        await self._end(tenant, task.batch)

    async def give_up(self, job: Claimed, why: str) -> None:
        """Whatever it was: the batch fails."""
        task, tenant = Task.model_validate_json(job.body), job.queue.tenant
        fault = Fault(code="server_error", message=why)
        await self._store.stop(tenant, task.batch, "failed", [fault])
        await self._store.finish(tenant, task.batch)

    async def _validate(self, tenant: str, batch: Batch) -> None:
        """Its lines are jobs from here on. To be done again at any point of it."""
        record, gateway = batch.record, self._gateway
        queue = Queue(LINE, tenant, record.id)
        if batch.status == "validating":
            entries, faults = await self._read(tenant, record)
            if faults:
                await self._store.refuse(tenant, record.id, faults)
                metrics.batches.labels("failed").inc()
                return
            await self._queues.fill(queue, [entry.body() for entry in entries])
            if await self._store.begin(tenant, record.id, len(entries)) != "in_progress":
                return await self._queues.drop(queue)  # it was cancelled meanwhile
        await self._queues.open(queue)
        gateway.jobs.look(LINE)

    async def _read(
        self, tenant: str, record: BatchRecord
    ) -> tuple[Sequence[Entry], Sequence[Fault]]:
        gateway = self._gateway
        try:
            file = await gateway.files.get(tenant, record.input_file_id)
            with gateway.intake.visit(tenant) as place:
                place.hold(2 * file.bytes)
                text = await gateway.files.content(tenant, file.id)
                most = gateway.settings.jobs.max_lines
                return await gateway.threads.run(tenant, lambda: read(text, record.endpoint, most))
        except PenstockError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise Later(
                    Task(do="validate", batch=record.id).model_dump_json(), error.retry_after_s
                ) from None
            return (), [Fault(code="file_not_found", message=error.message, param=error.param)]

    async def _end(self, tenant: str, id: str) -> None:
        """Once nothing of it is under way, each line that was not answered is told so."""
        queue = Queue(LINE, tenant, id)
        if await self._queues.close(queue):
            raise Later(Task(do="end", batch=id).model_dump_json(), _LOOK_S)
        batch = await self._store.find(tenant, id)
        if "total" in batch.state:
            code, message = _ENDS[batch.into]
            async for bodies in self._queues.rest(queue):
                left = [unanswered(batch.record, Entry.of(one), code, message) for one in bodies]
                await self._store.answer(tenant, id, left)
        if ended := await self._store.finish(tenant, id):
            metrics.batches.labels(ended).inc()
        await self._queues.drop(queue)
