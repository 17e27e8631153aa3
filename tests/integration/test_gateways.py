"""Several gateways of one installation: one door on one host, and each tells of all requests."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx
import pytest

from protos import gateway_pb2, gateway_pb2_grpc
from services.cli.ground.doors import held_ports
from services.common.config import GatewaySettings, Settings
from services.common.service import Host
from services.gateway import neighbours
from services.gateway.server import GatewayService
from tests.support.gateway_rig import MODEL, Rig, gateway_rig, say, send
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Is it so?"}]}
KEPT = 3


@pytest.fixture
def ports() -> Iterator[dict[str, Any]]:
    with held_ports(Settings(gateway=GatewaySettings(port=0))) as held:
        yield held.gateway.model_dump(include={"port", "grpc_port"})


@pytest.fixture
async def rig(redis_url: str, namespace: str, ports: dict[str, Any]) -> AsyncIterator[Rig]:
    own: Any = {**ports, "replicas": 2, "records_kept": KEPT}
    async with gateway_rig(redis_url, namespace, **own) as rig:
        rig.tokenizer.script = say("so", " it is")
        yield rig
        rig.settings.gateway.lame_duck_s = 0.0  # the last one has nobody to wait for


@pytest.fixture
async def other(rig: Rig) -> Host:
    """A second gateway, behind the same ports."""
    return await rig.start(GatewayService)


def service(host: Host) -> GatewayService:
    assert isinstance(host.service, GatewayService)
    return host.service


async def answered(rig: Rig, http: httpx.AsyncClient) -> bool:
    answer = await http.post(CHAT, json=ASK)
    return answer.is_success and "so it is" in answer.text


async def test_one_that_drains_leaves_no_request_behind(rig: Rig, other: Host) -> None:
    """New connections, old ones and gRPC: all of them get their answers, before and after."""
    failed: list[str] = []
    served = 0
    over = asyncio.Event()

    async def ask(http: httpx.AsyncClient | None) -> None:
        nonlocal served
        while not over.is_set():
            try:
                if http is not None:
                    answer = await http.post(CHAT, json=ASK)
                else:
                    async with httpx.AsyncClient(
                        base_url=rig.url, headers=headers, timeout=60, verify=False
                    ) as fresh:
                        answer = await fresh.post(CHAT, json=ASK)
                if "so it is" not in answer.text:
                    failed.append(answer.text)
                served += 1
            except httpx.HTTPError as error:
                failed.append(repr(error))

    async def ask_grpc() -> None:
        nonlocal served
        stub = gateway_pb2_grpc.InferenceStub(await rig.channel())
        request = gateway_pb2.CompleteRequest(model=MODEL, text="Is it so?")
        while not over.is_set():
            try:
                call = stub.Complete(request, metadata=[("authorization", f"Bearer {rig.key}")])
                if "".join([event.text async for event in call]) != "so it is":
                    failed.append("gRPC: another answer")
                served += 1
            except grpc.aio.AioRpcError as error:
                failed.append(f"gRPC: {error.code().name} {error.details()}")

    headers = {"Authorization": f"Bearer {rig.key}"}
    asking = [asyncio.create_task(ask(await rig.http())) for _ in range(3)]
    asking += [asyncio.create_task(ask(None)) for _ in range(3)]
    asking.append(asyncio.create_task(ask_grpc()))
    try:
        await until(lambda: served > 20 or failed)
        await rig.host.stop(10)
        before = served
        await until(lambda: served > before + 20 or failed)
    finally:
        over.set()
        await asyncio.gather(*asking)
    assert not failed, failed[:3]


async def test_who_has_connected_is_served_although_nobody_listens_any_more(
    rig: Rig, ports: dict[str, Any]
) -> None:
    """The system takes connections into a queue before the gateway knows of them."""
    http = service(rig.host)._http
    assert http is not None
    loop = asyncio.get_running_loop()
    loop.remove_reader(http._listener._socket)  # as a busy loop that has not come to it yet
    with socket.create_connection(("127.0.0.1", ports["port"]), timeout=10) as waiting:
        await rig.start(GatewayService)
        draining = rig.host.drain(10)
        await listens_no_more(rig)
        waiting.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await asyncio.to_thread(waiting.recv, 4096)).startswith(b"HTTP/1.1 200")
    await draining


async def listens_no_more(rig: Rig) -> None:
    http = service(rig.host)._http
    assert http is not None
    await until(lambda: not http._listener.listens, 10, "it listens no more")


async def new_answer(rig: Rig, path: str) -> httpx.Response:
    """On a connection of its own."""
    headers = {"Authorization": f"Bearer {rig.key}"}
    async with httpx.AsyncClient(base_url=rig.url, headers=headers, timeout=20) as fresh:
        return await (fresh.post(path, json=ASK) if path == CHAT else fresh.get(path))


async def test_one_that_leaves_alone_serves_until_another_comes(rig: Rig) -> None:
    """On its node it is the only one: who connects meanwhile is served, and load balancers see."""
    rig.settings.gateway.lame_duck_s = 600.0
    draining = rig.host.drain(10)
    await until(lambda: rig.gateway.intake.leaving)
    assert (await new_answer(rig, "/readyz")).status_code == 503
    answer = await new_answer(rig, CHAT)
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    assert not draining.done()
    came = await rig.start(GatewayService)
    await listens_no_more(rig)
    await came.service.gateway.tokenizers.wait_ready(60)  # type: ignore[attr-defined]
    assert (await new_answer(rig, "/readyz")).status_code == 200
    async with asyncio.timeout(60):  # nobody is connected any more
        await draining


async def test_one_that_takes_no_more_lets_the_next_one_take_all(rig: Rig) -> None:
    """Its time is over, a stream still runs: half of the new connections would come to it."""
    rig.settings.gateway.lame_duck_s = 0.0
    go_on = asyncio.Event()

    async def waits(call: Any, request: Any) -> None:
        await go_on.wait()
        await say("so", " it is")(call, request)

    rig.tokenizer.script = waits
    running = asyncio.create_task((await rig.http()).post(CHAT, json=ASK))
    await until(lambda: rig.gateway.intake.running)
    draining = rig.host.drain(20)
    await until(lambda: rig.gateway.intake.draining)
    assert (await new_answer(rig, CHAT)).status_code == 503
    await rig.start(GatewayService)
    await listens_no_more(rig)
    go_on.set()
    for _ in range(8):
        assert (await new_answer(rig, CHAT)).status_code == 200
    assert (await running).status_code == 200
    await draining


async def test_a_drain_ends_as_soon_as_nobody_is_connected(rig: Rig, other: Host) -> None:
    await rig.gateway.tokenizers.wait_ready(60)
    rig.settings.gateway.lame_duck_s = 600.0
    async with asyncio.timeout(60):
        await rig.host.stop(10)


async def test_clients_are_asked_to_move_while_their_requests_are_still_served(rig: Rig) -> None:
    go_on = asyncio.Event()

    async def waits(call: Any, request: Any) -> None:
        await go_on.wait()
        await say("so", " it is")(call, request)

    rig.tokenizer.script = waits
    http, second = await rig.http(), await rig.http()
    assert "connection" not in (await second.get("/healthz")).headers
    running = asyncio.create_task(http.post(CHAT, json=ASK))
    await until(lambda: rig.gateway.intake.running)
    await rig.start(GatewayService)
    stopping = asyncio.create_task(rig.host.stop(10))
    await until(lambda: rig.gateway.intake.leaving)
    late = asyncio.create_task(second.post(CHAT, json=ASK))
    await until(lambda: rig.gateway.intake.running == 2)
    go_on.set()
    assert (await running).status_code == 200
    answer = await late
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    await stopping


@pytest.mark.parametrize("port", ["port", "grpc_port"])
async def test_a_port_is_shared_with_no_other_penstock(
    rig: Rig, ports: dict[str, Any], port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get the requests of this one."""
    monkeypatch.setattr(neighbours, "_PATIENCE_S", 0.3)
    same = {"port": 0, "grpc_port": 0, port: ports[port]}
    own = rig.settings.gateway.model_copy(update=same)
    strange = {"gateway": own, "namespace": f"{rig.settings.namespace}-other"}
    with pytest.raises(RuntimeError, match=rf"port {ports[port]} on 127.0.0.1: in use, and by no"):
        await Host(GatewayService, rig.settings.model_copy(update=strange)).start()
    # One's HTTP is not another's gRPC.
    crossed = {"port": ports["grpc_port"], "grpc_port": 0}
    own = rig.settings.gateway.model_copy(update=crossed)
    with pytest.raises(RuntimeError, match=rf"port {ports['grpc_port']} on 127.0.0.1: in use"):
        await Host(GatewayService, rig.settings.model_copy(update={"gateway": own})).start()


