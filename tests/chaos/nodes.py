"""Penstock on several Ray nodes: one is killed under load, all is deployed anew under load, another
Penstock comes and goes: `make nodes` (six minutes).

The nodes are processes on this machine, each with an address of its own; every stream crosses the
border between two of them, or may."""

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.common.discovery import SERVICES, Replica
from tests.support.checkpoint import write_checkpoint
from tests.support.laptop import free_port
from tests.support.nodes import Nodes, address_of
from tests.support.streams import Stream, complete
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAMS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    write_checkpoint(folder / "tiny", window=2048)
    two = {f"{service}__REPLICAS": "2" for service in ("TOKENIZER", "ROUTER")}
    gateways = {"REPLICAS": "3", "PORT": str(free_port()), "GRPC_PORT": str(free_port())}
    gateways["LAME_DUCK_S"] = "5"
    own = {**two, **{f"GATEWAY__{name}": value for name, value in gateways.items()}}
    async with Nodes(folder, 2, **own, ROUTER__SPLIT="always") as nodes:
        await nodes.up(*tiny(nodes), "--prefill", "2", "--decode", "2")
        yield nodes


def tiny(nodes: Nodes) -> tuple[str, str]:
    return "--model", str(nodes.folder / "tiny")


def body(number: int, tokens: int = 700) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 11}]
    return {
        "model": "tiny",
        "prompt": f"stream {number}: the water at the end of the penstock " * 8,
        "max_tokens": tokens,
        "ignore_eos": True,
        **kinds[number % 2],
    }


async def hosts(nodes: Nodes, service: str) -> list[str]:
    """The address of each of its replicas."""
    return sorted(r.address.rpartition(":")[0] for r in await nodes.replicas(service))


async def api(nodes: Nodes, node: int) -> httpx.AsyncClient:
    """Of the gateway on that node."""
    found = [
        r.facts["url"] for r in await nodes.replicas("gateway") if address_of(node) in r.address
    ]
    return httpx.AsyncClient(
        base_url=found[0],
        headers={"Authorization": f"Bearer {await nodes.key()}"},
        timeout=120,
        limits=httpx.Limits(max_connections=None),
    )


async def test_replicas_of_each_service_are_on_different_nodes(nodes: Nodes) -> None:
    both = [address_of(0), address_of(1)]
    for service in ("tokenizer", "router"):
        assert await hosts(nodes, service) == both, service
    gateways = await hosts(nodes, "gateway")
    assert (len(gateways), sorted(set(gateways))) == (3, both), "two share a port"
    workers = await nodes.replicas("worker")
    for role in ("prefill", "decode"):
        of_role = [w for w in workers if w.facts["role"] == role]
        assert sorted(w.address.rpartition(":")[0] for w in of_role) == both, role
    assert len({w.host_id for w in workers}) == 2


async def worker(nodes: Nodes, role: str, node: int) -> Replica:
    """The one of that role on that node."""
    found = await nodes.replicas("worker")
    (one,) = [w for w in found if w.facts["role"] == role and address_of(node) in w.address]
    return one


async def test_kv_crosses_nodes_by_the_network(nodes: Nodes) -> None:
    """With prefill left on one node and decode on the other, there is no other way."""
    away = [await worker(nodes, "prefill", 0), await worker(nodes, "decode", 1)]
    async with await api(nodes, 0) as http:
        for lost in away:
            drained = await nodes.run("drain", "--replica", lost.id, "--wait")
            assert drained.returncode == 0, drained.stderr
        stream = Stream(http, body(0, tokens=8))
        await stream.finished()
        spans = (await stream.record())["spans"]
        (push,) = [span for span in spans if span["name"] == "push kv"]
        assert str(push["attributes"]["shared_memory"]).lower() == "false"
    for lost in away:
        os.kill(lost.pid, signal.SIGKILL)  # Serve starts others

    async def back() -> bool:
        return len(await nodes.replicas("worker")) == 4

    await until(back, 120, "workers in place of the drained ones")


async def test_a_node_is_killed_and_no_stream_notices(nodes: Nodes) -> None:
    async with await api(nodes, 0) as http:
        expected = await asyncio.gather(*(complete(http, body(n)) for n in range(STREAMS)))
        streams = [Stream(http, body(number)) for number in range(STREAMS)]
        await asyncio.gather(*(stream.reached(chunks=10) for stream in streams))
        nodes.kill_node(1)
        assert [await stream.finished(120) for stream in streams] == expected

        async def forgotten() -> bool:
            every = [host for service in SERVICES for host in await hosts(nodes, service)]
            return address_of(1) not in every

        await until(forgotten, 60, "the lost node's replicas have left the registry")
        assert await complete(http, body(0)) == expected[0]
    # Another host in its place: what was lost is there again.
    await nodes.start_node(1)

    async def back() -> bool:
        found = [await hosts(nodes, service) for service in ("gateway", "router", "worker")]
        return [len(each) for each in found] == [3, 2, 4]

    await until(back, 120, "the replicas of the lost node, on another one")


class Balancer:
    """Before the gateways' doors: it looks at /readyz, and keeps to who is ready."""

    def __init__(self, key: str, doors: list[str]) -> None:
        self._key = key
        self._ready = doors
        self._looks = [asyncio.create_task(self._look(door)) for door in doors]
        self._turn = 0

    def client(self) -> httpx.AsyncClient:
        """Of the next door."""
        self._turn += 1
        return httpx.AsyncClient(
            base_url=self._ready[self._turn % len(self._ready)],
            headers={"Authorization": f"Bearer {self._key}"},
            timeout=120,
        )

    async def _look(self, door: str) -> None:
        while True:
            try:
                async with httpx.AsyncClient(base_url=door, timeout=5) as http:
                    ready = (await http.get("/readyz")).status_code == 200
            except httpx.HTTPError:
                ready = False
            self._ready = [d for d in self._ready if d != door] + [door] * ready
            await asyncio.sleep(1)

    async def close(self) -> None:
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)


