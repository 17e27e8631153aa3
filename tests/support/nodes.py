"""Several Ray nodes on this machine, each with an address of its own and started as on a host of
its own: `ray start`. And `penstock up --address` on them."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from services.common.children import dying_with_parent
from services.common.discovery import Directory, Replica
from services.common.embedded_redis import binary
from services.common.redis import connect
from services.gateway.identity.keys import KeyStore
from tests.support.cluster import ROOT
from tests.support.laptop import free_port
from tests.support.transport import SECRET
from tests.support.waiting import until

LEASE_S = 2.0
TOKEN = "a-token-of-a-test-cluster-of-several-nodes"
_START_S = 300.0


def address_of(node: int) -> str:
    """127.0.0.1 itself would be replaced by Ray with an address that others reach."""
    return f"127.0.0.{node + 2}"


class Nodes:
    """`async with Nodes(...)`: the nodes run, and Redis; `up` deploys. Leaves no process behind."""

    def __init__(
        self, folder: Path, count: int, resources: Sequence[str] = (), **environment: str
    ) -> None:
        """`environment` are PENSTOCK_… variables without the prefix; `resources`: of each node,
        what `ray start --resources` takes."""
        self.folder = folder
        self.log = folder / "up.log"  # of the last `up`
        self.redis_url = ""
        self.environment: dict[str, str] = {}
        self._count, self._resources = count, resources
        self._given = _prefixed(environment)
        # Below /tmp itself: sockets' paths have 107 bytes at most.
        self._short = tempfile.TemporaryDirectory(prefix="pn-", ignore_cleanup_errors=True)
        self._port = free_port()
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._ups: list[subprocess.Popen[bytes]] = []
        self._exits = ExitStack()

    @property
    def address(self) -> str:
        return f"{address_of(0)}:{self._port}"

    async def __aenter__(self) -> "Nodes":
        self._exits.enter_context(self._short)
        self.redis_url = self._exits.enter_context(_redis())
        self.environment = {
            **os.environ,
            "PENSTOCK_REDIS_URL": self.redis_url,
            "PENSTOCK_QDRANT_URL": self._exits.enter_context(_qdrant()),
            "PENSTOCK_NAMESPACE": "nodes",
            "PENSTOCK_DATA_DIR": str(self.folder / "data"),
            "PENSTOCK_INTERNAL_SECRET": SECRET,
            "PENSTOCK_RAY_TOKEN": TOKEN,
            "PENSTOCK_LEASE_S": str(LEASE_S),
            **self._given,
        }
        try:
            for node in range(self._count):
                await self.start_node(node)
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    async def start_node(self, node: int) -> None:
        """Returns once Ray runs there."""
        where = ["--head", f"--port={self._port}", "--include-dashboard=false"]
        if node:
            where = [f"--address={self.address}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where]
        command += [
            f"--node-ip-address={address_of(node)}",
            f"--temp-dir={self._short.name}",
            "--object-store-memory=80000000",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--metrics-export-port={free_port()}",
            "--disable-usage-stats",
            "--block",
        ]
        if node < len(self._resources):
            command.append(f"--resources={self._resources[node]}")
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_worker_niceness": "0"}
        log = self.folder / f"node-{len(self._nodes)}.log"
        with log.open("wb") as sink:
            popen = subprocess.Popen(
                [*dying_with_parent(), *command],
                env={**self.environment, **own},
                cwd=ROOT,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._nodes.append(popen)

        def started() -> bool:
            said = log.read_text(errors="replace")
            assert popen.poll() is None, said
            return "Ray runtime started" in said

        await until(started, _START_S, f"node {node}")

    def processes(self, node: int) -> list[psutil.Process]:
        """All of one node."""
        return _with_descendants(self._nodes[node].pid)

    def kill_node(self, node: int) -> None:
        """As a power cut: raylet, workers and engines at once."""
        for process in _with_descendants(self._nodes[node].pid):
            with suppress(psutil.Error):
                process.kill()
        self._nodes[node].wait()

    async def up(self, *arguments: str, **settings: str) -> None:
        """`penstock up --address`, in the foreground; returns when it is up. With a data directory
        of its own, as if from another host: an earlier one may still be there."""
        self.log = self.folder / f"up-{len(self._ups)}.log"
        own = {"PENSTOCK_DATA_DIR": str(self.folder / f"data-{len(self._ups)}")}
        with self.log.open("wb") as sink:
            popen = subprocess.Popen(
                [*dying_with_parent(), *self.command("up", "--address", self.address, *arguments)],
                env={**self.environment, **own, **_prefixed(settings)},
                cwd=ROOT,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._ups.append(popen)

        def is_up() -> bool:
            said = self.log.read_text(errors="replace")
            assert popen.poll() is None or "Penstock is up." in said, said
            return "Penstock is up." in said

        await until(is_up, _START_S, "penstock up --address")

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The last `up`."""
        return self._ups[-1]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "services.cli", *arguments]

    async def run(self, *arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
        """Another command of `penstock`."""
        return await asyncio.to_thread(
            subprocess.run,
            self.command(*arguments),
            env={**self.environment, **_prefixed(settings)},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )

    async def replicas(self, service: str, namespace: str = "nodes") -> list[Replica]:
        """What the registry lists."""
        client = connect(self.redis_url)
        try:
            view = Directory(client, namespace, service, LEASE_S)
            await view.refresh()
            return list(view.replicas.values())
        finally:
            await client.aclose()

    async def key(self) -> str:
        client = connect(self.redis_url)
        try:
            made, _ = await KeyStore(client, "nodes").create(tenant="test")
            return made
        finally:
            await client.aclose()

    def _end(self) -> None:
        for popen in [*self._ups, *reversed(self._nodes)]:
            for process in _with_descendants(popen.pid):
                with suppress(psutil.Error):
                    process.kill()
            popen.wait()
        self._exits.close()


def _prefixed(settings: dict[str, str]) -> dict[str, str]:
    return {f"PENSTOCK_{name}": value for name, value in settings.items()}


@contextmanager
def _redis() -> Iterator[str]:
    """One with a port, as other hosts reach it; its URL."""
    port = free_port()
    command = [binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen(
        [*dying_with_parent(), *command, "--requirepass", "of-the-nodes"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield f"redis://:of-the-nodes@127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


@contextmanager
def _qdrant() -> Iterator[str]:
    """The URL of what answers as a Qdrant without collections, and cannot make one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/collections"
            self.send_response(200 if known else 503)
            self.end_headers()
            self.wfile.write(b'{"result": {"collections": []}, "status": "ok", "time": 0}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _with_descendants(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
