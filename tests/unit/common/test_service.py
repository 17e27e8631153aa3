import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.config import Settings
from services.common.discovery import Directory, Registration
from services.common.redis import connect
from services.common.service import Host, Service, _serve_until_signal
from services.common.versions import version
from tests.support.transport import TRANSPORT
from tests.support.waiting import leaving_no_task, until


class Quiet(Service):
    name = "router"
    grpc_services = ("penstock.v1.Router",)
    broken = False
    drained = stopped = False

    async def start(self, server: grpc.aio.Server) -> None:
        if self.settings.log_level == "ERROR":
            raise RuntimeError("cannot start")

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("broken")

    async def drain(self, grace_s: float) -> None:
        self.drained = True

    async def stop(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """A host that was stopped has ended all that it began."""
    async with leaving_no_task():
        yield


@pytest.fixture
def settings(redis_url: str, namespace: str) -> Settings:
    return Settings(redis_url=redis_url, namespace=namespace, lease_s=0.6)


async def test_what_a_started_process_consists_of_is_no_garbage_to_look_through(
    settings: Settings,
) -> None:
    host = Host(Quiet, settings)
    await host.start()
    # Set aside once in this process, perhaps by another test's host.
    assert gc.get_freeze_count() > 10_000
    assert all(one is not vars(asyncio) for one in gc.get_objects())
    await host.stop()


async def test_a_host_serves_health_reflection_and_metrics_and_registers(
    settings: Settings,
) -> None:
    host = Host(Quiet, settings)
    replica = await host.start()
    redis = connect(settings.redis_dsn)
    view = Directory(redis, settings.namespace, "router", settings.lease_s)
    await view.refresh()
    assert view.replicas == {replica.id: replica}
    async with TRANSPORT.dial(replica.address, "echo") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("penstock.v1.Router", ""):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, name
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        answers = [a async for a in listing]
        listed = {s.name for s in answers[0].list_services_response.service}
        assert {"penstock.v1.Router", "grpc.health.v1.Health"} <= listed
    import urllib.request

    def scrape() -> bytes:
        with urllib.request.urlopen(replica.metrics_url, timeout=5) as page:
            return bytes(page.read())

    assert b"python_info" in await asyncio.to_thread(scrape)
    assert replica.version == version() != "unknown"
    await host.stop()
    await view.refresh()
    assert host.service.drained
    assert host.service.stopped
    await redis.aclose()


async def test_threads_let_its_loop_go_on_soon(settings: Settings) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    host = Host(Quiet, settings)
    try:
        await host.start()
        assert sys.getswitchinterval() <= 0.001
        await host.stop(0)
    finally:
        sys.setswitchinterval(before)


async def test_it_lives_while_it_drains_and_not_when_its_loop_hangs(settings: Settings) -> None:
    host = Host(Quiet, settings)
    replica = await host.start()
    url = urlsplit(replica.metrics_url)._replace(path="/healthz").geturl()
    async with httpx.AsyncClient(timeout=30, trust_env=False) as probe:
        await host.drain()
        assert (await probe.get(url)).status_code == 200
    probed = threading.Thread(target=lambda: answers.append(httpx.get(url, timeout=30).status_code))
    answers: list[int] = []
    probed.start()
    probed.join()  # on the loop that should answer
    assert answers == [503]
    await host.stop()


async def test_a_failed_check_takes_the_replica_out_of_registry_and_health(
    settings: Settings,
) -> None:
    host = Host(Quiet, settings)
    replica = await host.start()
    host.service.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        host.check()
    await asyncio.wait_for(host.failed.wait(), 5)
    async with TRANSPORT.dial(replica.address, "echo") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    redis = connect(settings.redis_dsn)
    assert await redis.hlen(f"{settings.namespace}:{{registry:router}}") == 0
    await host.stop()
    await redis.aclose()


async def test_a_failed_start_cleans_up_and_raises(settings: Settings) -> None:
    host = Host(Quiet, settings.model_copy(update={"log_level": "ERROR"}))
    with pytest.raises(RuntimeError, match="cannot start"):
        await host.start()
    assert host.service.stopped


async def test_without_redis_a_host_still_serves_and_registers_later(namespace: str) -> None:
    from services.common.embedded_redis import EmbeddedRedis

    server = EmbeddedRedis()
    settings = Settings(redis_url=server.url, namespace=namespace, lease_s=0.6)
    host = Host(Quiet, settings)
    replica = await host.start()
    server.start()
    redis = connect(server.url)
    view = Directory(redis, namespace, "router", settings.lease_s)

    async def seen() -> bool:
        await view.refresh()
        return replica.id in view.replicas

    await until(seen)
    await host.stop()
    await redis.aclose()
    server.stop()


class Leaving(Quiet):
    """Looks at its host while it drains."""

    async def drain(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.registered = await self.redis.hlen(f"{self.settings.namespace}:{{registry:router}}")
        async with TRANSPORT.dial(self.address, "echo") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            self.health = (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status


@pytest.mark.parametrize(("given", "grace_s"), [(None, 20.0), (7.0, 7.0), (0.0, 0.0)])
async def test_a_host_that_stops_is_looked_for_by_nobody_before_it_drains(
    settings: Settings, given: float | None, grace_s: float
) -> None:
    host = Host(Leaving, settings)
    replica = await host.start()
    host.service.address = replica.address
    await host.stop(grace_s=given)
    assert (host.service.grace_s, host.service.registered) == (grace_s, 0)
    assert host.service.health == health_pb2.HealthCheckResponse.NOT_SERVING
    assert host.service.stopped
    for url in (f"http://{replica.address}", replica.metrics_url):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", urlsplit(url).port)


async def test_a_drain_tells_probes_before_it_waits_for_redis(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(Quiet, settings)
    replica = await host.start()
    register, answers = host._register, asyncio.Event()

    async def hung(*given: object) -> Registration:
        await answers.wait()
        return await register(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(host, "_register", hung)
    drain = host.drain()
    async with TRANSPORT.dial(replica.address, "echo") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def told() -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            return bool(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)

        await until(told)
    assert not drain.done()
    answers.set()
    await host.stop(grace_s=0)
    assert host.service.drained


async def test_what_never_served_has_nothing_to_drain(settings: Settings) -> None:
    host = Host(Quiet, settings.model_copy(update={"log_level": "ERROR"}))
    with pytest.raises(RuntimeError, match="cannot start"):
        await host.start()
    assert not host.service.drained
    assert host.replica is None


class Stuck(Quiet):
    async def drain(self, grace_s: float) -> None:
        raise RuntimeError("of the drain")


async def test_a_drain_that_fails_keeps_nothing_from_ending(
    settings: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    host = Host(Stuck, settings)
    replica = await host.start()
    await host.stop()
    assert host.service.stopped
    assert "of the drain" in capfd.readouterr().err
    for url in (f"http://{replica.address}", replica.metrics_url):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", urlsplit(url).port)


class Odd(Quiet):
    broken = True


@pytest.mark.parametrize(
    ("service", "asked", "status"),
    [(Quiet, signal.SIGTERM, 0), (Quiet, signal.SIGINT, 0), (Odd, None, 1)],
)
async def test_alone_it_ends_well_when_asked_to_and_with_1_when_its_check_fails(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    service: type[Quiet],
    asked: signal.Signals | None,
    status: int,
) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:  # one that nobody takes ends this test, not all tests
        signal.signal(number, lambda *_: None)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", settings.redis_dsn)
    monkeypatch.setenv("PENSTOCK_NAMESPACE", settings.namespace)
    monkeypatch.setattr("services.common.service._CHECK_EVERY_S", 0.01)
    serving = asyncio.create_task(_serve_until_signal(service))
    redis = connect(settings.redis_dsn)
    view = Directory(redis, settings.namespace, "router", settings.lease_s)

    async def seen() -> bool:
        await view.refresh()
        return bool(view.replicas) or serving.done()

    await until(seen)
    if asked is not None:
        os.kill(os.getpid(), asked)
    assert await asyncio.wait_for(serving, 20) == status
    await redis.aclose()
    for number, handler in before.items():
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, handler)
