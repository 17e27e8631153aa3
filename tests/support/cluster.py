"""Penstock as plain processes (`python -m services.<name>`), for tests that kill some of them."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from protos import router_pb2, router_pb2_grpc
from services.common.children import dying_with_parent
from services.common.config import ModelSpec
from services.common.discovery import Directory, Replica
from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import connect
from services.gateway.identity.keys import KeyStore
from tests.support.transport import TRANSPORT
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
LEASE_S = 1.5
_READY_WORKERS = re.compile(r"^penstock_router_ready_workers\{.*\} (\S+)$", re.MULTILINE)


@dataclass
class Process:
    """One service process and what it registered."""

    service: str
    role: str  # of a worker
    popen: "subprocess.Popen[bytes]"
    log: Path
    replica: Replica | None = None
    sound: bool = True  # no signal was sent to it

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> None:
        """SIGKILL, and reaps it."""
        self.signal(signal.SIGKILL)
        self.popen.wait()

    def signal(self, number: signal.Signals) -> None:
        self.sound = False
        self.popen.send_signal(number)


@dataclass
class Cluster:
    """Starts Redis and services on free ports; `async with` ends them all by process id."""

    folder: Path
    models: list[ModelSpec]
    environment: dict[str, str] = field(default_factory=dict)
    redis: EmbeddedRedis = field(default_factory=EmbeddedRedis)
    processes: list[Process] = field(default_factory=list)
    namespace: str = "cluster"
    spawned: int = 0

    async def __aenter__(self) -> "Cluster":
        self._exits = AsyncExitStack()
        self.redis.start()
        self._exits.callback(self.redis.stop)
        self._exits.push_async_callback(self._end_all)
        self.client = connect(self.redis.url)
        self._exits.push_async_callback(self.client.aclose)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    def spawn(self, service: str, **settings: str) -> Process:
        """Starts one service; `settings` are PENSTOCK_… variables without the prefix."""
        log = self.folder / f"{service}-{self.spawned}.log"
        self.spawned += 1
        own = {
            "REDIS_URL": self.redis.url,
            "PENSTOCK_NAMESPACE": self.namespace,
            "PENSTOCK_DATA_DIR": str(self.folder / "data"),
            "PENSTOCK_MODELS": json.dumps([m.model_dump() for m in self.models]),
            "PENSTOCK_LEASE_S": str(LEASE_S),
            "PENSTOCK_GATEWAY__PORT": "0",
            "PENSTOCK_WORKER__DTYPE": "float32",
            "PENSTOCK_WORKER__KV_CACHE_BYTES": str(32 * 2**20),
            **self.environment,
            **{f"PENSTOCK_{name}": value for name, value in settings.items()},
        }
        with log.open("wb") as sink:
            popen = subprocess.Popen(
                [*dying_with_parent("KILL"), sys.executable, "-m", f"services.{service}"],
                env={**os.environ, **own},
                cwd=ROOT,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = Process(service, settings.get("WORKER__ROLE", ""), popen, log)
        self.processes.append(process)
        return process

    async def up(self, *processes: Process, timeout_s: float = 150.0) -> None:
        """Returns when all of them are registered; fails with the log of one that ended."""
        waiting = {p.service for p in processes}
        views = {
            service: Directory(self.client, self.namespace, service, LEASE_S) for service in waiting
        }

        async def registered() -> bool:
            for view in views.values():
                await view.refresh()
            for process in processes:
                found = views[process.service].replicas.values()
                process.replica = next((r for r in found if r.pid == process.pid), None)
                ended = process.popen.poll()
                assert ended is None, f"{process.service} ended with {ended}:\n{tail(process)}"
            return all(p.replica for p in processes)

        await until(registered, timeout_s, f"registered: {waiting}")

    async def start(
        self,
        *,
        workers: list[str],
        retrieval: bool = False,
        routers: int = 1,
        tokenizers: int = 1,
        gateways: int = 1,
    ) -> None:
        """Gateways, the services below them, and a worker for each given role; returns when
        requests can go. What is up of these and sound stays, what is there besides is killed."""
        names = ["router"] * routers + ["tokenizer"] * tokenizers + ["retrieval"] * retrieval
        parts = [(name, "") for name in [*names, *["gateway"] * gateways]]
        missing = Counter([("worker", role) for role in workers] + parts)
        for process in list(self.processes):
            part = process.service, process.role
            if process.sound and process.popen.poll() is None and missing[part]:
                missing[part] -= 1
            else:
                process.kill()
                self.processes.remove(process)
        spawned = [
            self.spawn(service, **({"WORKER__ROLE": role} if role else {}))
            for service, role in missing.elements()
        ]
        await self.up(*spawned)
        self.key, _ = await KeyStore(self.client, self.namespace).create(tenant="test")
        await until(self._serves, 60.0, "routers see all workers, the gateway lists all models")

    async def _serves(self) -> bool:
        return all([await self._serves_by(number) for number in range(len(self.of("gateway")))])

    async def _serves_by(self, gateway: int) -> bool:
        async with self.api(gateway) as http:
            for router in self.of("router"):
                assert router.replica is not None
                told = (await http.get(router.replica.metrics_url)).text
                if sum(map(float, _READY_WORKERS.findall(told))) != len(self.of("worker")):
                    return False
            if (await http.get("/readyz")).status_code != 200:
                return False
            listed = (await http.get("/v1/models")).json().get("data", [])
            return {model["id"] for model in listed} >= {model.name for model in self.models}

    @property
    def url(self) -> str:
        return self.url_of(0)

    def url_of(self, gateway: int) -> str:
        return self.of("gateway")[gateway].replica.facts["url"]  # type: ignore[union-attr]

    def of(self, service: str) -> list[Process]:
        """The processes of a service, in the order in which they were started."""
        return [p for p in self.processes if p.service == service]

    def worker(self, role: str) -> Process:
        """The first living worker of a role."""
        return next(
            p
            for p in self.of("worker")
            if p.popen.poll() is None and p.replica and p.replica.facts["role"] == role
        )

    async def busy_worker(self, role: str) -> Process:
        """The worker of a role that runs something now."""
        found: list[Process] = []

        async def running() -> bool:
            status = await self.router_status()
            busy = {w.address for w in status.workers if w.role == role and w.running}
            found[:] = [p for p in self.of("worker") if p.replica and p.replica.address in busy]
            return bool(found)

        await until(running, what=f"a {role} worker is busy")
        return found[0]

    def api(self, gateway: int = 0) -> httpx.AsyncClient:
        """An HTTP client with the test tenant's key."""
        return httpx.AsyncClient(
            base_url=self.url_of(gateway),
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=60.0,
        )

    async def router_status(self) -> router_pb2.RouterStatus:
        """What the first router sees that lives."""
        living = [p for p in self.of("router") if p.popen.poll() is None]
        return await self.router_status_of(living[0])

    async def router_status_of(self, router: Process) -> router_pb2.RouterStatus:
        assert router.replica is not None
        async with TRANSPORT.dial(router.replica.address, "router") as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            return await stub.GetStatus(router_pb2.RouterStatusRequest(), timeout=5.0)

    async def _end_all(self) -> None:
        alive = [p for p in self.processes if p.popen.poll() is None]
        for process in alive:
            process.signal(signal.SIGCONT)  # a stopped process does not hear SIGTERM
            process.popen.terminate()
        ends = (asyncio.to_thread(p.popen.wait, 15) for p in alive)
        for process, end in zip(
            alive, await asyncio.gather(*ends, return_exceptions=True), strict=True
        ):
            if isinstance(end, subprocess.TimeoutExpired):
                process.kill()


def tail(process: Process) -> str:
    """The end of the process's log."""
    return process.log.read_text(errors="replace")[-3000:]