async def test_deployed_anew_under_load_nothing_fails(nodes: Nodes) -> None:
    """Another `up`, from another host: it replaces all, and the first leaves it alone."""
    first, said = nodes.process, nodes.log
    before = {s: {r.id for r in await nodes.replicas(s)} for s in SERVICES}
    doors = sorted({r.facts["url"] for r in await nodes.replicas("gateway")})
    assert len(doors) == 2
    balancer, over = Balancer(await nodes.key(), doors), asyncio.Event()
    async with balancer.client() as http:
        short, long = await complete(http, body(0, tokens=10)), await complete(http, body(1, 200))
    answered, failed = [0, 0], list[str]()

    async def ask(kind: int) -> None:
        while not over.is_set():
            async with balancer.client() as http:
                try:
                    if kind:
                        text = await Stream(http, body(1, 200)).finished(timeout_s=120)
                    else:
                        text = await complete(http, body(0, tokens=10))
                except (AssertionError, httpx.HTTPError, TimeoutError) as error:
                    failed.append(f"{type(error).__name__} {str(error)[:300]}")
                    continue
                answered[kind] += 1
                if text != (short, long)[kind]:
                    failed.append("another answer")

    asking = [asyncio.create_task(ask(kind)) for kind in (0, 0, 0, 1, 1, 1)]
    await nodes.up(*tiny(nodes), "--prefill", "2", "--decode", "2", WORKER__MAX_RUNNING="31")
    assert await asyncio.to_thread(first.wait, 30) == 0, said.read_text()
    over.set()
    await asyncio.gather(*asking)
    await balancer.close()
    print(f"answered: {answered}; failed: {len(failed)}")
    assert not failed, failed
    assert min(answered) > 5
    assert "another `penstock up` serves 'nodes' from now on" in said.read_text()
    for service in SERVICES:
        after = {r.id for r in await nodes.replicas(service)}
        assert len(after) == len(before[service]), service
        assert not after & before[service], f"{service}: up is when all are replaced"


async def test_another_penstock_comes_and_goes(nodes: Nodes) -> None:
    other = {"NAMESPACE": "others", "TOKENIZER__REPLICAS": "1", "ROUTER__REPLICAS": "1"}
    sizes = ("--prefill", "0", "--decode", "1", "--detach")
    deploy = ("up", "--address", nodes.address, *tiny(nodes), *sizes)
    taken = await nodes.run(*deploy, **other)
    assert taken.returncode == 1, taken.stderr
    assert "in use, and by no gateway of the namespace 'others'" in taken.stderr
    assert not [r for service in SERVICES for r in await nodes.replicas(service, "others")]

    other |= {"GATEWAY__REPLICAS": "1", "GATEWAY__PORT": "0", "GATEWAY__GRPC_PORT": "0"}
    up = await nodes.run(*deploy, **other)
    assert up.returncode == 0, up.stderr
    assert len(await nodes.replicas("worker", "others")) == 1
    down = await nodes.run("down", "--address", nodes.address, **other)
    assert (down.returncode, "draining: others, others:tiny\n" in down.stderr) == (0, True)
    assert not [r for service in SERVICES for r in await nodes.replicas(service, "others")]
    async with await api(nodes, 1) as http:
        assert await complete(http, body(0, tokens=5)), "this one stays"


async def test_ctrl_c_takes_it_down_and_leaves_the_cluster(nodes: Nodes) -> None:
    async with await api(nodes, 0) as http:
        stream = Stream(http, body(0))
        await stream.reached(chunks=5)
        nodes.process.send_signal(signal.SIGINT)
        await stream.finished()
    assert await asyncio.to_thread(nodes.process.wait, 90) == 0, nodes.log.read_text()
    assert not [r for service in SERVICES for r in await nodes.replicas(service)]


async def test_what_is_detached_stays_until_it_is_taken_down(nodes: Nodes) -> None:
    shutil.copytree(nodes.folder / "tiny", nodes.folder / "second")
    both = (*tiny(nodes), "--model", str(nodes.folder / "second"))
    await nodes.up(*both, "--prefill", "0", "--decode", "1", "--detach")
    assert await asyncio.to_thread(nodes.process.wait, 30) == 0, nodes.log.read_text()
    async with await api(nodes, 1) as http:
        for model in ("tiny", "second"):
            answer = await complete(http, {**body(0, tokens=5), "model": model})
            assert answer, "it stays up"

    await nodes.up(*both[:2], "--prefill", "0", "--decode", "1")
    assert "not served any more: second" in nodes.log.read_text()
    assert {w.facts["model"] for w in await nodes.replicas("worker")} == {"tiny"}
    async with await api(nodes, 1) as http:

        async def unknown() -> bool:
            asked = {**body(0, tokens=5), "model": "second"}
            return (await http.post("/v1/completions", json=asked)).status_code == 404

        await until(unknown, 60, "all views know that it is gone")
        assert await complete(http, body(0, tokens=5))

    down = await nodes.run("down", "--address", nodes.address)
    assert (down.returncode, "Penstock is down." in down.stdout) == (0, True), down.stderr
    assert not [r for service in SERVICES for r in await nodes.replicas(service)]
    assert await asyncio.to_thread(nodes.process.wait, 30) == 0, "who kept it up sees that"
    assert "Penstock was taken down" in nodes.log.read_text()
    down = await nodes.run("down", "--address", nodes.address)
    assert (down.returncode, "There was no Penstock" in down.stdout) == (0, True), down.stderr
    assert re.search("127.0.0.2, 127.0.0.3", nodes.log.read_text())
