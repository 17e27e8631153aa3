"""The gateway's two servers and their service: what they listen on, bound, and leave behind."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.gateway_pb2 import CompleteRequest
from protos.gateway_pb2_grpc import InferenceStub
from services.common.config import GatewaySettings, Settings
from services.common.errors import PenstockError
from services.common.redis import connect
from services.common.telemetry.telemetry import Telemetry
from services.gateway import server
from services.gateway.api.grpc import strangers as grpc_strangers
from services.gateway.api.grpc.calls import SERVICES
from services.gateway.api.grpc.server import GrpcServer
from services.gateway.api.rest.routes import application
from services.gateway.connections import http_server
from services.gateway.connections.http_server import HttpServer
from services.gateway.runs.records import Journal
from services.gateway.server import GatewayService
from tests.support.gateway_parts import gateway_parts
from tests.support.waiting import until

INFERENCE = "penstock.v1.Inference"
CODE = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def parts() -> Iterator[Any]:
    with gateway_parts(max_requests=100) as parts:
        yield parts


# ---- HTTP ---------------------------------------------------------------------------------------


async def test_the_http_server_lives_from_its_start_to_its_stop(parts):
    server = HttpServer(application(parts), parts.settings.gateway, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}"
    with pytest.raises(RuntimeError):
        server.check()  # it has not begun
    await server.start()
    server.check()
    # It shares with who shares, else with nobody.
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        HttpServer(application(parts), parts.settings.gateway, "127.0.0.1", other.getsockname()[1])
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        assert (await http.get("/version")).status_code == 200
    await server.stop()
    assert not {t.get_name() for t in asyncio.all_tasks()} & {"http server", "http connections"}
    with pytest.raises(RuntimeError):
        server.check()
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("/version")
    await HttpServer(
        application(parts), parts.settings.gateway, "127.0.0.1", 0
    ).stop()  # without a start


@pytest.mark.parametrize("ends", ["http server", "http connections"])
async def test_a_server_that_lost_a_part_is_down(parts, ends):
    """Without the one that looks at the connections, silent ones would stay for ever."""
    server = HttpServer(application(parts), parts.settings.gateway, "127.0.0.1", 0)
    await server.start()
    (part,) = [task for task in asyncio.all_tasks() if task.get_name() == ends]
    part.cancel()
    await asyncio.wait([part])
    with pytest.raises(RuntimeError, match="down"):
        server.check()
    await server.stop()
    assert ends not in {task.get_name() for task in asyncio.all_tasks()}


async def test_each_connection_of_both_servers_may_be_a_file(parts, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(http_server, "allow_connections", asked.append)
    server = HttpServer(application(parts), parts.settings.gateway, "127.0.0.1", 0)
    await server.start()
    await server.stop()
    assert asked[0] > 2 * parts.settings.gateway.max_connections, "HTTP, gRPC, and the inner port"


# ---- gRPC, without a key ------------------------------------------------------------------------


@asynccontextmanager
async def serving(parts: Any) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    server = GrpcServer(parts)
    port = await server.start("127.0.0.1", 0)
    try:
        async with (
            asyncio.timeout(30),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            yield server, channel
    finally:
        await server.stop()


async def check(channel: grpc.aio.Channel, service: str = "") -> Any:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


async def test_health_and_reflection_tell_what_there_is(parts):
    async with serving(parts) as (server, channel):
        assert await check(channel) == SERVING
        for service in SERVICES:
            assert await check(channel, service) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check(channel, "penstock.v1.Worker")
        assert unknown.value.code() is CODE.NOT_FOUND
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        watching = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert (await watching.read()).status == SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest
        asked = [ask(list_services=""), ask(file_containing_symbol=INFERENCE)]
        names, file = [a async for a in reflection.ServerReflectionInfo(iter(asked))]
        assert {one.name for one in names.list_services_response.service} == {
            *SERVICES,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert file.file_descriptor_response.file_descriptor_proto
        await server.drain()
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await check(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        watching.cancel()


async def test_a_door_that_others_reach_says_nothing_of_its_methods():
    with gateway_parts(host="0.0.0.0") as parts:
        async with serving(parts) as (_, channel):
            assert await check(channel, INFERENCE) == SERVING
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                [a async for a in stub.ServerReflectionInfo(asked)]
            assert refused.value.code() is CODE.UNIMPLEMENTED


@pytest.mark.parametrize("how", ["withheld", "nonsense", "none", "given up"])
async def test_whatever_a_stranger_does_its_place_and_turn_come_back(parts, monkeypatch, how):
    monkeypatch.setattr(grpc_strangers, "PLACES", 8)
    monkeypatch.setattr(grpc_strangers, "_READS_AT_ONCE", 2)
    async with serving(parts) as (_, channel):
        assert await check(channel) == SERVING
        monkeypatch.setattr(
            grpc_strangers, "MESSAGE_TIMEOUT_S", 0.02 if how == "withheld" else 30.0
        )
        for method in (
            "health.v1.Health/Check",
            "reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ):
            for _ in range(5):  # more than there are turns, or places
                call = channel.stream_stream(f"/grpc.{method}")()
                if how == "withheld":
                    assert await call.code() is CODE.DEADLINE_EXCEEDED
                elif how == "nonsense":
                    await call.write(b"\xff")
                    assert await call.code() is CODE.INVALID_ARGUMENT
                elif how == "none":
                    await call.done_writing()
                    await call.code()
                else:
                    await call.wait_for_connection()
                    call.cancel()
        monkeypatch.setattr(grpc_strangers, "MESSAGE_TIMEOUT_S", 30.0)
        assert await check(channel) == SERVING


async def test_who_is_refused_a_place_gives_none_back(parts, monkeypatch):
    monkeypatch.setattr(grpc_strangers, "PLACES", 4)
    async with serving(parts) as (_, channel):
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        watching = [stub.Watch(request) for _ in range(2)]
        for watch in watching:
            assert (await watch.read()).status == SERVING
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(channel)
            assert refused.value.code() is CODE.RESOURCE_EXHAUSTED
        watching[0].cancel()

        async def let_in() -> bool:
            try:
                return bool(await check(channel) == SERVING)
            except grpc.aio.AioRpcError:
                return False

        await until(let_in)
        watching[1].cancel()


async def test_who_does_not_read_what_it_asked_for_is_given_up(parts, monkeypatch):
    monkeypatch.setattr(grpc_strangers, "MESSAGE_TIMEOUT_S", 0.02)
    strangers = grpc_strangers.Strangers(health.aio.HealthServicer(), (INFERENCE,))
    ask = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    aborted: list[Any] = []

    async def read() -> Any:
        return ask

    async def write(reply: Any) -> None:
        await asyncio.Event().wait()

    async def abort(code: grpc.StatusCode, details: str) -> None:
        aborted.append(code)
        raise asyncio.CancelledError

    context = SimpleNamespace(
        peer=lambda: "ipv4:127.0.0.1:1", read=read, write=write, abort=abort, set_code=None
    )
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await strangers.reflect(None, context)
    assert aborted == [CODE.DEADLINE_EXCEEDED]


@pytest.mark.parametrize(
    ("size", "code"),
    [(5 * 2**20, CODE.NOT_FOUND), (9 * 2**20, CODE.RESOURCE_EXHAUSTED)],
)
async def test_a_message_may_be_as_large_as_the_limit(parts, size, code):
    """gRPC's own is half of ours."""
    async with serving(parts) as (_, channel):
        asked = CompleteRequest(model="nobody", text="x" * size)
        call = InferenceStub(channel).Complete(asked, metadata=(("authorization", "Bearer k"),))
        assert await call.code() is code


