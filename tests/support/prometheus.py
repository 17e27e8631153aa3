"""A real promtool and a real Prometheus, without root and without a service of the system.

What is on PATH is used. Elsewhere, on Debian and its kin, the package is fetched and unpacked below
build/, once; its lists too where the machine has none.
"""

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.children import dying_with_parent
from tests.support.laptop import free_port
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
_UNPACKED = ROOT / "build" / "prometheus"


def tool(name: str) -> str:
    """The path of `promtool` or `prometheus`."""
    if found := shutil.which(name):
        return found
    if not shutil.which("apt-get"):
        pytest.skip(f"no {name} on PATH, and no Debian to fetch it from")
    unpacked = _UNPACKED / "usr" / "bin" / name
    _UNPACKED.parent.mkdir(exist_ok=True)
    with (_UNPACKED.parent / "prometheus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others may fetch it now
        if not unpacked.exists():
            _fetch()
    return str(unpacked)


def _fetch() -> None:
    with tempfile.TemporaryDirectory(dir=_UNPACKED.parent) as folder:
        fetched = Path(folder) / "fetched"
        fetched.mkdir()
        try:
            _apt(fetched, "download", "prometheus")
        except subprocess.CalledProcessError:  # no lists: into a place of our own
            own = Path(folder) / "apt"
            (own / "partial").mkdir(parents=True)
            lists = ["-o", f"Dir::State::Lists={own}", "-o", "APT::Sandbox::User="]
            _apt(fetched, *lists, "update")
            _apt(fetched, *lists, "download", "prometheus")
        (package,) = fetched.glob("*.deb")
        unpacked = Path(folder) / "unpacked"
        subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True)
        shutil.rmtree(_UNPACKED, ignore_errors=True)
        unpacked.rename(_UNPACKED)


def _apt(folder: Path, *arguments: str) -> None:
    command = ["apt-get", "-q", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)


def promtool(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What it says; fails with that when it is not content."""
    command = [tool("promtool"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


class Prometheus:
    """A server of its own on a free port; `async with` ends it by its process id."""

    def __init__(self, folder: Path, config: str) -> None:
        """`config` is its prometheus.yml."""
        self._folder = folder
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder / "prometheus.log"

    async def __aenter__(self) -> "Prometheus":
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "prometheus.yml"
        config.write_text(self._config)
        binary = await asyncio.to_thread(tool, "prometheus")
        port = free_port()
        command = [
            *dying_with_parent("KILL"),
            binary,
            f"--config.file={config}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, "TZ": "UTC"}
            )
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)
        try:
            await until(self._ready, 30, "Prometheus is ready")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)

    async def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text(errors="replace")
        try:
            return (await self._http.get("/-/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def ask(self, path: str, **parameters: Any) -> Any:
        """The `data` of one call of its API; fails with what it says is wrong."""
        answer = await self._http.get(f"/api/v1/{path}", params=parameters)
        told = json.loads(answer.text)
        assert told["status"] == "success", f"{parameters}: {told}"
        return told["data"]

    async def query(self, query: str) -> list[dict[str, Any]]:
        """An instant vector's series, each with `metric` and `value`."""
        found: list[dict[str, Any]] = (await self.ask("query", query=query))["result"]
        return found
