"""Where Prometheus finds all replicas."""

import asyncio

import pytest

from services.common.config import Settings
from services.common.discovery import DRAINING, Registration, Replica
from services.common.errors import PenstockError
from services.common.redis import connect
from services.gateway.targets import Targets


def replica(service: str, number: int, metrics_url: str) -> Replica:
    return Replica(service, f"{service}-{number:08x}", "h:1", "h", 1, metrics_url)


async def test_all_replicas_are_listed_as_http_sd_wants_them(
    redis_url: str, namespace: str
) -> None:
    settings = Settings(redis_url=redis_url, namespace=namespace, lease_s=5)
    redis = connect(redis_url)
    replicas = [
        replica("gateway", 1, "http://10.0.0.1:9100/metrics"),
        replica("worker", 1, "http://10.0.0.2:9104/metrics"),
        replica("worker", 2, "http://[fd00::1]:9104/metrics"),
        replica("router", 1, ""),
    ]
    held = [Registration(redis, namespace, one, 5) for one in replicas]
    drains = replica("router", 2, "http://10.0.0.3:9103/metrics")
    held.append(Registration(redis, namespace, drains, 5, DRAINING))
    for one in held:
        await one.start()
    targets = Targets(redis, settings)
    listed = await targets.page()
    assert sorted(t for group in listed for t in group["targets"]) == [
        "10.0.0.1:9100",
        "10.0.0.2:9104",
        "10.0.0.3:9103",
        "[fd00::1]:9104",
    ]
    assert listed[0]["labels"] == {
        "service": "gateway",
        "replica": "gateway-00000001",
        "__metrics_path__": "/metrics",
    }
    for one in held:
        await one.stop()
    await redis.aclose()


async def test_no_view_of_the_registry_is_no_empty_list() -> None:
    """Which would end the scraping of everything, just when something is wrong."""
    settings = Settings(redis_url="redis://127.0.0.1:1/0")
    redis = connect(settings.redis_dsn)
    with pytest.raises(PenstockError, match="Redis is away"):
        await Targets(redis, settings).page()
    await redis.aclose()


async def test_the_views_are_looked_at_together(namespace: str) -> None:
    """A Redis that hangs costs the page one command's time, not one for each service."""
    hanging = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
    port = hanging.sockets[0].getsockname()[1]
    settings = Settings(redis_url=f"redis://127.0.0.1:{port}/0", namespace=namespace)
    redis = connect(settings.redis_dsn)
    async with asyncio.timeout(5):
        with pytest.raises(PenstockError, match="Redis is away"):
            await Targets(redis, settings).page()
    await redis.aclose()
    hanging.close()