# ---- the service --------------------------------------------------------------------------------


@asynccontextmanager
async def service(**gateway: Any) -> AsyncIterator[Any]:
    """Assembled, not started: nothing is asked of Redis."""
    settings = Settings(gateway=GatewaySettings(**gateway), advertise_host="peer.example")
    redis = connect("redis://127.0.0.1:1/0")
    telemetry = Telemetry("gateway", "gateway-1")
    made = GatewayService(settings, redis, telemetry, "gateway-1")
    try:
        yield made
    finally:
        made.gateway.threads.stop()
        telemetry.close()
        await redis.aclose()


async def test_each_bound_reaches_its_part():
    async with service(
        max_requests=4, max_held_bytes=1000, records_kept=2, key_cache_s=0, max_files=3
    ) as made:
        intake = made.gateway.intake
        with intake.slot("a") as place, intake.slot("a"):
            with pytest.raises(PenstockError), intake.slot("a"):
                pass
            place.hold(500)
            with pytest.raises(PenstockError):
                place.hold(1)
        for number in range(3):
            journal = Journal(f"req_{number}", "x")
            journal.tenant = "a"
            made.gateway.records.keep(journal)
        kept = [made.gateway.records.find(f"req_{number}", "a") for number in range(3)]
        assert [one is not None for one in kept] == [False, True, True]


async def test_every_part_ends_with_the_service(monkeypatch):
    async with service() as made:
        assert await made.gateway.threads.run("t", lambda: 7) == 7
        for part in ("identity", "jobs", "models", "retrieval", "tokenizers"):
            monkeypatch.setattr(made.gateway, part, Stops())
        await made.stop()
        for part in ("identity", "jobs", "models", "retrieval", "tokenizers"):
            assert getattr(made.gateway, part).stopped, part
        with pytest.raises(RuntimeError):
            await made.gateway.threads.run("t", lambda: 7)


class Stops:
    def __init__(self) -> None:
        self.stopped = False

    async def stop(self) -> None:
        self.stopped = True


class Door:
    """A server's, to those who come and go."""

    def __init__(self) -> None:
        self.parted = self.drained = False
        self.closed: list[object] = []

    def part(self) -> None:
        self.parted = True

    async def drain(self) -> None:
        self.drained = True

    def close_door(self, *grace_s: object) -> None:
        self.closed += grace_s


