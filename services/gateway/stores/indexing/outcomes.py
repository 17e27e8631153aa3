"""How a file's way into a store goes, in its record: how far it is, and how it ended."""

import asyncio
import logging
import time
from contextlib import suppress

from protos.common_pb2 import Caller
from protos.retrieval_pb2 import IndexProgress
from services.common.errors import PenstockError
from services.common.redis import RedisAway
from services.gateway.stores.indexing.searchable import Searchable
from services.gateway.stores.retrieval.client import Tell
from services.gateway.stores.vector_stores.store_files import AttachedFile, Attachment, Progress
from services.gateway.stores.vector_stores.store_records import StoreRecords

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_RETRIES = 30
_NOTED_EVERY_S = 1.0  # how far it is


class Outcomes:
    def __init__(self, records: StoreRecords, searchable: Searchable) -> None:
        self._records = records
        self._searchable = searchable

    async def waiting(self, tenant: str, task: Attachment) -> AttachedFile | None:
        """None: it was taken out, attached anew, or it is known how it ended."""
        for attached in await self._records.files(tenant, task.store, [task.file]):
            if _waits(attached, task.attachment):
                return attached
        return None

    async def is_taken_out(self, tenant: str, task: Attachment) -> bool:
        """By this attachment, or cancelled."""
        for attached in await self._records.files(tenant, task.store, [task.file]):
            return attached.attachment != task.attachment or attached.state == "cancelled"
        return True

    def progress(self, caller: Caller, attached: AttachedFile) -> Tell:
        """How far it is, noted in `attached`, and in its record, though not each time that it is
        told."""
        place, noted = (caller.tenant, attached.store, attached.id), -_NOTED_EVERY_S

        async def tell(progress: IndexProgress) -> None:
            nonlocal noted
            attached.progress = now = Progress(done=progress.done, chunks=progress.chunks)
            if time.monotonic() - noted < _NOTED_EVERY_S:
                return
            noted = time.monotonic()

            def going_on(file: AttachedFile) -> AttachedFile | None:
                if not _waits(file, attached.attachment):
                    return None
                return file.model_copy(update={"progress": now})

            with suppress(PenstockError, *RedisAway):  # how it ends is noted in any case
                await self._records.change_file(*place, going_on)

        return tell

    async def note(self, caller: Caller, ended: AttachedFile) -> None:
        """Tries for a while; raises what it fails by then."""
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
            how = ("state", "error", "error_code", "note", "embedder")
            told_of = {name: getattr(ended, name) for name in how}
            return file.model_copy(update={**told_of, "progress": None})

        while True:
            try:
                file = await self._records.change_file(*place, settled)
            except PenstockError:  # it is there no more
                await self._searchable.remove_file(caller, ended.store, ended.id)
                return
            if file.attachment != ended.attachment:
                return
            if file.state == "cancelled":
                await self._searchable.remove_file(caller, ended.store, ended.id, ended.attachment)
                return
            if file.state != "in_progress":
                return
            told = file.attributes  # others than those that it was indexed with
            if ended.state == "completed":
                await self._searchable.describe_as(caller, file)


def _waits(file: AttachedFile, attachment: str) -> bool:
    return file.state == "in_progress" and file.attachment == attachment
