"""What `helm test` runs in a cluster, against a running platform: a chat each way, a key that is
gone afterwards, and TLS at the door that is checked."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest
import pytest_asyncio

from services.common.discovery import Replica
from services.gateway.identity.key_record import KeyRecord
from services.gateway.identity.keys import KeyStore
from tests.support.authority import Authority
from tests.support.cluster import ROOT, Cluster
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
SCRIPT = ROOT / "deploy/helm/penstock/files/tests/ask.py"
NAME = "llm.example.com"


def ask(penstock: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment(penstock),
        capture_output=True,
        text=True,
        timeout=120,
    )


def environment(penstock: Cluster) -> dict[str, str]:
    """As in the pod: it has what finds Redis, and `penstock` is on the path."""
    own = {
        "PENSTOCK_REDIS_URL": penstock.redis.url,
        "PENSTOCK_NAMESPACE": penstock.namespace,
        "PENSTOCK_DATA_DIR": str(penstock.folder / "data"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    return {**os.environ, **own}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def door(
    penstock: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Replica, Path]]:
    """A second gateway, with TLS, and the folder of its certificate."""
    folder = Authority().issue(tmp_path_factory.mktemp("door"), NAME)
    gateway = penstock.spawn(
        "gateway",
        GATEWAY__GRPC_PORT="0",
        GATEWAY__TLS_CERT=str(folder / "tls.crt"),
        GATEWAY__TLS_KEY=str(folder / "tls.key"),
    )
    await penstock.up(gateway)
    assert gateway.replica is not None
    yield gateway.replica, folder
    gateway.kill()
    penstock.processes.remove(gateway)


async def test_a_chat_each_way_and_no_key_is_left(
    penstock: Cluster, door: tuple[Replica, Path]
) -> None:
    replica, folder = door
    certain = (f"--authority={folder / 'ca.crt'}", f"--server-name={NAME}", "--wait=60")
    rest = ask(penstock, "rest", replica.facts["url"], *certain)
    assert "rest: tiny answered" in rest.stdout, rest.stderr
    over_grpc = ask(penstock, "grpc", replica.facts["grpc"], "--tls", *certain)
    assert "grpc: tiny answered" in over_grpc.stdout, over_grpc.stderr
    assert rest.returncode == over_grpc.returncode == 0
    assert len(await made(penstock)) >= 2
    assert await left(penstock) == []


async def test_a_door_without_tls_is_asked_as_it_is(penstock: Cluster) -> None:
    """And a Secret without ca.crt, as of a public authority, is no error."""
    asked = ask(penstock, "rest", penstock.url, "--authority=/absent/ca.crt", "--wait=60")
    assert asked.returncode == 0, asked.stderr


async def test_a_door_of_another_name_or_authority_fails(
    penstock: Cluster, door: tuple[Replica, Path], tmp_path: Path
) -> None:
    replica, folder = door
    other = Authority("another").issue(tmp_path, NAME)
    for wrong in (
        (f"--authority={folder / 'ca.crt'}", "--server-name=other.example.com"),
        (f"--authority={other / 'ca.crt'}", f"--server-name={NAME}"),
    ):
        asked = ask(penstock, "rest", replica.facts["url"], *wrong, "--wait=1")
        assert asked.returncode == 1
        assert "CERTIFICATE_VERIFY_FAILED" in asked.stderr
        asked = ask(penstock, "grpc", replica.facts["grpc"], "--tls", *wrong, "--wait=1")
        assert asked.returncode == 1
        assert "not ready in time" in asked.stderr
    assert await left(penstock) == []


@pytest.mark.parametrize(("end", "revoked"), [("terminate", True), ("kill", False)])
async def test_what_is_ended_while_it_waits_leaves_no_key_for_long(
    penstock: Cluster, end: str, revoked: bool
) -> None:
    """Nothing listens where it asks: it has a key, and waits, when its pod is deleted."""
    asks = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), "rest", "http://127.0.0.1:1", "--wait=600"),
        env=environment(penstock),
    )
    try:
        await until(lambda: holds(penstock), 60, "it has a key")
        getattr(asks, end)()
        assert await asyncio.wait_for(asks.wait(), 60) == (128 + SIGTERM if revoked else -SIGKILL)
    finally:
        if asks.returncode is None:
            asks.kill()
    assert await holds(penstock) is not revoked
    *_, record = await made(penstock)
    assert record.expires == record.created + 900
    await KeyStore(penstock.client, penstock.namespace).revoke(record.id)


async def holds(penstock: Cluster) -> bool:
    return bool(await left(penstock))


async def left(penstock: Cluster) -> list[str]:
    """Keys of the test's tenant that still hold."""
    return [key.id for key in await made(penstock) if key.holds]


async def made(penstock: Cluster) -> list[KeyRecord]:
    keys = await KeyStore(penstock.client, penstock.namespace).list()
    return [key for key in keys if key.tenant == "helm-test"]
