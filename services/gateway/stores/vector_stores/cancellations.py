"""Batches of files that are cancelled, to their end, also where its gateway is lost over it."""

from collections.abc import Awaitable, Callable

from pydantic import BaseModel

from protos.common_pb2 import Caller
from services.gateway.jobs.jobs import Jobs
from services.gateway.jobs.places import Places
from services.gateway.jobs.queue import Claimed, Queue
from services.gateway.stores.vector_stores.removals import again_if_away

_AT_ONCE = 1


class Cancellation(BaseModel):
    request_id: str
    store: str
    batch: str


class Cancellations:
    """jobs.Kind. Not a removal: a gateway that knows no batches there would take out the store."""

    name = "cancel"

    def __init__(self, jobs: Jobs, cancel: Callable[[Caller, str, str], Awaitable[None]]) -> None:
        """`cancel`: does what is not done yet of a store's batch."""
        self.places = Places(_AT_ONCE)
        self._jobs = jobs
        self._cancel = cancel

    async def begin(self, caller: Caller, store: str, batch: str) -> None:
        """Returns when it is done. Where that fails its client is told, and a job does it: that it
        is cancelled somebody may have seen."""
        queue = Queue(self.name, caller.tenant, "all")
        job = Cancellation(request_id=caller.request_id, store=store, batch=batch)
        async with self._jobs.insured(queue, job.model_dump_json(), failing=True):
            await self._cancel(caller, store, batch)

    async def run(self, job: Claimed) -> None:
        told = Cancellation.model_validate_json(job.body)
        caller = Caller(tenant=job.queue.tenant, request_id=told.request_id)
        with again_if_away(job):
            await self._cancel(caller, told.store, told.batch)

    async def give_up(self, job: Claimed, why: str) -> None:
        """Its files arrive, or are taken out by their owner."""
