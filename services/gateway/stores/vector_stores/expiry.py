"""Vector stores that nobody has used for as long as they were to last: nothing stays in them."""

import time
from collections.abc import Awaitable, Callable

from pydantic import BaseModel

from protos.common_pb2 import Caller
from services.common.errors import PenstockError
from services.gateway.jobs.jobs import Jobs, Later
from services.gateway.jobs.places import Places
from services.gateway.jobs.queue import Claimed, Queue
from services.gateway.stores.vector_stores.removals import again_if_away
from services.gateway.stores.vector_stores.store_record import Store
from services.gateway.stores.vector_stores.store_records import StoreRecords

_AT_ONCE = 1
_DAY_S = 86_400.0
_MARGIN_S = 1.0  # between a gateway's clock and Redis', by which it expires


class Ending(BaseModel):
    store: str


class Expiry:
    """jobs.Kind. One job for each store that may expire; it looks again when it was used since."""

    name = "expire"

    def __init__(
        self, jobs: Jobs, records: StoreRecords, empty: Callable[[Caller, str], Awaitable[None]]
    ) -> None:
        """`empty`: takes all out of a store that expired."""
        self.places = Places(_AT_ONCE)
        self._jobs = jobs
        self._records = records
        self._empty = empty

    async def expect(self, tenant: str, store: str, days: int | None) -> None:
        """Before its record says so: a job that finds nothing to do has done it."""
        if days is not None:
            job = Ending(store=store).model_dump_json()
            queue = Queue(self.name, tenant, "stores")
            await self._jobs.queues.add(queue, job, delay_s=days * _DAY_S + _MARGIN_S)

    async def run(self, job: Claimed) -> None:
        id, tenant = Ending.model_validate_json(job.body).store, job.queue.tenant
        store = await self._found(tenant, id)
        if store is None or store.expires_at is None:
            return
        if not store.expired:
            raise Later(job.body, max(store.expires_at - time.time(), 0.0) + _MARGIN_S)
        with again_if_away(job):
            await self._empty(Caller(tenant=tenant), id)

    async def give_up(self, job: Claimed, why: str) -> None:
        """It tells that it expired all the same; what is left of it goes when it is deleted."""

    async def _found(self, tenant: str, id: str) -> Store | None:
        try:
            return await self._records.store(tenant, id)
        except PenstockError:
            return None
