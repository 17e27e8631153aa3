"""Mutual TLS between services, with real certificates: who is believed, who may call what, and what
happens when the files change."""

import asyncio
import datetime
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

from protos import host_pb2, host_pb2_grpc
from services.common.discovery import SERVICES
from services.common.draining import HostServicer
from services.common.locks import callers as callers_module
from services.common.locks import certificates as certificates_module
from services.common.locks.callers import CALLERS, ITSELF, is_here
from services.common.locks.certificates import CertificateError, CertificateFiles, dns_name
from services.common.transport import Transport, health_server, listen
from tests.support.authority import Authority
from tests.support.transport import SECRET

HOUR = datetime.timedelta(hours=1)
IDENTITIES = (*SERVICES, "cli")
OPERATIONS = Path(__file__).parents[3] / "docs/operations.md"


@pytest.fixture(autouse=True)
def looks_at_every_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates_module, "_LOOK_EVERY_S", 0.0)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def folder(authority: Authority, tmp_path: Path) -> Path:
    return authority.identities(tmp_path, *IDENTITIES)


def transport(folder: Path, identity: str) -> Transport:
    return Transport(SECRET, CertificateFiles.of_identity(folder, identity), identity=identity)


async def echo(request: Any, _context: Any) -> AsyncIterator[bytes]:
    async for message in request:
        yield message


async def echo_once(request: bytes, _context: Any) -> bytes:
    return request


@asynccontextmanager
async def serving(folder: Path, identity: str = "worker") -> AsyncIterator[str]:
    """The worker's two methods, of both shapes that handlers have, and health."""
    told = health.aio.HealthServicer()
    own = transport(folder, identity)
    server = own.server(health=told)
    methods = {
        "Link": grpc.stream_stream_rpc_method_handler(echo),
        "PushKv": grpc.unary_unary_rpc_method_handler(echo_once),
        "Unheard": grpc.unary_unary_rpc_method_handler(echo_once),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("penstock.v1.Worker", methods),)
    )
    health_pb2_grpc.add_HealthServicer_to_server(told, server)
    port = own.listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def push(channel: grpc.aio.Channel, method: str = "PushKv") -> bytes:
    call = channel.unary_unary(f"/penstock.v1.Worker/{method}")
    return bytes(await call(b"blocks", timeout=10))


async def refusal(channel: grpc.aio.Channel, method: str = "PushKv") -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await push(channel, method)
    code: grpc.StatusCode = error.value.code()
    return code


async def test_who_may_call_is_served(folder: Path) -> None:
    async with serving(folder) as address:
        async with transport(folder, "worker").dial(address, "worker") as channel:
            assert await push(channel) == b"blocks"
        async with transport(folder, "router").dial(address, "worker") as channel:
            link = channel.stream_stream("/penstock.v1.Worker/Link")(iter([b"a", b"b"]), timeout=10)
            assert [message async for message in link] == [b"a", b"b"]


@pytest.mark.parametrize("identity", [i for i in IDENTITIES if i != "worker"])
async def test_a_method_answers_only_those_on_its_list(folder: Path, identity: str) -> None:
    def refused() -> float:
        labels = {"why": "name"}
        return REGISTRY.get_sample_value("penstock_refused_calls_total", labels) or 0.0

    before = refused()
    async with (
        serving(folder) as address,
        transport(folder, identity).dial(address, "worker") as channel,
    ):
        assert await refusal(channel) is grpc.StatusCode.PERMISSION_DENIED
    assert refused() == before + 1


@asynccontextmanager
async def drained(folder: Path, identity: str) -> AsyncIterator[str]:
    """Each replica answers to Drain, whatever its service."""

    async def begun() -> None:
        return None

    own = transport(folder, identity)
    server = own.server()
    host_pb2_grpc.add_HostServicer_to_server(
        HostServicer(lambda: asyncio.create_task(begun()), 7.0), server
    )
    port = own.listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def drain(folder: Path, identity: str, address: str, service: str) -> bool:
    """Whether it may."""
    async with transport(folder, identity).dial(address, service) as channel:
        call = host_pb2_grpc.HostStub(channel).Drain
        try:
            told = await call(host_pb2.DrainRequest(wait=True), timeout=10)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                raise
            return False
    return bool(told.drained and told.at_most_s == 7.0)


