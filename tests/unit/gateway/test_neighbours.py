"""Which gateways are behind the same ports of a host, by the registry."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from services.common.config import Settings
from services.common.discovery import DRAINING, Registration, Replica, host_id
from services.common.redis import Redis, connect
from services.gateway import neighbours
from services.gateway.neighbours import Neighbours
from tests.support.waiting import until

HERE = host_id("127.0.0.1")
Register = Callable[..., Awaitable[Registration]]


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def settings(redis_url: str, namespace: str) -> Settings:
    told: Any = {"PENSTOCK_REDIS_URL": redis_url, "namespace": namespace}
    return Settings.model_validate(told)


@pytest.fixture
def gateways(redis: Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Neighbours:
    monkeypatch.setattr(neighbours, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(neighbours, "_PATIENCE_S", 0.1)
    return Neighbours(redis, settings, "gateway-00000001")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """As many looks into the registry as have ended."""
    ended: list[None] = []
    known = Neighbours._known

    async def counted(self: Neighbours, *services: str) -> list[dict[str, str]]:
        found = await known(self, *services)
        ended.append(None)
        return found

    monkeypatch.setattr(Neighbours, "_known", counted)
    return ended


async def goes_on_waiting(waiting: asyncio.Task[Any], looks: list[None]) -> None:
    """Looks that began after this call have ended, and not with what is waited for."""
    before = len(looks)
    await until(lambda: len(looks) >= before + 3)
    assert not waiting.done()


@pytest.fixture
async def register(redis: Redis, namespace: str) -> AsyncIterator[Register]:
    made: list[Registration] = []

    async def one(
        http: int,
        grpc: int,
        host: str = HERE,
        under: str = "",
        id: int = 2,
        address: str = "127.0.0.1",
    ) -> Registration:
        facts = {"url": f"https://{address}:{http}", "grpc": f"{address}:{grpc}"}
        replica = Replica("gateway", f"gateway-{id:08}", "h:1", host, 1, facts=facts)
        made.append(Registration(redis, namespace, replica, 60, under))
        await made[-1].start()
        return made[-1]

    yield one
    for registration in made:
        await registration.stop()


async def test_another_is_one_that_serves_at_the_same_ports_of_this_host(
    gateways: Neighbours, register: Register, looks: list[None]
) -> None:
    ports = {"http": 8000, "grpc": 8001}
    await register(8000, 8001, host=host_id("127.0.0.2"))
    await register(8000, 8001, under=DRAINING)
    await register(8000, 8001, id=1)  # itself, which could not leave the registry
    await register(8000, 9001, id=3)
    await register(9000, 8001, id=4)
    await register(8000, 8001, id=6, address="[::1]")  # another door of this host
    assert not await gateways.comes(ports, 0)
    coming = asyncio.create_task(gateways.comes(ports, 30))
    await goes_on_waiting(coming, looks)
    other = await register(8000, 8001, id=5)
    assert await coming
    assert await gateways.comes(ports, 0)
    await other.stop()
    assert not await gateways.comes(ports, 0), "the view is fresh"


async def test_who_listens_must_be_known(gateways: Neighbours, register: Register) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as somebody,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        http, grpc = somebody.getsockname()[1], second.getsockname()[1]
        ports = {"http": http, "grpc": grpc}
        for told in ({"http": http, "grpc": 0}, {"http": 0, "grpc": http}):
            with pytest.raises(RuntimeError, match=f"port {http} on 127.0.0.1: in use"):
                await gateways.admit(told)
        await register(http, grpc, host=host_id("127.0.0.2"))
        await register(grpc, http, id=3)
        with pytest.raises(RuntimeError, match="in use, and by no gateway of the namespace"):
            await gateways.admit(ports)
        await register(http, 0, under=DRAINING, id=4)
        with pytest.raises(RuntimeError, match=f"port {grpc} on 127.0.0.1: in use"):
            await gateways.admit(ports)
        await register(0, grpc, id=6, address="10.0.0.5")
        with pytest.raises(RuntimeError, match=f"port {grpc} on 127.0.0.1: in use"):
            await gateways.admit(ports)
        await register(0, grpc, id=5)
        await gateways.admit(ports)
    await gateways.admit({"http": 0, "grpc": 0})


async def test_who_only_starts_or_only_ends_is_waited_for(
    gateways: Neighbours,
    register: Register,
    looks: list[None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbours, "_PATIENCE_S", 30.0)
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        http = somebody.getsockname()[1]
        admitted = asyncio.create_task(gateways.admit({"http": http, "grpc": 0}))
        await goes_on_waiting(admitted, looks)
        await register(http, 1)
        await admitted
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        http = somebody.getsockname()[1]
        admitted = asyncio.create_task(gateways.admit({"http": http, "grpc": 0}))
        await goes_on_waiting(admitted, looks)
    await admitted


async def test_all_addresses_are_looked_at_as_this_host_s_own(
    redis: Redis, settings: Settings, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_PATIENCE_S", 0.1)
    settings = settings.model_copy(update={"advertise_host": "10.0.0.7"})
    own = settings.gateway.model_copy(update={"host": "0.0.0.0"})
    gateways = Neighbours(redis, settings.model_copy(update={"gateway": own}), "gateway-00000001")
    with (
        socket.create_server(("127.0.0.1", 0)) as somebody,
        pytest.raises(RuntimeError, match=r"on 0\.0\.0\.0: in use"),
    ):
        await gateways.admit({"http": somebody.getsockname()[1], "grpc": 0})
    await register(8000, 8001, host=host_id("10.0.0.7"), address="10.0.0.7")
    assert await gateways.comes({"http": 8000, "grpc": 8001}, 0)
