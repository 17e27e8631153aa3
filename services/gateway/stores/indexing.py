"""Files on their way into vector stores: each is read, sent to retrieval, and its outcome noted.

A file may be taken out of its store while it is on its way, here or at another gateway. Whatever
became of it then, what retrieval may hold of it is removed last.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

import grpc

from protos.common_pb2 import Caller, Usage
from protos.retrieval_pb2 import IndexReply, IndexRequest, RemoveRequest
from services.common.errors import PenstockError
from services.common.redis import RedisAway
from services.common.telemetry import Telemetry
from services.common.turns import Turns
from services.gateway.identity.principal import Principal
from services.gateway.metering.estimate import of_bytes
from services.gateway.metering.meter import Meter, Metered
from services.gateway.stores.files import FileRecord, Files
from services.gateway.stores.retrieval_client import INDEX_TIMEOUT_S, RetrievalClient
from services.gateway.stores.store_files import AttachedFile, StoreFiles

log = logging.getLogger(__name__)

ROUTE = "index"  # in the ledger
QUEUEING_S = 1800.0  # a file's indexing begins within this, or has failed
INDEXING_S = 600.0  # and ends within this
_AT_ONCE = 2
_QUEUE = 256  # files of one tenant; tenants are those to whom the operator gave keys
_RETRY_S = 1.0


class _Place(NamedTuple):
    """Where a file is going."""

    tenant: str
    store: str
    file: str


class Indexing:
    def __init__(
        self,
        files: Files,
        store_files: StoreFiles,
        retrieval: RetrievalClient,
        meter: Meter,
        telemetry: Telemetry,
    ) -> None:
        self._files = files
        self._store_files = store_files
        self._retrieval = retrieval
        self._meter = meter
        self._telemetry = telemetry
        self._tasks: dict[asyncio.Task[None], _Place] = {}
        self._turns = Turns(_AT_ONCE)

    def expect(self, who: Principal, files: int) -> None:
        """Raises RESOURCE_EXHAUSTED ("index_queue_full") when so many more of the tenant's files
        are too many, or "storage_full"; PERMISSION_DENIED where he may not use the embedding
        model."""
        if files and (model := self._retrieval.embedding_model):  # else asked when it is known
            who.authorize_embedding(model)
        self._files.room.check()
        waiting = sum(place.tenant == who.tenant for place in self._tasks.values())
        if waiting + files > _QUEUE:
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
        tenant = caller.tenant
        self.expect(who, 1)
        await self.give_up(tenant, store, file.id)
        attached = AttachedFile(
            id=file.id,
            store=store,
            filename=file.filename,
            created_at=int(time.time()),
            bytes=file.bytes,
            indexing_until=time.time() + QUEUEING_S + INDEXING_S,
        )
        await self._files.note_store(tenant, file.id, store, held=True)
        await self._store_files.put(tenant, attached)
        task = asyncio.create_task(
            self._run(who, caller, attached.model_copy(), file), name=f"index {file.id}"
        )
        self._tasks[task] = _Place(tenant, store, file.id)
        task.add_done_callback(self._tasks.pop)
        return attached

    async def remove(self, caller: Caller, store: str, file_id: str = "") -> None:
        """Takes a file, or all of the store, out of what is searchable, and off its way there."""
        await self.give_up(caller.tenant, store, file_id)
        await self._unindex(caller, store, file_id)

    async def give_up(self, tenant: str, store: str, file_id: str = "") -> None:
        """Ends what is on its way at this gateway; without a file, all of the store."""
        tasks = list(self._on_the_way(tenant, store, file_id))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, grace_s: float) -> None:
        """Lets what is on its way arrive for `grace_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)

    async def stop(self) -> None:
        """Files whose indexing has not finished are marked as failed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_the_way(self, tenant: str, store: str, file_id: str) -> Iterator["asyncio.Task[None]"]:
        for task, place in self._tasks.items():
            if (place.tenant, place.store) == (tenant, store) and file_id in ("", place.file):
                yield task

    async def _run(
        self, who: Principal, caller: Caller, attached: AttachedFile, file: FileRecord
    ) -> None:
        try:
            async with asyncio.timeout(QUEUEING_S):
                metered = await self._let_in(who, attached)
            try:
                async with asyncio.timeout(INDEXING_S):
                    reply = await self._index(caller, attached, file)
                metered.usage = lambda: Usage(prompt_tokens=reply.tokens)
                await self._meter.settle(metered)
            except BaseException as error:
                self._meter.end(metered, error)
                raise
            finally:
                self._turns.give_back()
            attached.state = "completed"
        except PenstockError as error:
            attached.fail(error)
        except TimeoutError:
            attached.fail("indexing took too long")
        except RedisAway:
            attached.fail("the file could not be read")
        except asyncio.CancelledError:
            attached.fail("the gateway was shut down")
            await self._note_outcome(caller, attached, attempts=1)
            raise
        except Exception:
            log.exception("indexing %s failed", file.id)
            attached.fail("internal error")
        await self._note_outcome(caller, attached, attempts=30)

    async def _let_in(self, who: Principal, attached: AttachedFile) -> Metered:
        """Takes a turn, with room in all limits; where one has none for now it waits for that
        without a turn. An attachment is charged once, whoever settles it."""
        id = f"{attached.id}:{attached.attachment}"
        most = (of_bytes(attached.bytes), 0)
        while True:
            await self._turns.take(who.tenant)
            try:
                model = await self._retrieval.model(INDEX_TIMEOUT_S)
                who.authorize_embedding(model)
                return await self._meter.admit(who, id, ROUTE, model, most)
            except PenstockError as error:
                self._turns.give_back()
                if error.reason != "rate_limit_exceeded":
                    raise
                await asyncio.sleep(error.retry_after_s)
            except BaseException:
                self._turns.give_back()
                raise

    async def _index(self, caller: Caller, attached: AttachedFile, file: FileRecord) -> IndexReply:
        request = IndexRequest(
            caller=caller,
            collection=attached.store,
            source_id=file.id,
            title=file.filename,
            text=await self._files.content(caller.tenant, file.id),
        )
        with self._telemetry.lone_span("index file", file_id=file.id) as span:
            return await self._retrieval.index(request, span)

    async def _note_outcome(self, caller: Caller, attached: AttachedFile, attempts: int) -> None:
        for _ in range(attempts):
            try:
                if await self._store_files.settle(caller.tenant, attached) == "gone":
                    await self._unindex(caller, attached.store, attached.id)
                return
            except (*RedisAway, PenstockError) as error:
                log.warning("outcome of indexing %s not noted: %s", attached.id, error)
                await asyncio.sleep(_RETRY_S)

    async def _unindex(self, caller: Caller, store: str, file_id: str) -> None:
        request = RemoveRequest(caller=caller, collection=store, source_id=file_id)
        with self._telemetry.lone_span("remove") as span:
            await self._retrieval.remove(request, span)
