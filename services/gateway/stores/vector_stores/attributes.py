"""Attributes of a file in a store, changed: its record first, then where searches look."""

from collections.abc import Mapping

from protos.common_pb2 import Caller
from services.gateway.jobs.jobs import Jobs
from services.gateway.jobs.places import Places
from services.gateway.jobs.queue import Claimed, Queue
from services.gateway.stores.indexing.searchable import Searchable
from services.gateway.stores.vector_stores.removals import again_if_away
from services.gateway.stores.vector_stores.store_files import AttachedFile, Attachment
from services.gateway.stores.vector_stores.store_records import StoreRecords

_AT_ONCE = 1


class AttributeChanges:
    """jobs.Kind."""

    name = "attributes"

    def __init__(self, jobs: Jobs, records: StoreRecords, searchable: Searchable) -> None:
        self.places = Places(_AT_ONCE)
        self._jobs = jobs
        self._records = records
        self._searchable = searchable

    async def change(
        self, caller: Caller, store: str, file: str, attributes: Mapping[str, bool | float | str]
    ) -> AttachedFile:
        """Returns when searches find it by them. Where that fails its client is told, and a job
        brings it about: the record is not taken back, which somebody may have seen."""

        def changed(file: AttachedFile) -> AttachedFile:
            return file.model_copy(update={"attributes": dict(attributes)})

        tenant, queue = caller.tenant, Queue(self.name, caller.tenant, "all")
        attachment = (await self._records.file(tenant, store, file)).attachment
        job = Attachment(
            store=store, file=file, attachment=attachment, request_id=caller.request_id
        ).model_dump_json()
        async with self._jobs.insured(queue, job, failing=True):
            after = await self._records.change_file(tenant, store, file, changed)
            await self._searchable.describe(caller, store, file)
        return after

    async def run(self, job: Claimed) -> None:
        task = Attachment.model_validate_json(job.body)
        caller = Caller(tenant=job.queue.tenant, request_id=task.request_id)
        with again_if_away(job):
            await self._searchable.describe(caller, task.store, task.file)

    async def give_up(self, job: Claimed, why: str) -> None:
        """Who asked for it was never told that it was done."""
