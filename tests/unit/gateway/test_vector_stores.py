"""Vector stores and what is noted of their files, with a retrieval that does as a test says."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from protos.common_pb2 import Caller
from protos.retrieval_pb2 import IndexRequest
from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid
from services.common.redis import connect
from services.common.telemetry import Telemetry
from services.gateway.files import FileRecord, Files
from services.gateway.indexing import Indexing
from services.gateway.store_files import StoreFiles
from services.gateway.vector_stores import VectorStores
from tests.support.waiting import until

CALLER = Caller(request_id="r", tenant="acme")


class Retrieval:
    """Takes all; while `gate` is not set, it waits over each file."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: PenstockError | None = None
        self.begun = 0
        self.indexing = 0
        self.most_at_once = 0

    async def index(self, request: IndexRequest, span: Any) -> None:
        self.begun += 1
        self.indexing += 1
        self.most_at_once = max(self.most_at_once, self.indexing)
        try:
            await self.gate.wait()
            if self.failure is not None:
                raise self.failure
        finally:
            self.indexing -= 1

    async def remove(self, request: Any, span: Any) -> None: ...


class Rig:
    def __init__(self, redis: Any, namespace: str) -> None:
        self.redis = redis
        self.retrieval = Retrieval()
        self.files = Files(redis, namespace, GatewaySettings(), max_chars=1000)
        store_files = StoreFiles(redis, namespace)
        self.indexing = Indexing(
            self.files,
            store_files,
            cast(Any, self.retrieval),
            Telemetry("gateway", "gateway-1"),
        )
        self.stores = VectorStores(
            redis, namespace, self.files, store_files, self.indexing, max_stores=10
        )

    async def file(self, text: str = "text") -> FileRecord:
        return await self.files.create("acme", "a.txt", text.encode())

    async def store(self, *files: FileRecord) -> str:
        made = await self.stores.create(CALLER, "s", {}, [file.id for file in files])
        return str(made["id"])

    async def statuses(self, store: str) -> list[str]:
        return [file.status for file in await self.stores.files("acme", store)]


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    redis = connect(redis_url)
    rig = Rig(redis, namespace)
    yield rig
    await rig.stores.stop()
    await redis.aclose()


async def test_a_deleted_store_is_forgotten_by_its_files(rig: Rig) -> None:
    file = await rig.file()
    gone, kept = await rig.store(file), await rig.store(file)
    assert await rig.files.stores_of("acme", file.id) == {gone, kept}
    await rig.stores.delete(CALLER, gone)
    assert await rig.files.stores_of("acme", file.id) == {kept}


async def test_a_deleted_file_leaves_no_key(rig: Rig) -> None:
    file = await rig.file()
    await rig.store(file)
    await rig.stores.drain(5)
    await rig.stores.forget_file(CALLER, file.id)
    await rig.files.delete("acme", file.id)
    assert await rig.files.stores_of("acme", file.id) == set()
    assert [key async for key in rig.redis.scan_iter(f"*{file.id}*")] == []


async def test_only_what_is_searchable_counts_as_used(rig: Rig) -> None:
    store = await rig.store(await rig.file("12345"))
    await rig.stores.drain(5)
    rig.retrieval.failure = invalid("no good", "text", stage="retrieval")
    await rig.stores.attach(CALLER, store, (await rig.file("123")).id)
    await rig.stores.drain(5)
    told = await rig.stores.get("acme", store)
    assert told["usage_bytes"] == 5
    assert (told["file_counts"]["completed"], told["file_counts"]["failed"]) == (1, 1)


async def test_files_that_fail_or_are_given_up_give_their_turn_back(rig: Rig) -> None:
    rig.retrieval.failure = invalid("no good", "text", stage="retrieval")
    store = await rig.store(*[await rig.file() for _ in range(5)])
    await rig.stores.drain(5)
    assert await rig.statuses(store) == ["failed"] * 5
    rig.retrieval.failure = None
    rig.retrieval.gate.clear()
    for _ in range(5):
        given_up = await rig.file()
        await rig.stores.attach(CALLER, store, given_up.id)
        await until(lambda: rig.retrieval.indexing == 1, 5)
        await rig.stores.detach(CALLER, store, given_up.id)
    rig.retrieval.gate.set()
    await rig.stores.attach(CALLER, store, (await rig.file()).id)
    await rig.stores.drain(5)
    assert sorted(await rig.statuses(store)) == ["completed"] + ["failed"] * 5


async def test_a_file_attached_again_is_indexed_once_at_a_time(rig: Rig) -> None:
    rig.retrieval.gate.clear()
    file = await rig.file()
    store = await rig.store(file)
    await until(lambda: rig.retrieval.indexing == 1, 5)
    await rig.stores.attach(CALLER, store, file.id)
    await until(lambda: rig.retrieval.begun == 2, 5)
    rig.retrieval.gate.set()
    await rig.stores.drain(5)
    assert rig.retrieval.most_at_once == 1
    assert await rig.statuses(store) == ["completed"]
