"""`penstock up` as a process: a whole Penstock under Ray, for tests that end parts of it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from services.cli.running import Running, find_running
from services.common.children import dying_with_parent
from services.common.config import Settings
from services.common.discovery import Directory, Replica
from services.common.redis import connect
from tests.support.waiting import until

START_S = 240.0


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Laptop:
    """One `penstock up` with a data directory of its own; `async with` leaves no process behind."""

    def __init__(
        self, folder: Path, *arguments: str, module: str = "services.cli", **environment: str
    ) -> None:
        """`environment` are PENSTOCK_… variables without the prefix."""
        self._module = module
        self.data_dir = folder / "data"
        self.log = folder / "up.log"
        self._arguments = arguments
        self._environment = {f"PENSTOCK_{name}": value for name, value in environment.items()}
        self._up: subprocess.Popen[bytes] | None = None
        self._running: Running | None = None

    async def __aenter__(self) -> "Laptop":
        # A port that stays: a gateway that comes back is found where it was.
        command = [sys.executable, "-m", self._module, "up", "--port", str(free_port())]
        own = {"PENSTOCK_DATA_DIR": str(self.data_dir), "PENSTOCK_GATEWAY__GRPC_PORT": "0"}
        with self.log.open("wb") as sink:
            self._up = subprocess.Popen(
                [*dying_with_parent(), *command, *self._arguments],
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **own, **self._environment},
            )
        try:
            await until(self._is_up, START_S, "penstock up")
        except BaseException:
            self.end_all()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end_all()

    @property
    def up(self) -> "subprocess.Popen[bytes]":
        assert self._up is not None
        return self._up

    @property
    def running(self) -> Running:
        """What the commands know of it."""
        assert self._running is not None
        return self._running

    def api(self, timeout_s: float = 120.0) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.running.key}"}
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(
            base_url=self.running.url, headers=headers, timeout=timeout_s, limits=limits
        )

    async def replicas(self, service: str) -> list[Replica]:
        """What the registry lists."""
        redis = connect(self.running.redis_url)
        try:
            view = Directory(redis, self.running.namespace, service, lease_s=3.0)
            await view.refresh()
            return list(view.replicas.values())
        finally:
            await redis.aclose()

    def processes(self, named: str = "") -> list[psutil.Process]:
        """All that belong to it, orphans too, with `named` in their command line."""
        below: set[psutil.Process] = set()
        with suppress(psutil.Error):
            below.update(psutil.Process(self.up.pid).children(recursive=True))
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                # Some that rename themselves show no environment.
                own = process in below or (
                    process.environ().get("PENSTOCK_DATA_DIR") == str(self.data_dir)
                )
                if own and named in " ".join(process.cmdline()):
                    found.append(process)
        return found

    async def stop(self, timeout_s: float = 60.0) -> list[psutil.Process]:
        """Ctrl-C; returns the processes that outlive it by more than a few seconds."""
        if self.up.poll() is None:
            self.up.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.up.wait, timeout_s)
        _, left = await asyncio.to_thread(psutil.wait_procs, self.processes(), 5)
        return list(left)

    def end_all(self) -> None:
        """Kills whatever is left of it."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        if self._up is not None:
            self._up.wait()

    def _is_up(self) -> bool:
        assert self.up.poll() is None, self.log.read_text(errors="replace")
        # Before it, there may be no data directory yet: the settings are those of the process.
        self._running = find_running(Settings(data_dir=self.data_dir))
        return self._running is not None and "Penstock is up." in self.log.read_text()