async def test_gateways_that_start_at_once_share_their_ports(rig: Rig) -> None:
    rig.settings.gateway.lame_duck_s = 0.0
    await rig.host.stop(0)
    await asyncio.gather(*(rig.start(GatewayService) for _ in range(3)))
    assert (await new_answer(rig, "/healthz")).status_code == 200


async def test_any_gateway_tells_of_a_request_to_its_tenant_alone(rig: Rig, other: Host) -> None:
    await rig.host.stop(0)  # the other serves it
    http = await rig.http()
    answer = await http.post(CHAT, json=ASK)
    id = answer.headers["x-request-id"]
    own = await rig.record(id)
    rig.tokenizer.script = fails
    failed = await http.post(CHAT, json={**ASK, "metadata": {"of": "the second"}})
    failed_id = failed.headers["x-request-id"]
    told = await rig.record(failed_id)
    assert told["error"]

    third = service(await rig.start(GatewayService)).gateway.records
    await until_async(lambda: third.look_up(failed_id, "acme"))
    assert third.find(id, "acme") is None, "it served none of them"
    for request_id, as_told in ((id, own), (failed_id, told)):
        journal = await third.look_up(request_id, "acme")
        assert journal is not None
        assert journal.as_json() == as_told
        assert await third.look_up(request_id, "rival") is None


async def fails(call: Any, request: Any) -> None:
    send(call, "so")
    raise ValueError("it is not")


async def until_async(look: Any) -> None:
    async def found() -> bool:
        return await look() is not None

    await until(found, 10)


async def test_so_many_records_of_a_tenant_are_kept_for_so_long(rig: Rig) -> None:
    http = await rig.http()
    shared = rig.gateway.records._shared
    ids: list[str] = []
    for _ in range(KEPT + 2):
        ids.append((await http.post(CHAT, json=ASK)).headers["x-request-id"])
        await until_async(lambda: shared.find(ids[-1], "acme"))
    kept = [await shared.find(id, "acme") is not None for id in ids]
    assert kept == [False, False, True, True, True]
    keys = [key async for key in rig.redis.scan_iter(f"{rig.settings.namespace}:{{records}}:*")]
    assert len(keys) == KEPT + 1
    assert all([0 < await rig.redis.ttl(key) <= 3600 for key in keys])


async def test_while_redis_is_away_a_gateway_tells_of_its_own(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(rig.gateway.records._shared, "_keep", away)
    http = await rig.http()
    answers = [await http.post(CHAT, json=ASK) for _ in range(2)]
    for answer in answers:
        assert (await rig.record(answer.headers["x-request-id"]))["status"] == "ok"
    assert not rig.gateway.records._shared._task.done(), "it goes on when Redis is back"
