"""`penstock drain` of one of two hosts under load: no request fails, whatever of it is in between.

The second host has an address of its own on this machine; the clients stand behind what a load
balancer does, and look at /readyz of both gateways."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest_asyncio

from services.common.config import ModelSpec
from tests.support.balanced import LOOK_EVERY_S, Clients
from tests.support.checkpoint import write_checkpoint
from tests.support.cluster import ROOT, Cluster
from tests.support.waiting import until

SECOND = "127.0.0.2"


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    checkpoint = write_checkpoint(tmp_path / "tiny", window=1024)
    models = [ModelSpec(name="tiny", path=str(checkpoint))]
    own = {"PENSTOCK_GATEWAY__LAME_DUCK_S": str(20 * LOOK_EVERY_S)}
    async with Cluster(tmp_path, models, environment=own) as cluster:
        yield cluster


async def test_a_host_is_drained_and_stopped_under_load(cluster: Cluster) -> None:
    here = {"BIND_HOST": SECOND, "GATEWAY__HOST": SECOND}
    await cluster.start(workers=["both"])
    second = [cluster.spawn(s, **here) for s in ("worker", "router", "tokenizer", "gateway")]
    await cluster.up(*second)
    urls = [p.replica.facts["url"] for p in cluster.of("gateway") if p.replica]
    assert [SECOND in url for url in urls].count(True) == 1

    async def ready() -> bool:
        async with httpx.AsyncClient() as http:
            return all([(await http.get(f"{url}/readyz")).status_code == 200 for url in urls])

    await until(ready, 60, "both gateways")
    async with Clients(urls, cluster.key) as clients:
        for url in urls:
            await clients.more(10, url)
        out = await drain(cluster, "--node", SECOND, "--wait")
        assert out.count(": is drained\n") == len(second)
        assert all(p.popen.poll() is None for p in second), "they stay up until they are stopped"
        assert not [url for url in clients.ready if SECOND in url]
        await clients.more(10)
        for process in second:
            process.signal(signal.SIGTERM)
        ends = [await asyncio.to_thread(p.popen.wait, 30) for p in second]
        assert ends == [0] * len(second)
        await clients.more(10)
    assert not clients.failures
    again = await drain(cluster, "--wait")
    assert again.count(": is drained\n") == 4, "what is left is this host's, of the default"


async def drain(cluster: Cluster, *arguments: str) -> str:
    """What `penstock drain` prints."""
    own = {
        "REDIS_URL": cluster.redis.url,
        "PENSTOCK_NAMESPACE": cluster.namespace,
        "PENSTOCK_DATA_DIR": str(cluster.folder / "data"),
    }
    command = [sys.executable, "-m", "services.cli", "drain", *arguments]
    done = await asyncio.to_thread(
        subprocess.run, command, env={**os.environ, **own}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
