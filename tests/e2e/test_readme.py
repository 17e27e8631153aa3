"""What the README tells to type works as it stands there, against one Penstock with its model."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from services.cli.command_line import parser
from services.cli.running import Running, holding, state_file
from services.common.config import ModelSpec, Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.locks.secrets import private_folder
from tests.support.cluster import ROOT, Cluster
from tests.support.transport import SECRET

README = (ROOT / "README.md").read_text()
LINES = [
    line.split("  #")[0].strip()
    for line in re.findall(r"^    (\S.*)$", README, re.MULTILINE)
    if re.match(r"make |curl |\.venv/bin/", line)
]
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PENSTOCK = ".venv/bin/penstock "


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def readme(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """As `penstock up` leaves it: the commands find it by its data directory."""
    models = [ModelSpec(name="demo", path=str(ROOT / "models" / "demo"))]
    folder = tmp_path_factory.mktemp("readme")
    settings = Settings(data_dir=private_folder(folder / "data"))
    _for_its_owner(settings.data_dir / "internal-secret", SECRET)
    redis = EmbeddedRedis(settings.data_dir / "redis")
    async with Cluster(folder, models, redis=redis) as cluster:
        await cluster.start(workers=["prefill", "decode"], retrieval=True)
        facts = cluster.of("gateway")[0].replica.facts  # type: ignore[union-attr]
        running = Running(
            url=facts["url"],
            grpc=facts["grpc"],
            redis_url=cluster.redis.url,
            namespace=cluster.namespace,
            key=cluster.key,
            pid=os.getpid(),
        )
        with holding(settings):
            _for_its_owner(state_file(settings), json.dumps(asdict(running)))
            yield cluster


def _for_its_owner(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def here(text: str, cluster: Cluster) -> str:
    """The README's addresses and key exchanged for those of this Penstock."""
    return text.replace("http://127.0.0.1:8000", cluster.url).replace("psk-…", cluster.key)


def run(arguments: list[str], cluster: Cluster, **options: str) -> str:
    """Standard output of a Python process in the repository's folder."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")
    }
    environment["PENSTOCK_DATA_DIR"] = str(cluster.folder / "data")
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


def test_the_readme_has_what_this_file_looks_for() -> None:
    commands = [line.removeprefix(PENSTOCK).split()[0] for line in LINES if PENSTOCK in line]
    assert {"up", "keys", "status", "chat", "bench"} <= set(commands)
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_targets_are_in_the_makefile(line: str) -> None:
    assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith(PENSTOCK)])
def test_commands_run(line: str, readme: Cluster, tmp_path: Path) -> None:
    arguments = shlex.split(here(line.removeprefix(PENSTOCK), readme))
    given: argparse.Namespace = parser().parse_args(arguments)
    if arguments[0] == "up":  # another stack; its start has tests of its own
        assert given.model
        return
    if arguments[:2] == ["models", "add"]:  # starts workers, as only `up` can; tested with it
        assert given.path
        return
    if arguments[0] == "top":  # else it goes on until it is interrupted
        arguments.append("--once")
    arguments = [
        str(tmp_path / word) if word in ("out.json", "OUT") else word for word in arguments
    ]
    asked = {"input": "Who is the keeper?\n"} if arguments[0] == "chat" else {}
    said = run(["-m", "services.cli", *arguments], readme, **asked)
    if arguments[0] == "bench":
        assert json.loads((tmp_path / "out.json").read_text())
    else:
        assert said.strip()
    if arguments[0] == "status":
        addresses = {p.replica.metrics_url for p in readme.processes if p.replica}
        assert len(addresses) == len(readme.processes)
        told = re.sub(r"[\s│┃]", "", said)  # a narrow table folds them
        for address in addresses:
            assert httpx.get(address).status_code == 200
        assert all(address.rsplit("/", 2)[-2] in told for address in addresses)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("curl ")])
def test_addresses_answer(line: str, readme: Cluster) -> None:
    (url,) = shlex.split(here(line, readme))[1:]
    assert httpx.get(url).status_code == 200


def test_the_python_works_from_top_to_bottom(readme: Cluster) -> None:
    said = run(["-c", here("\n".join(BLOCKS), readme)], readme)
    assert "Greta Penrith" in said
    assert "lighthouse.md" in said
