"""A stack on a machine's own Ray and a Redis that was given starts where no other one runs."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import up
from services.cli.ground import alone
from services.cli.ground.alone import check_alone
from services.cli.ground.local import LocalGround
from services.common.config import GatewaySettings, Settings
from services.common.discovery import DRAINING, Registration, Replica
from services.common.redis import Redis

LEASE_S = 0.3


@pytest.fixture
def settings(redis_url: str, namespace: str) -> Settings:
    given: dict[str, Any] = {"PENSTOCK_REDIS_URL": redis_url, "namespace": namespace}
    return Settings.model_validate(
        {**given, "lease_s": LEASE_S, "gateway": GatewaySettings(port=0)}
    )


def registered(redis: Redis, namespace: str, service: str, under: str = "") -> Registration:
    replica = Replica(service, f"{service}-0000000a", "h:1", "elsewhere", 1)
    return Registration(redis, namespace, replica, LEASE_S, under)


@pytest.fixture
async def other(
    redis: Redis, namespace: str, request: pytest.FixtureRequest
) -> AsyncIterator[None]:
    """A Penstock of which one replica lives."""
    registration = registered(redis, namespace, request.param)
    await registration.start()
    yield
    await registration.stop()


def begin(ground: LocalGround, settings: Settings) -> None:
    with ground.stores(settings):
        pass


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("other", ["gateway", "worker"], indirect=True)
async def test_a_second_one_does_not_start(settings: Settings) -> None:
    words = rf"'{settings.namespace}' runs on Redis at .*-0000000a\).*PENSTOCK_NAMESPACE"
    with pytest.raises(RuntimeError, match=words):
        await asyncio.to_thread(begin, LocalGround(print), settings)
    await asyncio.to_thread(begin, LocalGround(print, again=True), settings)
    elsewhere = settings.model_copy(update={"namespace": f"{settings.namespace}-2"})
    await asyncio.to_thread(begin, LocalGround(print), elsewhere)


async def test_the_lease_of_a_lost_one_is_waited_for(
    redis: Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "_LEASES", 100)
    await registered(redis, settings.namespace, "router")._once()
    said: list[str] = []
    await check_alone(settings, said.append)
    assert said == ["router-0000000a is registered: lost, or another Penstock's?"]


async def test_one_that_drains_leaves_its_place(redis: Redis, settings: Settings) -> None:
    draining = registered(redis, settings.namespace, "worker", DRAINING)
    await draining.start()
    said: list[str] = []
    await check_alone(settings, said.append)
    assert said == []
    await draining.stop()


async def test_without_redis_nobody_is_alone() -> None:
    with pytest.raises(ConnectionError, match="Redis is away"):
        await check_alone(Settings(redis_url="redis://127.0.0.1:1/0"), print)


@pytest.mark.parametrize("again", [True, False])
def test_one_in_a_lost_ones_place_is_told_so(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    stack = up.local_stack(
        Namespace(
            **{"model": [], "lora": [], "prefill": None, "decode": None},
            **{"quantization": None, "kv_format": None, "tensor_parallel": None},
        ),
        None,
        again=again,
    )
    assert isinstance(stack._ground, LocalGround)
    assert stack._ground._again is again
