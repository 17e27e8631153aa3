"""Records that other gateways tell of: whose they are, how many, and that a gateway's end loses
none."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from protos.common_pb2 import Record, Span
from services.common.config import GatewaySettings
from services.common.redis import Redis
from services.gateway.runs import shared_records
from services.gateway.runs.records import Journal, Records
from services.gateway.runs.shared_records import SharedRecords
from services.gateway.stores.files.storage_room import StorageRoom
from tests.support.waiting import leaving_no_task, until

Make = Callable[..., SharedRecords]


@pytest.fixture
def gateway(redis: Redis, namespace: str) -> Make:
    """The records of one more gateway."""

    def make(**settings: Any) -> SharedRecords:
        own = GatewaySettings(**settings)
        room = StorageRoom(redis, namespace, own)
        return SharedRecords(redis, namespace, own, room)

    return make


def record(number: int, tenant: str = "acme") -> Journal:
    journal = Journal(f"req_{number}", "chat")
    journal.tenant = tenant
    journal.close(Record(spans=[Span(service="router", name=f"run {number}")]))
    return journal


async def found(records: SharedRecords, numbers: Sequence[int], tenant: str = "acme") -> list[int]:
    return [n for n in numbers if await records.find(f"req_{n}", tenant) is not None]


async def test_another_gateway_tells_of_it_to_its_tenant(gateway: Make) -> None:
    one, other = gateway(), gateway()
    one.start()
    one.keep(record(1))
    await until(lambda: found(other, [1]))
    journal = await other.find("req_1", "acme")
    assert journal is not None
    assert journal.as_json()["spans"][0]["name"] == "run 1"
    assert await other.find("req_1", "rival") is None
    assert await other.find("req_2", "acme") is None
    await one.stop()


async def test_no_id_that_is_asked_for_makes_another_tenants_key(gateway: Make) -> None:
    one = gateway()
    one.start()
    one.keep(record(1, "acme"))
    await one.stop()
    assert await found(one, [1]) == [1]
    assert await one.find("mereq_1", "ac") is None
    assert await one.find("cme:req_1", "a") is None


async def test_a_request_of_nobody_known_keeps_no_others_from_being_written(gateway: Make) -> None:
    one = gateway()
    one.start()
    one.keep(Journal("req_0", "chat"))  # it was refused at the door
    one.keep(record(1))
    await until(lambda: found(one, [1]))
    one.keep(record(2))
    await one.stop()
    assert await found(one, range(3)) == [1, 2]


async def test_the_newest_of_each_tenant_are_kept_for_a_time(
    gateway: Make, redis: Redis, namespace: str
) -> None:
    one = gateway(records_kept=3, records_kept_s=60)
    for tenant in ("acme", "rival"):
        one.start()
        for number in range(5):  # more than may wait, too: the oldest are not written
            one.keep(record(number, tenant))
            await asyncio.sleep(0)
        await one.stop()
        one = gateway(records_kept=3, records_kept_s=60)
    for tenant in ("acme", "rival"):
        assert await found(one, range(5), tenant) == [2, 3, 4]
    keys = [key async for key in redis.scan_iter(f"{namespace}:*")]
    assert len(keys) == 2 * (3 + 1)
    assert all([0 < await redis.ttl(key) <= 60 for key in keys])


async def test_the_end_of_a_gateway_in_the_middle_of_writing_loses_none(
    gateway: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, begun, go_on = gateway(), asyncio.Event(), asyncio.Event()
    write = one._keep

    async def slow(*told: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await write(*told)

    monkeypatch.setattr(one, "_keep", slow)
    one.start()
    for number in range(250):
        one.keep(record(number))
    await begun.wait()
    end = asyncio.create_task(one.stop())
    await asyncio.sleep(0)
    one.keep(record(250))  # of a request that was ended
    go_on.set()
    await end
    assert await found(gateway(), range(251)) == list(range(251))


async def test_what_came_just_before_the_end_is_written_without_waiting_for_more(
    gateway: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_records, "_EVERY_S", 60.0)
    monkeypatch.setattr(shared_records, "_LAST_S", 60.0)  # nor for the end of its patience
    one = gateway()
    one.start()
    one.keep(record(1))
    async with asyncio.timeout(30):
        await one.stop()
    assert await found(gateway(), [1]) == [1]
    nothing = gateway()
    nothing.start()
    async with asyncio.timeout(30):
        await nothing.stop()
    assert not caplog.records, "it ended by itself"


async def test_no_more_wait_for_redis_than_are_kept(
    gateway: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is away: a gateway's memory is no place for records."""
    one, written = gateway(records_kept=3), list[str]()

    async def write(_keys: Any, told: Sequence[Any]) -> None:
        written.extend(told[3::2])

    monkeypatch.setattr(one, "_keep", write)
    for number in range(10):
        one.keep(record(number))
    one.start()
    await one.stop()
    assert written == ["req_7", "req_8", "req_9"]


async def test_an_end_does_not_wait_for_a_redis_that_hangs(
    gateway: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_records, "_LAST_S", 0.05)
    one = gateway()
    ended = asyncio.Event()

    async def hangs(*_: Any) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        ended.set()
        raise asyncio.CancelledError

    monkeypatch.setattr(one, "_keep", hangs)
    one.start()
    one.keep(record(1))
    async with asyncio.timeout(30):
        await one.stop()
    assert ended.is_set(), "and leaves nothing running"
    assert "the last records are not shared" in caplog.text


async def test_while_redis_is_away_records_are_left_out_and_later_ones_are_not(
    gateway: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = gateway()
    write, away = one._keep, True

    async def flaky(*told: Any) -> Any:
        if away:
            raise ConnectionError
        return await write(*told)

    monkeypatch.setattr(one, "_keep", flaky)
    one.start()
    one.keep(record(1))
    await until(lambda: "1 records are not shared" in caplog.text)
    away = False
    one.keep(record(2))
    await one.stop()
    assert await found(gateway(), [1, 2]) == [2]


async def test_what_one_gateway_kept_another_finds(gateway: Make) -> None:
    first, second = Records(10, gateway()), Records(10, gateway())
    async with leaving_no_task():
        first.start()
        second.start()
        first.keep(record(1))

        async def found() -> bool:
            return await second.look_up("req_1", "acme") is not None

        await until(found)
        assert second.find("req_1", "acme") is None, "that is of its own alone"
        assert await second.look_up("req_1", "rival") is None
        await first.stop()
        await second.stop()
