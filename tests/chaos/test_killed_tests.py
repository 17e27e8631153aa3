"""A test run that is killed leaves no server behind."""

import subprocess
import sys
from pathlib import Path

import psutil

from services.common.children import dying_with_parent
from tests.support.cluster import ROOT
from tests.support.waiting import until

TESTS = """
import asyncio
from pathlib import Path

from services.common.config import ModelSpec
from tests.support.cluster import Cluster


async def test_that_is_killed(tmp_path):
    async with Cluster(tmp_path, [ModelSpec(name="tiny", path={model!r})]) as cluster:
        await cluster.up(cluster.spawn("worker"), cluster.spawn("router"))
        Path({mark!r}).touch()
        await asyncio.sleep(600)
"""


async def test_its_servers_end_with_it(tmp_path: Path, checkpoint: Path) -> None:
    mark, tests = tmp_path / "up", tmp_path / "test_killed.py"
    tests.write_text(TESTS.format(model=str(checkpoint), mark=str(mark)))
    arguments = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), str(tests)]
    run = subprocess.Popen(
        [*dying_with_parent("KILL"), sys.executable, "-m", "pytest", *arguments], cwd=ROOT
    )
    try:

        def up() -> bool:
            assert run.poll() is None
            return mark.exists()

        await until(up, 150, "a worker and a router")
        servers = psutil.Process(run.pid).children(recursive=True)
        names = [" ".join(server.cmdline()) for server in servers]
        for name in ("redis-server", "services.worker", "engine.process", "services.router"):
            assert any(name in each for each in names), f"{name} is not in {names}"
    finally:
        run.kill()
        run.wait()
    _, left = psutil.wait_procs(servers, timeout=30)
    for process in left:
        process.kill()
    assert not left
