"""How full Redis is: told, and what is no longer taken when it is nearly full, by whatever."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY
from redis.exceptions import NoPermissionError

from services.common.config import GatewaySettings
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError
from services.common.redis import Redis, connect
from services.gateway.runs.records import Journal
from services.gateway.runs.shared_records import SharedRecords
from services.gateway.stores.files import storage_room
from services.gateway.stores.files.files import Files
from services.gateway.stores.files.storage_room import StorageRoom
from tests.support.blob_folder import memory_blobs, pieces
from tests.support.stores_rig import CALLER, StoresRig
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_room, "_LOOK_EVERY_S", 0.005)


class Memory:
    """What Redis says of its memory."""

    def __init__(self, used: int = 0, most: int = 100) -> None:
        self.used, self.most = used, most
        self.failure: Exception | None = None
        self.asked = 0

    async def info(self, section: str) -> dict[str, Any]:
        assert section == "memory"
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return {"used_memory": self.used, "maxmemory": self.most}


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    redis = connect(redis_url)
    yield redis
    await redis.aclose()


@pytest.fixture
async def memory(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(redis, "info", memory.info)
    return memory


@pytest.fixture
async def rig(redis: Redis, namespace: str, memory: Memory) -> AsyncIterator[StoresRig]:
    rig = StoresRig(redis, namespace)
    rig.files.room.start()
    yield rig
    await rig.files.room.stop()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """As many as have ended."""
    ended: list[None] = []
    look = StorageRoom._look

    async def counted(self: StorageRoom) -> None:
        try:
            await look(self)
        finally:
            ended.append(None)

    monkeypatch.setattr(StorageRoom, "_look", counted)
    return ended


async def a_whole_look(looks: list[None]) -> None:
    """Returns when one has ended that began after this call."""
    before = len(looks)
    await until(lambda: len(looks) >= before + 2)


def told(name: str) -> float | None:
    return REGISTRY.get_sample_value(f"penstock_gateway_{name}")


async def test_the_bytes_of_files_and_their_limit_are_told(redis: Redis, namespace: str) -> None:
    """By a real Redis, which has no limit here."""
    rig = StoresRig(redis, namespace)
    rig.files.room.start()
    await until(lambda: (told("file_bytes"), told("blob_bytes")) == (0, 0))
    assert told("file_bytes_limit") == GatewaySettings().max_file_bytes
    assert told("blob_bytes_limit") == GatewaySettings().max_blob_bytes
    assert told("redis_memory_ratio") == 0
    first = await rig.file("x" * 70)
    await until(lambda: told("blob_bytes") == 70)
    await rig.file("x" * 30, tenant="other")
    await until(lambda: told("blob_bytes") == 100)
    await rig.files.delete("acme", first.id)
    await until(lambda: told("blob_bytes") == 30)
    assert not rig.files.room.full
    await rig.files.room.stop()
    await rig.files.room.stop()


async def refused(call: Any) -> str:
    with pytest.raises(PenstockError) as error:
        await call
    return error.value.reason


async def test_in_a_nearly_full_redis_tenants_keep_nothing_more(
    rig: StoresRig, memory: Memory
) -> None:
    file, another = await rig.file(), await rig.file()
    store = await rig.store(file)
    memory.used = 80
    await until(lambda: rig.files.room.full)
    assert told("redis_memory_ratio") == 0.8
    assert await refused(rig.file()) == "storage_full"
    assert await refused(rig.store()) == "storage_full"
    assert await refused(rig.attach(store, another)) == "storage_full"
    assert await rig.records.ids("acme") == [store]
    assert [one.id for one in await rig.records.all_files("acme", store)] == [file.id]
    # What is there is served, and may be taken away.
    assert await rig.files.content("acme", file.id) == b"text"
    await rig.stores.delete(CALLER, store)
    await rig.files.delete("acme", another.id)
    memory.used = 79
    await until(lambda: not rig.files.room.full)
    await rig.store(await rig.file())


async def test_nor_are_records_shared(rig: StoresRig, memory: Memory, namespace: str) -> None:
    records = SharedRecords(rig.redis, namespace, GatewaySettings(), rig.files.room)
    memory.used = 100
    await until(lambda: rig.files.room.full)
    records.keep(Journal("req_1", "chat"))
    assert not records._waiting
    memory.used = 0
    await until(lambda: not rig.files.room.full)
    records.keep(Journal("req_1", "chat"))
    assert len(records._waiting) == 1


@pytest.mark.parametrize("failure", [ConnectionError(), NoPermissionError("no INFO for you")])
async def test_a_redis_that_does_not_tell_leaves_it_as_it_was(
    rig: StoresRig, memory: Memory, failure: Exception
) -> None:
    memory.used = 90
    await until(lambda: rig.files.room.full)
    memory.used, memory.failure, memory.asked = 0, failure, 0
    await until(lambda: memory.asked > 2)
    assert rig.files.room.full
    memory.failure = None
    await until(lambda: not rig.files.room.full)


async def test_what_is_no_number_leaves_it_as_it_was(
    rig: StoresRig, redis: Redis, memory: Memory, looks: list[None]
) -> None:
    await redis.set(rig.files.room.file_bytes_key, "many")
    await a_whole_look(looks)
    memory.used = 90
    asked = memory.asked
    await a_whole_look(looks)
    assert (rig.files.room.full, memory.asked) == (False, asked)
    await redis.delete(rig.files.room.file_bytes_key)
    await until(lambda: rig.files.room.full)


async def test_a_full_redis_still_lets_tenants_delete_files() -> None:
    """Else nobody could make the room that 507 asks for."""
    with EmbeddedRedis() as server:
        redis = connect(server.url)
        files = Files(redis, "full", GatewaySettings(), memory_blobs())
        kept = await files.create("a", "one.txt", pieces(b"some text"))
        await redis.config_set("maxmemory", 1)
        await files.delete("a", kept.id)
        await redis.config_set("maxmemory", 0)
        assert await files.all("a") == []
        assert int(await redis.get(files.room.file_bytes_key) or 0) == 0
        await redis.aclose()


async def test_without_a_limit_of_its_own_redis_is_never_full(
    rig: StoresRig, memory: Memory
) -> None:
    memory.used, memory.most, memory.asked = 10**12, 0, 0
    await until(lambda: memory.asked > 2)
    assert not rig.files.room.full
    assert told("redis_memory_ratio") == 0


async def test_what_changes_is_said_once(
    rig: StoresRig, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.used = 95
    await until(lambda: rig.files.room.full)
    memory.asked = 0
    await until(lambda: memory.asked > 3)
    assert caplog.text.count("Redis is nearly full") == 1


async def test_a_room_that_was_never_watched_ends(redis: Redis, namespace: str) -> None:
    room = StorageRoom(redis, namespace, 100)
    room.check()
    await room.stop()
