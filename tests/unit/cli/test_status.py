"""`penstock status` on a real Redis, with routers that answer and one that does not."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from protos import router_pb2, router_pb2_grpc
from services.cli.main import main
from services.common.discovery import Registration, Replica
from services.common.redis import connect
from services.common.transport import listen
from tests.support.transport import TRANSPORT

Register = Callable[[Replica], None]


class Router(router_pb2_grpc.RouterServicer):
    async def GetStatus(self, request: object, context: object) -> router_pb2.RouterStatus:
        told = router_pb2.RouterStatus(admitted=3, capacity=8, queued=5)
        told.workers.add(id="worker-1", role="decode", free_blocks=25, total_blocks=100, running=2)
        told.workers.add(id="worker-2", role="prefill")
        return told


@pytest.fixture
def register(redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Register:
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_NAMESPACE", namespace)

    def one(replica: Replica) -> None:
        async def add() -> None:
            redis = connect(redis_url)
            await Registration(redis, namespace, replica, 3600)._once()
            await redis.aclose()

        asyncio.run(add())

    return one


@pytest.fixture
def router() -> Iterator[str]:
    """The address of a router, which runs in a thread of its own."""
    address, loop, over = "", asyncio.new_event_loop(), asyncio.Event()
    ready = threading.Event()

    async def serve() -> None:
        nonlocal address
        server = TRANSPORT.server()
        router_pb2_grpc.add_RouterServicer_to_server(Router(), server)
        address = f"127.0.0.1:{listen(server, '127.0.0.1', 0)}"
        await server.start()
        ready.set()
        await over.wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(20)
    yield address
    loop.call_soon_threadsafe(over.set)
    thread.join(20)
    loop.close()


def test_all_replicas_are_shown_and_the_workers_as_each_router_sees_them(
    register: Register, router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    register(Replica("gateway", "gateway-1", "h:1", "h", 11, "http://h:2/metrics", {"url": "u"}))
    register(Replica("router", "router-1", router, "h", 12))
    register(Replica("router", "router-2", "127.0.0.1:1", "h", 13))
    assert main(["status"]) == 0
    said = capsys.readouterr().out
    for shown in ("gateway-1", "http://h:2/metrics", "url=u", "router-1", "router-2", "worker-1"):
        assert shown in said
    assert "3 of 8 slots in use, 5 requests wait" in said
    assert "75%" in said, "used, not free"
    assert f"router-2 does not answer: {grpc.StatusCode.UNAVAILABLE.name}" in said


@pytest.mark.usefixtures("register")
def test_an_empty_registry_is_no_penstock(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    assert "nothing is registered" in capsys.readouterr().err
