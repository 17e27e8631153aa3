"""Penstock on several Ray nodes, one of which is killed under load: `make nodes` (two minutes).

The nodes are processes on this machine, each with an address of its own; every stream crosses the
border between two of them, or may."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.common.discovery import SERVICES, Replica
from tests.support.checkpoint import write_checkpoint
from tests.support.nodes import Nodes, address_of
from tests.support.streams import Stream, complete
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAMS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    checkpoint = write_checkpoint(folder / "tiny", window=2048)
    two = {f"{service}__REPLICAS": "2" for service in ("GATEWAY", "TOKENIZER", "ROUTER")}
    async with Nodes(folder, 2, **two, ROUTER__SPLIT="always", GATEWAY__PORT="0") as nodes:
        await nodes.up("--model", str(checkpoint), "--prefill", "2", "--decode", "2")
        yield nodes


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
    for service in set(SERVICES) - {"retrieval", "worker"}:
        assert await hosts(nodes, service) == both, service
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
        return [len(each) for each in found] == [2, 2, 4]

    await until(back, 120, "the replicas of the lost node, on another one")


async def test_ctrl_c_takes_it_down_and_leaves_the_cluster(nodes: Nodes) -> None:
    async with await api(nodes, 0) as http:
        stream = Stream(http, body(0))
        await stream.reached(chunks=5)
        nodes.process.send_signal(signal.SIGINT)
        await stream.finished()
    assert await asyncio.to_thread(nodes.process.wait, 90) == 0, nodes.log.read_text()
    assert not [r for service in SERVICES for r in await nodes.replicas(service)]
    await nodes.up("--model", str(nodes.folder / "tiny"), "--prefill", "0", "--detach")
    assert await asyncio.to_thread(nodes.process.wait, 30) == 0, nodes.log.read_text()
    async with await api(nodes, 1) as http:
        assert await complete(http, body(0, tokens=5)), "it stays up"
    down = await nodes.run("down", "--address", nodes.address)
    assert (down.returncode, "Penstock is down." in down.stdout) == (0, True), down.stderr
    assert not [r for service in SERVICES for r in await nodes.replicas(service)]
    down = await nodes.run("down", "--address", nodes.address)
    assert (down.returncode, "There was no Penstock" in down.stdout) == (0, True), down.stderr
    assert re.search("127.0.0.2, 127.0.0.3", nodes.log.read_text())
