"""Ranks of one replica on several Ray nodes: `make nodes` (two minutes).

Of three nodes, each with an address of its own on this machine, the first has a rank of either
replica, each other one a rank of one. They are lost one by one, under streams."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from tests.support.checkpoint import write_checkpoint
from tests.support.laptop import free_port
from tests.support.nodes import Nodes, address_of
from tests.support.streams import Stream, complete
from tests.support.waiting import until
from tests.unit.engine.driving import SMALL

pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAMS = 6
RANK = "services.worker.engine.parallel.rank"
_FAILS_OVER_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nodes]:
    folder = tmp_path_factory.mktemp("spread")
    write_checkpoint(folder / "tiny", window=2048)
    own = {"GATEWAY__PORT": str(free_port()), "GATEWAY__GRPC_PORT": str(free_port())}
    own["BLOBS_URL"] = f"file://{folder}/blobs"
    slots = [f'{{"slot": {count}}}' for count in (2, 1, 1)]
    async with Nodes(folder, 3, slots, **own, **WORKERS) as nodes:
        yield nodes


WORKERS = {
    "WORKER__DTYPE": "float32",
    "WORKER__THREADS": str(SMALL["threads"]),
    "WORKER__KV_CACHE_BYTES": str(32 * 2**20),
}
SPREAD = {
    "WORKER__TENSOR_PARALLEL": "2",
    "WORKER__PLACEMENT_GROUP_STRATEGY": "STRICT_SPREAD",
    "WORKER__RAY": json.dumps({"resources": {"slot": 2}}),
}


def body(number: int, tokens: int = 900) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 11}]
    return {
        "model": "tiny",
        "prompt": f"stream {number}: the water at the end of the penstock " * 8,
        "max_tokens": tokens,
        "ignore_eos": True,
        **kinds[number % 2],
    }


async def api(nodes: Nodes) -> httpx.AsyncClient:
    (gateway,) = await nodes.replicas("gateway")
    return httpx.AsyncClient(
        base_url=gateway.facts["url"],
        headers={"Authorization": f"Bearer {await nodes.key()}"},
        timeout=120,
        limits=httpx.Limits(max_connections=None),
    )


def ranks(nodes: Nodes, *of: int) -> list[psutil.Process]:
    """Their processes on these nodes."""
    found = [process for node in of for process in nodes.processes(node)]
    return [process for process in found if RANK in " ".join(process.cmdline())]


def model(nodes: Nodes) -> tuple[str, ...]:
    return "--model", str(nodes.folder / "tiny"), "--prefill", "0", "--decode", "2"


async def test_what_cannot_be_is_told_before_anything_is_deployed(nodes: Nodes) -> None:
    deploy = ("up", "--address", nodes.address, *model(nodes), "--detach")
    many = {**SPREAD, "WORKER__TENSOR_PARALLEL": "4"}
    up = await nodes.run(*deploy, **many)
    assert up.returncode == 1, up.stderr
    assert "STRICT_SPREAD' puts 4 ranks on a node each, and Ray has 3" in up.stderr
    up = await nodes.run(*deploy, **SPREAD, WORKER__DEVICE="cuda")
    assert up.returncode == 1, up.stderr
    assert "ray must ask for num_gpus 2, as many as tensor_parallel, and asks for 0" in up.stderr


async def test_texts_are_those_of_one_device(nodes: Nodes) -> None:
    await nodes.up("--model", str(nodes.folder / "tiny"), "--prefill", "0", "--decode", "1")
    async with await api(nodes) as http:
        expected = await asyncio.gather(*(complete(http, body(n)) for n in range(STREAMS)))
    down = await nodes.run("down", "--address", nodes.address)
    assert down.returncode == 0, down.stderr
    await nodes.up(*model(nodes), **SPREAD)
    assert len(ranks(nodes, 0)) == 2
    assert len(ranks(nodes, 1)) == len(ranks(nodes, 2)) == 1
    async with await api(nodes) as http:
        found = await asyncio.gather(*(complete(http, body(n)) for n in range(STREAMS)))
    assert found == expected


async def goes_on_without(nodes: Nodes, lost: Any) -> float:
    """All streams end as undisturbed ones, and half of them have lost their worker. How long the
    longest pause of one was."""
    async with await api(nodes) as http:
        expected = await asyncio.gather(*(complete(http, body(n)) for n in range(STREAMS)))
        streams = [Stream(http, body(number)) for number in range(STREAMS)]
        await asyncio.gather(*(stream.reached(chunks=10) for stream in streams))
        began = time.monotonic()
        lost()
        assert [await stream.finished(_FAILS_OVER_S + 40) for stream in streams] == expected
        return time.monotonic() - began


async def both_there(nodes: Nodes, before: set[str]) -> None:
    async def there() -> bool:
        found = {worker.id for worker in await nodes.replicas("worker")}
        return len(found) == 2 and not before <= found

    await until(there, 120, "a worker in the place of the lost one")


async def test_a_killed_rank_fails_over(nodes: Nodes) -> None:
    """Its replica's other rank, on another node, ends too, and another replica comes."""
    before = {worker.id for worker in await nodes.replicas("worker")}
    every = {process.pid for process in ranks(nodes, 0, 1, 2)}
    (rank,) = ranks(nodes, 1)
    took = await goes_on_without(nodes, lambda: os.kill(rank.pid, signal.SIGKILL))
    print(f"killed rank: streams ended {took:.1f} s later")

    def replaced() -> bool:
        return len(every & {process.pid for process in ranks(nodes, 0, 1, 2)}) == 2

    await until(replaced, 10, "the rank of the first node has ended")
    await both_there(nodes, before)


async def test_a_stopped_rank_fails_over(nodes: Nodes) -> None:
    before = {worker.id for worker in await nodes.replicas("worker")}
    (rank,) = ranks(nodes, 1)
    took = await goes_on_without(nodes, lambda: os.kill(rank.pid, signal.SIGSTOP))
    print(f"stopped rank: streams ended {took:.1f} s later")
    await until(lambda: not rank.is_running(), 10, "it is ended by its keeper")
    await both_there(nodes, before)


async def test_a_killed_engine_leaves_no_rank_elsewhere(nodes: Nodes) -> None:
    before = {worker.id for worker in await nodes.replicas("worker")}
    away = [*ranks(nodes, 1), *ranks(nodes, 2)]
    engines = [rank.parent() for rank in ranks(nodes, 0)]
    lost = next(engine for engine in engines if engine is not None)
    lost.kill()

    def one_left() -> bool:
        return sum(process.is_running() for process in away) == 1

    await until(one_left, 10, "its rank on another node has ended")
    await both_there(nodes, before)


async def test_a_killed_node_fails_over(nodes: Nodes) -> None:
    """The other replica goes on; of the lost one nothing is left."""
    (kept,) = ranks(nodes, 1)
    took = await goes_on_without(nodes, lambda: nodes.kill_node(2))
    print(f"killed node: streams ended {took:.1f} s later")
    await until(lambda: len(ranks(nodes, 0)) == 1, 10, "the lost replica's rank has ended")
    assert kept.is_running()
    assert {w.address.rpartition(":")[0] for w in await nodes.replicas("worker")} <= {
        address_of(0),
        address_of(1),
    }
