"""Gateways as plain processes (`python -m services.gateway`, what the chart's Deployment runs) are
replaced one by one under load, by SIGTERM alone: no request fails and no stream is cut."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest_asyncio

from protos.tokenizer_pb2 import PromptRequest
from services.common.config import Settings
from services.common.link import LinkCall
from services.common.service import Host
from services.gateway.identity.keys import KeyStore
from tests.support.balanced import LOOK_EVERY_S, Clients
from tests.support.cluster import LEASE_S, Cluster, Process
from tests.support.gateway_rig import MODEL, ScriptedTokenizer, finish, plan, send
from tests.support.waiting import until

LONG = "the longest stream"
LAME_DUCK_S = 15 * LOOK_EVERY_S


class Slow:
    """Answers in some steps; what is asked LONG, not to its end before `go_on`."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, call: LinkCall, request: PromptRequest) -> None:
        send(call, "so", plan=plan(request))
        if LONG in str(request):
            await self.go_on.wait()
        for _ in range(20):
            await asyncio.sleep(0.01)
            send(call, " on")
        finish(call)


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    own = {"PENSTOCK_GATEWAY__LAME_DUCK_S": str(LAME_DUCK_S)}
    async with Cluster(tmp_path, [], environment=own) as cluster:
        cluster.key, _ = await KeyStore(cluster.client, cluster.namespace).create("test")
        yield cluster


@pytest_asyncio.fixture
async def slow(cluster: Cluster) -> AsyncIterator[Slow]:
    url = cluster.redis.url
    settings = Settings(redis_url=url, namespace=cluster.namespace, lease_s=LEASE_S)
    host = Host(ScriptedTokenizer, settings)
    await host.start()
    assert isinstance(host.service, ScriptedTokenizer)
    host.service.script = slow = Slow()
    yield slow
    slow.go_on.set()
    await host.stop(0)


async def test_gateways_are_replaced_under_load(cluster: Cluster, slow: Slow) -> None:
    old = [cluster.spawn("gateway") for _ in range(2)]
    await cluster.up(*old)
    await _ready(*old)
    async with Clients([_url(p) for p in old], cluster.key) as clients:
        await clients.more(20)
        for leaving in old:
            new = cluster.spawn("gateway")  # as with maxSurge: 1, maxUnavailable: 0
            await cluster.up(new)
            await _ready(new)
            clients.urls.append(_url(new))
            await clients.more(5, _url(new))
            await _ends_after_its_last_stream(leaving, cluster.key, slow, clients)
            clients.urls.remove(_url(leaving))
        await clients.more(20)
    assert not clients.failures


async def _ends_after_its_last_stream(
    leaving: Process, key: str, slow: Slow, clients: Clients
) -> None:
    slow.go_on.clear()
    url = _url(leaving)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60) as http:
        body = {"model": MODEL, "prompt": LONG, "stream": True}
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert "so" in await anext(lines)
            leaving.signal(signal.SIGTERM)
            await until(lambda: url not in clients.ready, 20, "the load balancer has seen it")
            await _refuses(http, url)
            assert leaving.popen.poll() is None, "it has a stream to end"
            slow.go_on.set()
            rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert await asyncio.to_thread(leaving.popen.wait, 30) == 0


async def _refuses(http: httpx.AsyncClient, url: str) -> None:
    """Returns when its time as a lame duck is over."""

    async def refused() -> bool:
        body = {"model": MODEL, "prompt": "late"}
        return (await http.post(f"{url}/v1/completions", json=body)).status_code == 503

    await until(refused, 30, "no new requests")


async def _ready(*gateways: Process) -> None:
    async with httpx.AsyncClient() as http:

        async def ready() -> bool:
            answers = [await http.get(f"{_url(gateway)}/readyz") for gateway in gateways]
            return all(answer.status_code == 200 for answer in answers)

        await until(ready, 60, "a tokenizer is linked")


def _url(process: Process) -> str:
    assert process.replica is not None
    return process.replica.facts["url"]