async def test_commands_drain_and_a_service_drains_itself_on_its_own_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes a pod over cannot end the others of its service, nor another service anywhere."""
    peers = []

    def elsewhere(peer: str) -> bool:
        peers.append(peer)
        return False

    for service in SERVICES:
        async with drained(folder, service) as address:
            may = {i for i in IDENTITIES if await drain(folder, i, address, service)}
            assert may == {"cli", service}
            with monkeypatch.context() as patch:
                patch.setattr(callers_module, "is_here", elsewhere)
                may = {i for i in IDENTITIES if await drain(folder, i, address, service)}
                assert may == {"cli"}
    assert len(peers) == len(SERVICES), "asked of those alone that might be themselves"
    assert all(peer.startswith("ipv4:127.0.0.1:") for peer in peers)


@pytest.mark.parametrize(
    ("peer", "here"),
    [
        ("ipv4:127.0.0.1:4711", True),
        ("ipv4:127.0.0.2:4711", True),
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv6:[::1]:4711", True),
        ("ipv4:203.0.113.9:4711", False),  # of documentation; nobody's
        ("ipv4:255.255.255.255:4711", False),
        ("ipv6:%5B2001:db8::9%5D:4711", False),
        ("unix:", False),
        ("ipv4:penstock.internal:4711", False),
        ("", False),
    ],
)
def test_where_a_connection_came_from(peer: str, here: bool) -> None:
    assert is_here(peer) is here


def test_an_address_of_this_host_that_others_reach_is_here() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.9", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no way to others, and so no such address")
        own = probe.getsockname()[0]
    assert is_here(f"ipv4:{own}:4711")
    assert not is_here(f"ipv4:{ip_address(own) + 1}:4711")


@pytest.mark.parametrize(
    "named",
    [
        {"others": [x509.UniformResourceIdentifier(dns_name("worker"))]},
        {"others": [x509.RFC822Name(dns_name("worker"))]},
        {"common_name": dns_name("worker")},
        {"common_name": dns_name("worker"), "others": [x509.DNSName("x.example")]},
        {"others": [x509.DNSName("*.penstock.internal")]},
    ],
)
async def test_a_callers_name_is_a_dns_name_of_its_certificate_and_nothing_else(
    authority: Authority, folder: Path, named: dict[str, Any]
) -> None:
    """Issuers that watch over DNS names may sign any URI."""
    authority.issue(folder / "odd", **named)
    async with (
        serving(folder) as address,
        transport(folder, "odd").dial(address, "worker") as channel,
    ):
        assert await refusal(channel) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_method_without_a_list_answers_nobody(folder: Path) -> None:
    async with serving(folder) as address:
        for identity in IDENTITIES:
            async with transport(folder, identity).dial(address, "worker") as channel:
                code = await refusal(channel, "Unheard")
                assert code is grpc.StatusCode.PERMISSION_DENIED, identity


async def test_the_certificate_does_not_replace_the_secret(folder: Path) -> None:
    stranger = Transport(
        "another secret of 16 characters", CertificateFiles.of_identity(folder, "worker")
    )
    async with serving(folder) as address, stranger.dial(address, "worker") as channel:
        assert await refusal(channel) is grpc.StatusCode.UNAUTHENTICATED


async def test_the_secret_does_not_replace_the_certificate(folder: Path) -> None:
    async with serving(folder) as address, Transport(SECRET).dial(address, "worker") as channel:
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


async def test_a_caller_of_another_authority_is_refused(folder: Path, tmp_path: Path) -> None:
    # It trusts ours, so that it is not itself who ends the connection.
    other = Authority("somebody else's")
    trusted = (folder / "worker" / "ca.crt").read_bytes()
    other.issue(tmp_path / "other" / "worker", dns_name("worker"), authorities=trusted)
    async with (
        serving(folder) as address,
        transport(tmp_path / "other", "worker").dial(address, "worker") as channel,
    ):
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


async def test_a_server_of_another_authority_is_not_believed(folder: Path, tmp_path: Path) -> None:
    other = Authority("somebody else's")
    trusted = (folder / "worker" / "ca.crt").read_bytes()
    other.issue(tmp_path / "other" / "worker", dns_name("worker"), authorities=trusted)
    async with (
        serving(tmp_path / "other") as address,
        transport(folder, "worker").dial(address, "worker") as channel,
    ):
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


async def test_a_server_of_another_name_is_not_believed(folder: Path) -> None:
    """A gateway that was taken over cannot pass for a worker."""
    async with (
        serving(folder, "gateway") as address,
        transport(folder, "worker").dial(address, "worker") as channel,
    ):
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


async def test_an_expired_certificate_is_refused(authority: Authority, folder: Path) -> None:
    async with serving(folder) as address:
        authority.issue(folder / "worker", dns_name("worker"), valid=-HOUR)
        async with transport(folder, "worker").dial(address, "worker") as channel:
            assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


async def test_new_certificates_are_used_without_a_restart_and_streams_go_on(
    authority: Authority, folder: Path
) -> None:
    successor = Authority("the next authority")
    both = authority.pem + successor.pem
    caller = transport(folder, "router")
    async with serving(folder) as address, caller.dial(address, "worker") as old:
        asked: asyncio.Queue[bytes] = asyncio.Queue()

        async def questions() -> AsyncIterator[bytes]:
            while True:
                yield await asked.get()

        link = aiter(old.stream_stream("/penstock.v1.Worker/Link")(questions(), timeout=60))
        asked.put_nowait(b"before")
        assert await anext(link) == b"before"
        assert not old.outdated
        # As authorities are changed: all trust both, then all show the new, then the old one goes.
        for signer, trusted in ((authority, both), (successor, both), (successor, successor.pem)):
            for identity in ("router", "worker"):
                signer.issue(folder / identity, dns_name(identity), authorities=trusted)
            asked.put_nowait(b"still there")
            assert await anext(link) == b"still there"
            assert old.outdated
            async with caller.dial(address, "worker") as fresh:
                again = fresh.stream_stream("/penstock.v1.Worker/Link")(iter([b"new"]), timeout=10)
                assert [message async for message in again] == [b"new"]
                assert not fresh.outdated
        # The old authority is no longer believed.
        authority.issue(folder / "router", dns_name("router"), authorities=successor.pem)
        async with caller.dial(address, "worker") as former:
            assert await refusal(former) is grpc.StatusCode.UNAVAILABLE


async def test_half_written_files_do_not_replace_good_ones(folder: Path) -> None:
    files = CertificateFiles.of_identity(folder, "worker")
    good = files.current()
    (folder / "worker" / "tls.key").write_bytes((folder / "router" / "tls.key").read_bytes())
    assert files.current() is good
    (folder / "worker" / "tls.crt").write_bytes(b"")
    assert files.current() is good
    (folder / "worker" / "ca.crt").unlink()
    assert files.current() is good


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tls.crt", b"", "tls.crt holds no certificate"),
        ("tls.key", b"nonsense", "tls.key holds no unencrypted key"),
        ("ca.crt", b"nonsense", "ca.crt holds no certificate"),
        ("tls.key", None, "tls.key"),
    ],
)
def test_what_cannot_be_used_is_told_by_its_file(
    folder: Path, file: str, content: bytes | None, said: str
) -> None:
    path = folder / "worker" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CertificateError, match=said):
        CertificateFiles.of_identity(folder, "worker")


def test_the_key_of_another_certificate_is_told(folder: Path) -> None:
    (folder / "worker" / "tls.key").write_bytes((folder / "router" / "tls.key").read_bytes())
    with pytest.raises(CertificateError, match=r"tls\.key is not the key of .*tls\.crt"):
        CertificateFiles.of_identity(folder, "worker")


async def test_a_health_port_tells_anyone_and_answers_nothing_else() -> None:
    told = health.aio.HealthServicer()
    server = health_server(told)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest()
            answer = await stub.Check(asked, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            await told.enter_graceful_shutdown()
            answer = await stub.Check(asked, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await refusal(channel) is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Watch(asked, timeout=10).read()
    finally:
        await server.stop(None)


def test_every_identity_on_a_list_exists() -> None:
    assert set().union(*CALLERS.values()) == {*IDENTITIES, ITSELF}


def test_the_page_says_who_may_call_what() -> None:
    """What somebody can call who has a pod with its keys."""
    told = ["| method | " + " | ".join(IDENTITIES) + " |", "| --- |" + " --- |" * len(IDENTITIES)]
    for method, callers in CALLERS.items():
        itself = "its own" if ITSELF in callers else "no"
        may = ("yes" if identity in callers else itself for identity in IDENTITIES)
        told.append(f"| {method.strip('/')} | " + " | ".join(may) + " |")
    assert "\n".join(told) in OPERATIONS.read_text()
