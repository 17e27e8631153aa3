"""What searches find of a store's files: put there, taken out, described anew.

What is searchable comes in order by revisions, which the records give (decision 0054).
"""

import asyncio

from protos import retrieval_pb2
from protos.common_pb2 import Caller, Usage
from protos.retrieval_pb2 import (
    IndexProgress,
    IndexReply,
    IndexRequest,
    ReadRequest,
    RemoveRequest,
    SetAttributesRequest,
)
from services.common.telemetry.telemetry import Telemetry
from services.gateway.intake import Holding
from services.gateway.stores.files.files import Files
from services.gateway.stores.indexing.served_embedders import ServedEmbedders
from services.gateway.stores.retrieval.client import RetrievalClient, Tell
from services.gateway.stores.vector_stores.store_files import (
    AttachedFile,
    Attachment,
    Attributes,
    attribute_values,
)
from services.gateway.stores.vector_stores.store_records import StoreRecords


class Searchable:
    """Methods raise what RetrievalClient's do, and `RedisAway`."""

    def __init__(
        self,
        files: Files,
        records: StoreRecords,
        retrieval: RetrievalClient,
        telemetry: Telemetry,
        embedders: ServedEmbedders,
    ) -> None:
        self._files = files
        self._records = records
        self._retrieval = retrieval
        self._telemetry = telemetry
        self._embedders = embedders

    async def index(
        self,
        caller: Caller,
        attached: AttachedFile,
        tell: Tell,
        used: Usage,
        model: str = "",
        *,
        reindexing: bool = False,
    ) -> IndexReply:
        """Cancelled, where nobody wants it any more. `model`: the embedding model's name, as the
        store's record has it. `used`: a served one's tokens so far, with those of what an
        earlier try has stored. `reindexing`: unless that model has."""
        place = (attached.store, attached.id)
        revision = await self._records.revise(caller.tenant, *place, attached.attachment)
        if not revision:
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
            reindexing=reindexing,
            embedder=model,
        )

        async def heard(progress: IndexProgress) -> None:
            used.prompt_tokens = max(used.prompt_tokens, progress.tokens)
            await tell(progress)

        with self._telemetry.lone_span("index file", file_id=attached.id) as span:
            embed = self._embedders.of_file(caller, model, attached.id, used)
            return await self._retrieval.index(request, span, heard, embed)

    async def text_of(self, caller: Caller, attached: AttachedFile, hold: Holding) -> str:
        """What searches could find of it, as one text. Raises INVALID_ARGUMENT for a document that
        cannot be read, and what `hold` (of so many bytes) does."""
        request = ReadRequest(
            caller=caller,
            blob=await self._files.in_blob(caller.tenant, attached.id),
            title=attached.filename,
        )
        with self._telemetry.lone_span("read file", file_id=attached.id) as span:
            return await self._retrieval.read(request, span, hold)

    async def remove_store(self, caller: Caller, store: str) -> None:
        await self._remove(RemoveRequest(caller=caller, collection=store))

    async def remove_file(
        self, caller: Caller, store: str, file_id: str, attachment: str = ""
    ) -> bool:
        """As it was attached; without that: of one that is there no more. Nothing of what was
        attached anew meanwhile; then False."""
        revision = await self._records.revise(caller.tenant, store, file_id, attachment)
        if revision:
            place = {"collection": store, "source_id": file_id}
            await self._remove(RemoveRequest(caller=caller, revision=revision, **place))
        return revision > 0

    async def forget(self, caller: Caller, task: Attachment) -> None:
        """What may have been indexed of a file that is no longer in the store, or cancelled."""
        for file in await self._records.files(caller.tenant, task.store, [task.file]):
            if file.attachment == task.attachment and file.state == "cancelled":
                await self.remove_file(caller, task.store, task.file, task.attachment)
            return
        await self.remove_file(caller, task.store, task.file)

    async def describe(self, caller: Caller, store: str, file_id: str) -> None:
        """Searches find the file by the attributes that its record has."""
        told: Attributes | None = None
        while True:
            file = await self._records.file(caller.tenant, store, file_id)
            if file.state != "completed" or file.attributes == told:
                return  # one on its way is told of as it arrives
            told = file.attributes
            await self.describe_as(caller, file)

    async def describe_as(self, caller: Caller, file: AttachedFile) -> None:
        """By the attributes of this record."""
        request = SetAttributesRequest(
            caller=caller,
            collection=file.store,
            source_id=file.id,
            attributes=attribute_values(file.attributes),
        )
        with self._telemetry.lone_span("set attributes", file_id=file.id) as span:
            await self._retrieval.set_attributes(request, span)

    async def _remove(self, request: RemoveRequest) -> None:
        with self._telemetry.lone_span("remove") as span:
            await self._retrieval.remove(request, span)


def _chunking(attached: AttachedFile) -> retrieval_pb2.Chunking | None:
    cut = attached.chunking
    if cut is None:
        return None
    return retrieval_pb2.Chunking(max_tokens=cut.max_tokens, overlap_tokens=cut.overlap_tokens)
