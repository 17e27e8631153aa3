"""`penstock status` on a real Redis, with routers that answer and one that does not."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest

from protos import router_pb2, router_pb2_grpc
from services.cli.main import main
from services.common.discovery import DRAINING, Registration, Replica
from services.common.redis import connect
from services.common.transport import listen
from tests.support.transport import TRANSPORT

Register = Callable[[Replica], None]


class Router(router_pb2_grpc.RouterServicer):
    async def GetStatus(self, request: object, context: object) -> router_pb2.RouterStatus:
        told = router_pb2.RouterStatus(admitted=3, capacity=8, queued=5)
        told.workers.add(
            id="worker-1",
            role="decode",
            model="tiny",
            state="ready",
            breaker="closed",
            free_blocks=25,
            total_blocks=100,
            running=2,
            waiting=4,
            steps=77,
        )
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
    (row,) = [line for line in said.splitlines() if "worker-1" in line]
    cells = ["worker-1", "decode", "tiny", "ready", "closed", "2", "4", "100", "75%", "77"]
    assert re.findall(r"[\w%-]+", row) == cells, "used, not free"
    (row,) = [line for line in said.splitlines() if "worker-2" in line]
    assert "0%" in row, "of no blocks none is used"
    assert f"router-2 does not answer: {grpc.StatusCode.UNAVAILABLE.name}" in said


def test_who_drains_is_last_and_said_to(
    redis_url: str, namespace: str, register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, though for a moment it is listed under both names."""
    drains = Replica("gateway", "gateway-1", "h:1", "h", 11, "http://h:2/m", {"url": "u"})
    register(drains)
    register(replace(drains, id="gateway-2", pid=12, facts={"url": "v", "version": "3"}))

    async def drain() -> None:
        redis = connect(redis_url)
        await Registration(redis, namespace, drains, 3600, under=DRAINING)._once()
        await redis.aclose()

    asyncio.run(drain())
    assert main(["status"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "http://h:2/m" in line]
    cells = [[cell.strip() for cell in re.split("[│┃]", row)[1:-1]] for row in rows]
    assert cells == [
        ["gateway", "gateway-2", "h:1", "http://h:2/m", "12", "url=v, version=3"],
        ["gateway", "gateway-1 (drains)", "h:1", "http://h:2/m", "11", "url=u"],
    ]


@pytest.mark.usefixtures("register")
def test_an_empty_registry_is_no_penstock(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    assert "nothing is registered" in capsys.readouterr().err


@pytest.mark.parametrize("file", [None, "/etc/policy.yaml"])
def test_policies_are_shown_where_somebody_has_one(
    file: str | None, register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    """And then who does not say is shown, too."""
    told = {"file": file, "version": "mine@1" if file else None, "rules": 2, "fault": None}

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        register(Replica("tokenizer", "tokenizer-1", "h:1", "h", 11, url))
        register(Replica("tokenizer", "tokenizer-2", "h:1", "h", 12, "http://127.0.0.1:1/metrics"))
        assert main(["status"]) == 0
        server.shutdown()
    said = capsys.readouterr().out
    assert ("Policies" in said) is bool(file)
    assert ("mine@1" in said) is ("it does not say" in said) is bool(file)
