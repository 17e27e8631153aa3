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
from services.gateway.batches.store import BatchStore, too_many, wrong_purpose
from services.gateway.batches.validation import Entry, read
from services.gateway.identity.principal import Principal
from services.gateway.identity.standing import Grantee
from services.gateway.ids import BATCH, FILE
from services.gateway.jobs.jobs import Jobs, Later
from services.gateway.jobs.places import Places
from services.gateway.jobs.queue import Claimed, Queue
from services.gateway.stores.files.files import Files

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
        output_expires_s: int | None = None,
    ) -> Batch:
        """`window`: as the client says it, and in seconds. Raises NOT_FOUND for the file,
        RESOURCE_EXHAUSTED ("too_many_batches", "too_many_files", "storage_full")."""
        await self._files.require_place(who.tenant)
        file = await self._files.get(who.tenant, input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise wrong_purpose(file.id)
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
            output_expires_s=output_expires_s,
        )
        # First, so that it ends whatever becomes of this gateway.
        control, validate = _control(who.tenant), Task(do="validate", batch=record.id)
        end = _expiry(record.id).model_dump_json()
        await self._jobs.queues.add(control, end, delay_s=window[1])
        async with self._jobs.promised(control, validate.model_dump_json()):
            await self.store.create(record)
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
        # First, so that it is stopped and ends whatever becomes of this gateway.
        end = Task(do="end", batch=id, into=into, faults=tuple(faults))
        await self._jobs.queues.add(_control(tenant), end.model_dump_json())
        self._jobs.look(BATCH_KIND)
        await self.store.stop(tenant, id, into, faults)

    async def over(self, tenant: str, id: str) -> None:
        """It has ended: its lines and its expiry are nobody's work any more."""
        await self._jobs.queues.drop(Queue(LINE, tenant, id))
        await self._jobs.queues.withdraw(_control(tenant), _expiry(id).model_dump_json())

    async def require_unused(self, tenant: str, file: str) -> None:
        """Raises ABORTED while a batch reads it."""
        if file in await self.store.inputs_in_use(tenant):
            raise PenstockError(
                grpc.StatusCode.ABORTED,
                f"The file '{file}' is the input of a batch that has not ended: cancel that first.",
                stage="gateway",
                reason="file_in_use",
            )


class Task(BaseModel):
    """`into`, `faults`: what it is to end as, and why, unless it ends as something else already."""

    do: Literal["validate", "end"]
    batch: str
    into: Ending = "failed"
    faults: tuple[Fault, ...] = ()


def _control(tenant: str) -> Queue:
    return Queue(BATCH_KIND, tenant, _CONTROL)


def _expiry(id: str) -> Task:
    return Task(do="end", batch=id, into="expired")


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
        except PenstockError:  # it was refused, or its record is gone
            return await self._gateway.batches.over(tenant, task.batch)
        if batch.ended:  # whoever ended it may have been lost just then
            return await self._gateway.batches.over(tenant, task.batch)
        if task.do == "validate":
            return await self._validate(tenant, batch)
        await self._store.stop(tenant, task.batch, task.into, task.faults)
        await self._end(tenant, task.batch, job)

    async def give_up(self, job: Claimed, why: str) -> None:
        """Whatever it was: the batch fails."""
        task, tenant = Task.model_validate_json(job.body), job.queue.tenant
        fault = Fault(code="server_error", message=why)
        await self._store.stop(tenant, task.batch, "failed", [fault])
        await self._store.finish(tenant, task.batch)
        await self._gateway.batches.over(tenant, task.batch)

    async def _validate(self, tenant: str, batch: Batch) -> None:
        """Its lines are jobs from here on. To be done again at any point of it."""
        record, gateway = batch.record, self._gateway
        queue = Queue(LINE, tenant, record.id)
        if batch.into:
            return  # whoever ends it has closed the queue
        if batch.status == "validating":
            entries, faults = await self._read(tenant, record)
            if faults:
                await self._store.refuse(tenant, record.id, faults)
                metrics.batches.labels("failed").inc()
                return await gateway.batches.over(tenant, record.id)
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
            file = await gateway.files.kept(tenant, record.input_file_id)
            with gateway.intake.visit(tenant) as place:
                place.hold(2 * file.bytes)
                content = await gateway.files.content(tenant, file.id)
                most, limits = gateway.settings.jobs.max_lines, gateway.settings.gateway
                return await gateway.threads.run(
                    tenant, lambda: read(content, record.endpoint, most, limits)
                )
        except PenstockError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise Later(
                    Task(do="validate", batch=record.id).model_dump_json(), error.retry_after_s
                ) from None
            gone = {"code": "file_not_found", "param": "input_file_id"}
            return (), [Fault(message=error.message, **gone)]

    async def _end(self, tenant: str, id: str, job: Claimed) -> None:
        """Once nothing of it is under way, each line that was not answered is told so."""
        queue = Queue(LINE, tenant, id)
        if await self._queues.close(queue):
            raise Later(job.body, _LOOK_S)
        batch = await self._store.find(tenant, id)
        if "total" in batch.state:
            code, message = _ENDS[batch.into]
            async for bodies in self._queues.rest(queue):
                left = [unanswered(batch.record, Entry.of(one), code, message) for one in bodies]
                await self._store.answer(tenant, id, left)
        if ended := await self._store.finish(tenant, id):
            metrics.batches.labels(ended).inc()
        await self._gateway.batches.over(tenant, id)
