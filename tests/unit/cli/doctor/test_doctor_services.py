"""The registered replicas, the door and the vector store, on real ports with a fault each."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.cli.commands.doctor import door, qdrant, replicas
from services.cli.commands.doctor.findings import Finding
from services.cli.commands.doctor.installation import Installation
from services.cli.stack.wanted_models import WantedModels
from services.common.config import ModelSpec, Settings
from services.common.discovery import Registration, Replica
from services.common.locks.certificates import CertificateFiles
from services.common.redis import connect
from services.common.transport import Transport, listen
from services.common.versions import version
from tests.support.authority import DAY, Authority
from tests.support.findings import about, state
from tests.support.transport import SECRET, TRANSPORT
from tests.support.web import serving

Make = Callable[..., Settings]
_WELL = health_pb2.HealthCheckResponse.SERVING
_ILL = health_pb2.HealthCheckResponse.NOT_SERVING
FACTS = {
    "tokenizer": {"models": "demo"},
    "worker": {
        "role": "both",
        "model": "demo",
        "digest": "abc",
        "kernels": "avx2",
        "quantization": "int8",
        "kv_format": "0123456789abcdef fp8 panels",
        "threads": "3",
        "weights": "/data/packed/x",
        "huge_bytes": str(5 * 2**20),
    },
    "gateway": {"url": "http://127.0.0.1:1", "grpc": "127.0.0.1:1"},
}
ALL = ("gateway", "retrieval", "tokenizer", "router", "worker")


def replica(service: str, address: str, metrics: str = "", **told: object) -> Replica:
    own = {
        "id": f"{service}-00000001",
        "host_id": "h",
        "pid": 1,
        "metrics_url": metrics,
        "facts": FACTS.get(service, {}),
        "version": version(),
    }
    return Replica(**{"service": service, "address": address, **own, **told})  # type: ignore[arg-type]


@asynccontextmanager
async def server(transport: Transport = TRANSPORT, told: int = _WELL) -> AsyncIterator[str]:
    """The address of a service that says so of its health."""
    servicer = health.aio.HealthServicer()
    await servicer.set("", told)
    own = transport.server(health=servicer)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, own)
    port = transport.listen(own, "127.0.0.1", 0)
    await own.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await own.stop(None)


@pytest.fixture
async def metrics() -> AsyncIterator[str]:
    with serving({"/metrics": (200, "")}) as address:
        yield f"http://{address}/metrics"


@pytest.fixture
async def well(metrics: str) -> AsyncIterator[list[Replica]]:
    """One of each service, all of them well."""
    async with server() as address:
        yield [replica(service, address, metrics) for service in ALL]


@pytest.fixture
def examine(settings: Make, redis_url: str, namespace: str) -> Callable[..., object]:
    """What is found of replicas that are registered in a real Redis."""

    async def run(listed: list[Replica], **told: object) -> list[Finding]:
        own = settings(redis_url=redis_url, namespace=namespace, **told)
        client = connect(redis_url)
        for one in listed:
            await Registration(client, namespace, one, 3600)._once()
        await client.aclose()
        it = await Installation.find(own)
        try:
            return await replicas.check(it)
        finally:
            await it.close()

    return run


Examine = Callable[..., "asyncio.Future[list[Finding]]"]


async def test_a_whole_platform_is_well(examine: Examine, well: list[Replica]) -> None:
    found = await examine(well)
    assert {finding.state for finding in found} == {"ok"}
    told = about(found, "worker-00000001").told
    assert (
        "kernels: avx2, quantization: int8, threads: 3, weights: /data/packed/x, KV: fp8 panels"
        in told
    )
    assert "5 MiB in huge pages" in told
    assert SECRET not in repr(found)


async def test_a_dead_replica_in_the_registry_is_told(
    examine: Examine, well: list[Replica], metrics: str
) -> None:
    dead = replica("worker", "127.0.0.1:1", metrics, id="worker-0000dead")
    found = await examine([*well, dead])
    assert state(found, "worker-0000dead") == "failed"
    assert "UNAVAILABLE" in about(found, "worker-0000dead").told
    assert state(found, "worker-00000001") == "ok"


async def test_a_replica_that_hangs_is_told_in_time(
    examine: Examine, well: list[Replica], metrics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        hung = replica("worker", at, metrics, id="worker-0000dead")
        found = await examine([*well, hung])
    assert state(found, "worker-0000dead") == "failed"


async def test_a_replica_that_drains_or_failed_its_check_is_told(
    examine: Examine, well: list[Replica], metrics: str
) -> None:
    async with server(told=_ILL) as address:
        found = await examine([*well, replica("router", address, metrics, id="router-00000ill")])
    assert state(found, "router-00000ill") == "failed"


async def test_another_secret_is_told_and_not_shown(
    examine: Examine, well: list[Replica], metrics: str
) -> None:
    async with server(Transport("another secret than the tests'")) as address:
        found = await examine([*well, replica("router", address, metrics, id="router-0000othr")])
    told = about(found, "router-0000othr")
    assert told.state == "failed"
    assert "does not take our internal secret" in told.told
    assert SECRET not in repr(found)


async def test_a_certificate_that_may_not_call_is_told(
    examine: Examine, well: list[Replica], metrics: str
) -> None:
    class Refuses(health_pb2_grpc.HealthServicer):
        async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
            yield

    own = TRANSPORT.server()
    health_pb2_grpc.add_HealthServicer_to_server(Refuses(), own)
    address = f"127.0.0.1:{TRANSPORT.listen(own, '127.0.0.1', 0)}"
    await own.start()
    found = await examine([*well, replica("router", address, metrics, id="router-0000deny")])
    await own.stop(None)
    told = about(found, "router-0000deny")
    assert told.state == "failed"
    assert "does not let this certificate's name call it" in told.told


async def test_without_a_secret_nobody_can_be_asked(examine: Examine, well: list[Replica]) -> None:
    told = about(await examine(well, internal_secret=""), "router-00000001")
    assert told.state == "failed"
    assert "PENSTOCK_INTERNAL_SECRET" in told.advice


async def test_with_certificates_the_commands_own_is_shown(
    examine: Examine, metrics: str, tmp_path: Path
) -> None:
    tls = Authority().identities(tmp_path / "tls", "router", "cli")
    other = Authority("another").identities(tmp_path / "other", "cli")
    own = Transport(SECRET, CertificateFiles.of_identity(tls, "router"))
    async with server(own) as address:
        listed = [replica("router", address, metrics)]
        assert state(await examine(listed, tls_dir=tls), "router-00000001") == "ok"
        assert state(await examine(listed, tls_dir=other), "router-00000001") == "failed"
        assert state(await examine(listed, tls_dir=tmp_path), "router-00000001") == "failed"


@pytest.mark.parametrize("service", ALL)
async def test_a_service_that_nobody_runs_is_told(
    service: str, examine: Examine, well: list[Replica]
) -> None:
    found = await examine([one for one in well if one.service != service])
    told = about(found, "services")
    assert f"no {service} is registered" in told.told
    assert told.state == ("warning" if service == "retrieval" else "failed")


async def test_a_model_wants_a_worker_that_decodes(
    examine: Examine, well: list[Replica], metrics: str
) -> None:
    listed = [one for one in well if one.service != "worker"]
    facts = {**FACTS["worker"], "role": "prefill"}
    listed.append(replica("worker", well[0].address, metrics, facts=facts))
    told = about(await examine(listed), "workers of demo")
    assert (told.state, told.told) == ("failed", "no worker that decodes demo is registered")


async def test_a_pool_that_is_drained_is_told_with_the_way_back(
    examine: Examine, well: list[Replica], metrics: str, redis_url: str, namespace: str
) -> None:
    """Its prefill workers answer in its place: nothing fails, and less is there than was given."""
    spec = ModelSpec(name="demo", path="/m").sized(1, 1)
    client = connect(redis_url)
    await WantedModels(client, namespace).start_with([spec], "keeper")
    await client.aclose()
    told = about(await examine(well), "workers of demo")
    assert told.state == "warning"
    assert "0 of 1 decode worker of demo" in told.told


async def test_versions_side_by_side_are_a_warning(
    examine: Examine, well: list[Replica], metrics: str
) -> None:
    older = replica("router", well[0].address, metrics, id="router-0000old", version="0.0.9")
    told = about(await examine([*well, older]), "versions")
    assert told.state == "warning"
    assert f"0.0.9, {version()}" in told.told


@pytest.mark.parametrize("others", ["0.0.9", ""])
async def test_this_command_is_of_their_version_too(
    others: str, examine: Examine, well: list[Replica]
) -> None:
    """Else what it says of them may not hold."""
    told = about(await examine([replace(one, version=others) for one in well]), "versions")
    assert told.state == "warning"
    assert others or "unknown" in told.told
    assert told.told.endswith(f"this command is {version()}")


async def test_one_checkpoint_for_all_workers_of_a_model(
    examine: Examine, well: list[Replica], metrics: str
) -> None:
    def worker(n: int, **facts: str) -> Replica:
        own = {**FACTS["worker"], **facts}
        return replica("worker", well[0].address, metrics, id=f"worker-{n}", facts=own)

    another = worker(2, model="other", digest="def")
    assert state(await examine([*well, another]), "model demo") == "ok"
    told = about(await examine([*well, another, worker(3, digest="ghi")]), "model demo")
    assert told.state == "failed"
    assert "abc, ghi" in told.told


@pytest.mark.parametrize(
    ("ahead_s", "told"), [(60, "ahead of"), (-60, "behind"), (4, "ahead of"), (-4, "behind")]
)
async def test_a_host_whose_clock_is_off_is_told(
    ahead_s: float, told: str, examine: Examine, well: list[Replica]
) -> None:
    with serving({"/metrics": (200, "")}, ahead_s=ahead_s) as there:
        off = replica("router", well[0].address, f"http://{there}/metrics", id="router-0000off")
        found = await examine([*well, off])
    assert about(found, "clock of router-0000off").state == "warning"
    assert f"{told} ours" in about(found, "clock of router-0000off").told


async def test_metrics_that_cannot_be_scraped_are_told(
    examine: Examine, well: list[Replica]
) -> None:
    mute = replica("router", well[0].address, "http://127.0.0.1:1/metrics", id="router-0000mute")
    assert state(await examine([*well, mute]), "clock of router-0000mute") == "warning"


async def test_an_empty_registry_and_none_at_all_are_told(examine: Examine, settings: Make) -> None:
    assert state(await examine([]), "services") == "failed"
    away = await Installation.find(settings(redis_url="redis://127.0.0.1:1/0"))
    assert state(await replicas.check(away), "services") == "failed"
    await away.close()


# -- the door


@asynccontextmanager
async def public_grpc(told: int = _WELL, folder: Path | None = None) -> AsyncIterator[str]:
    servicer = health.aio.HealthServicer()
    await servicer.set("", told)
    own = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, own)
    files = (
        CertificateFiles("door", folder / "tls.crt", folder / "tls.key", None) if folder else None
    )
    port = listen(own, "127.0.0.1", 0, files)
    await own.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await own.stop(None)


async def found_at(url: str, address: str) -> list[Finding]:
    gateway = replica("gateway", "", facts={"url": url, "grpc": address})
    return await door.check(Installation(Settings(), replicas=[gateway]))


READY = {"/readyz": (200, '{"status":"ok","missing":[]}')}


async def test_a_door_that_is_open_is_well() -> None:
    with serving(READY) as rest:
        async with public_grpc() as address:
            found = await found_at(f"http://{rest}", address)
    assert [(f.about, f.state) for f in found] == [("door REST", "ok"), ("door gRPC", "ok")]


async def test_a_door_says_what_it_lacks() -> None:
    pages = {"/readyz": (503, '{"status":"unavailable","missing":["no tokenizer is linked"]}')}
    with serving(pages) as rest:
        async with public_grpc(_ILL) as address:
            found = await found_at(f"http://{rest}", address)
    assert "no tokenizer is linked" in about(found, "door REST").told
    assert [f.state for f in found] == ["failed", "failed"]
    with serving({"/readyz": (200, '{"status":"degraded","missing":["Redis is away"]}')}) as rest:
        assert (await found_at(f"http://{rest}", "127.0.0.1:1"))[0].state == "warning"


async def test_a_door_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "_ANSWER_S", 0.3)
    over = asyncio.Event()

    class Silent(health_pb2_grpc.HealthServicer):
        async def Check(self, request: Any, context: Any) -> Any:
            await over.wait()

    own = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Silent(), own)
    port = listen(own, "127.0.0.1", 0)
    await own.start()
    try:
        async with asyncio.timeout(20):
            told = about(await found_at("http://127.0.0.1:1", f"127.0.0.1:{port}"), "door gRPC")
    finally:
        over.set()
        await own.stop(None)
    assert (told.state, "DEADLINE_EXCEEDED" in told.told) == ("failed", True)


async def test_nobody_at_the_door_is_told() -> None:
    found = await found_at("http://127.0.0.1:1", "127.0.0.1:1")
    assert [f.state for f in found] == ["failed", "failed"]
    found = await found_at("https://127.0.0.1:1", "127.0.0.1:1")
    assert [f.about for f in found if f.state == "failed"] == ["door REST", "door TLS"]


@pytest.mark.parametrize(
    ("name", "days", "told"), [("api.example", 90, "ok"), ("*.example", 90, "ok")]
)
async def test_a_doors_certificate_is_looked_at_as_it_is_shown(
    name: str, days: int, told: str, tmp_path: Path
) -> None:
    folder = Authority().issue(tmp_path, name, valid=days * DAY)
    with serving(READY, certificate=folder) as rest:
        async with public_grpc(folder=folder) as address:
            found = await found_at(f"https://{rest}", address)
    assert state(found, f"door TLS ({name})") == told
    assert state(found, "door REST") == "ok"
    assert state(found, "door gRPC") == "ok"


async def test_a_doors_certificate_that_has_ended_is_told(tmp_path: Path) -> None:
    folder = Authority().issue(tmp_path, "api.example", valid=-DAY)
    with serving(READY, certificate=folder) as rest:
        async with public_grpc(folder=folder) as address:
            found = await found_at(f"https://{rest}", address)
    assert state(found, "door TLS (api.example)") == "failed"


async def test_a_door_on_a_network_wants_tls() -> None:
    with serving(READY) as rest:
        async with public_grpc() as address:
            found = await found_at(f"http://{rest.replace('127.0.0.1', '127.1')}", address)
    assert state(found, "door TLS") == "warning"


# -- the vector store

QDRANT = {"/": (200, '{"version":"1.15.0"}'), "/collections": (200, "{}")}


async def test_a_vector_store_is_asked_with_our_key(settings: Make) -> None:
    async def told(address: str, key: str = "") -> list[Finding]:
        own = settings(qdrant_url=f"http://{address}", qdrant_api_key=key)
        return await qdrant.check(Installation(own))

    assert (await qdrant.check(Installation(settings(qdrant_url=""))))[0].state == "ok"
    with serving(QDRANT, api_key="the key of a test") as address:
        [found] = await told(address, "the key of a test")
        assert found.state == "ok"
        assert found.told.startswith("1.15.0 at")
        [found] = await told(address, "another")
        assert found.state == "failed"
        assert "refuses our API key" in found.told
        elsewhere = await told(address.replace("127.0.0.1", "127.1"), "the key of a test")
        assert {f.about: f.state for f in elsewhere} == {"qdrant": "ok", "qdrant TLS": "warning"}
    with serving(QDRANT) as address:
        assert [f.state for f in await told(address)] == ["ok"]
        elsewhere = await told(address.replace("127.0.0.1", "127.1"))
        assert state(elsewhere, "qdrant key") == "warning"
    assert [f.state for f in await told("127.0.0.1:1")] == ["failed"]


async def test_a_door_to_all_without_tls_is_told_before_it_runs(settings: Make) -> None:
    """A gateway on all addresses tells one of them, which may be the loopback."""
    told = await door.check(Installation(settings(gateway={"host": "0.0.0.0"})))
    assert state(told, "door TLS") == "warning"
    assert "PENSTOCK_GATEWAY__HOST=0.0.0.0" in about(told, "door TLS").told
    assert await door.check(Installation(settings())) == []