@asynccontextmanager
async def alone(made: Any) -> AsyncIterator[list[float]]:
    """Two doors and no neighbour, ever; tells how long each look for one was to last."""
    waited: list[float] = []

    async def comes(ports: dict[str, int], within_s: float) -> bool:
        waited.append(within_s)
        if within_s and made.over is not None:
            await made.over.wait()
        return False

    made._http, made._grpc, made.over = Door(), Door(), None
    made._neighbours = SimpleNamespace(comes=comes)
    yield waited


async def test_a_drain_waits_for_requests_and_for_indexing(monkeypatch):
    async with service(max_requests=4) as made, alone(made):
        indexed, graces = asyncio.Event(), []

        async def indexing(grace_s: float) -> None:
            graces.append(grace_s)
            await indexed.wait()

        monkeypatch.setattr(made.gateway, "jobs", SimpleNamespace(drain=indexing))
        with made.gateway.intake.slot("a"):
            draining = asyncio.create_task(made.drain(60))
            await until(lambda: made.gateway.intake.draining)
            indexed.set()
            await asyncio.sleep(0)
            assert not draining.done()
            indexed.clear()
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await draining
        assert graces == [60]
        again = asyncio.create_task(made.drain(7))
        await until(lambda: graces == [60, 7])
        assert not again.done(), "what is being indexed is waited for"
        indexed.set()
        async with asyncio.timeout(30):
            await again


async def test_a_drain_that_is_broken_off_looks_for_nobody_any_more():
    async with service(max_requests=4) as made, alone(made):
        made.over = asyncio.Event()
        with made.gateway.intake.slot("a"):
            draining = asyncio.create_task(made.drain(60))
            await until(lambda: "door" in {task.get_name() for task in asyncio.all_tasks()})
            draining.cancel()
            await asyncio.wait([draining])
        await asyncio.sleep(0)
        assert "door" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_lame_duck_is_not_ready_and_takes_what_still_comes():
    """Load balancers go on sending until they have looked again."""
    async with service(lame_duck_s=45) as made, alone(made) as waited:
        intake, made.over = made.gateway.intake, asyncio.Event()
        draining = asyncio.create_task(made.drain(60))
        await until(lambda: waited == [45])
        assert intake.leaving, "which /readyz tells"
        assert made._http.parted
        assert made._grpc.drained
        with intake.slot("a"):
            assert not made._grpc.closed
            made.over.set()
            await until(lambda: intake.draining)
            assert made._grpc.closed == [60 + server._LAST_WORDS_S], "its clients have heard of it"
            assert not draining.done()
            with pytest.raises(PenstockError), intake.slot("a"):
                pass
        async with asyncio.timeout(30):
            await draining
        assert made.settings.drains_within_s == 45 + made.settings.drain_grace_s


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "peer.example"),
        ("::", "peer.example"),
        ("::1", "[::1]"),
    ],
)
async def test_others_are_told_where_it_can_be_reached(host, told):
    async with service(host=host) as made:
        made._ports = {"http": 8000, "grpc": 8001}
        assert made.describe() == {"url": f"http://{told}:8000", "grpc": f"{told}:8001"}


@pytest.mark.parametrize(
    ("port", "grpc_port", "listens"),
    [(8000, None, 8001), (0, None, 0), (8000, 0, 0), (8000, 9000, 9000), (0, 9000, 9000)],
)
async def test_the_grpc_port_is_as_set_or_beside_the_other(monkeypatch, port, grpc_port, listens):
    asked: list[tuple[str, int]] = []

    class Http(Stops):
        port = 1

        def __init__(self, app: Any, own: Any, host: str, port: int, tls: Any) -> None:
            super().__init__()
            asked.append((host, port))

        async def start(self) -> None: ...

        def check(self) -> None:
            raise RuntimeError("the HTTP server is down")

    class Grpc(Stops):
        def __init__(self, gateway: Any) -> None:
            super().__init__()

        async def start(self, host: str, port: int, tls: Any) -> int:
            asked.append((host, port))
            return 2

    monkeypatch.setattr("services.gateway.server.HttpServer", Http)
    monkeypatch.setattr("services.gateway.server.GrpcServer", Grpc)
    started: list[str] = []

    class Starts(Stops):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name

        async def begin(self) -> None:
            started.append(self._name)

    async with service(port=port, grpc_port=grpc_port) as made:
        made.check()
        for part in ("tokenizers", "retrieval"):
            begins = Starts(part)
            monkeypatch.setattr(made.gateway, part, begins)
            monkeypatch.setattr(begins, "start", begins.begin, raising=False)
        watcher = Starts("identity")
        monkeypatch.setattr(watcher, "start", lambda: started.append("identity"), raising=False)
        monkeypatch.setattr(made.gateway, "identity", watcher)
        await made.start(None)
        assert asked == [("127.0.0.1", port), ("127.0.0.1", listens)]
        assert sorted(started) == ["identity", "retrieval", "tokenizers"]
        assert made.describe()["grpc"].endswith(":2")
        with pytest.raises(RuntimeError, match="down"):
            made.check()
