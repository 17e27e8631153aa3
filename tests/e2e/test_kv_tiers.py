"""KV blocks that a worker evicts, on disk, through all services: they come back, for another worker
of the host, too, and whatever has become of the folder, the answer is the same.

What a worker loads first it cannot have weighed, so each test that must see one has its own."""

import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from services.common.config import ModelSpec
from tests.support.cluster import Cluster, Process
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
_COUNTS = re.compile(
    r'^penstock_worker_kv_tier_blocks_total\{event="(\w+)",.*\} (\S+)$', re.MULTILINE
)
_HELD = re.compile(r"^penstock_worker_kv_tier_held_bytes\{.*\} (\S+)$", re.MULTILINE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def penstock(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> AsyncIterator[Cluster]:
    """Of workers whose device has room for one long prompt and little more."""
    own = {
        "PENSTOCK_WORKER__KV_DISK_DIR": "kv",
        "PENSTOCK_WORKER__KV_CACHE_BYTES": str(2 * 2**20),
        "PENSTOCK_WORKER__BLOCK_SIZE": str(BLOCK),
    }
    models = [ModelSpec(name="tiny", path=str(checkpoint))]
    async with Cluster(tmp_path_factory.mktemp("penstock"), models, environment=own) as cluster:
        yield cluster


async def fresh(penstock: Cluster, keeps: bool = False) -> Process:
    """A worker that knows nothing, or nothing but what is on disk; and no other one."""
    for process in penstock.of("worker"):
        process.kill()
    if not keeps:
        shutil.rmtree(penstock.folder / "data" / "kv", ignore_errors=True)
    await penstock.start(workers=["both"])
    (worker,) = penstock.of("worker")
    if keeps:
        await until(lambda: has_looked(worker), what="it has looked at the disk")
    return worker


async def has_looked(worker: Process) -> bool:
    return any(float(held) > 0 for held in _HELD.findall(await metrics(worker)))


async def metrics(worker: Process) -> str:
    assert worker.replica is not None
    async with httpx.AsyncClient() as http:
        return (await http.get(worker.replica.metrics_url)).text


async def counts(worker: Process) -> dict[str, int]:
    return {event: int(float(n)) for event, n in _COUNTS.findall(await metrics(worker))}


async def ask(penstock: Cluster, prompt: str) -> tuple[str, int, int]:
    """The answer, how many tokens the prompt has, and how many of them were cached."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0}
    async with penstock.api() as http:
        answer = await http.post("/v1/completions", json=body | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    usage = told["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return told["choices"][0]["text"], usage["prompt_tokens"], cached


def prompt_of(name: str) -> str:
    return f"{name}: " + "the water is here " * 60


async def evicted(penstock: Cluster, worker: Process, name: str) -> tuple[str, int]:
    """The answer to a prompt that nobody has asked before, and the tokens of it that are on disk,
    and no more on the device."""
    text, tokens, cached = await ask(penstock, prompt_of(name))
    assert cached < BLOCK
    before = (await counts(worker)).get("stored", 0)
    whole = (tokens - 1) // BLOCK
    for number in range(3):
        await ask(penstock, f"{name} {number}: " + "here the water was " * 90)

    async def is_stored() -> bool:
        return (await counts(worker)).get("stored", 0) >= before + whole

    await until(is_stored, what="what was evicted is on disk")
    return text, whole * BLOCK


def files(penstock: Cluster) -> list[Path]:
    folder = penstock.folder / "data" / "kv"
    return sorted(path for path in folder.rglob("*-*") if path.is_file())


async def test_what_was_evicted_comes_back_from_disk(penstock: Cluster) -> None:
    worker = await fresh(penstock)
    text, whole = await evicted(penstock, worker, "returns")
    before = (await counts(worker)).get("loaded", 0)
    found, _, cached = await ask(penstock, prompt_of("returns"))
    assert (found, cached) == (text, whole)
    told = await counts(worker)
    assert told["loaded"] - before == whole // BLOCK
    assert told["missed"] == told["failed"] == 0


async def test_another_worker_of_the_host_goes_on_from_it(penstock: Cluster) -> None:
    """The first is killed, with all that it had on its device."""
    first = await fresh(penstock)
    text, whole = await evicted(penstock, first, "shared")
    second = await fresh(penstock, keeps=True)
    assert second.pid != first.pid
    found, _, cached = await ask(penstock, prompt_of("shared"))
    assert (found, cached) == (text, whole)
    assert (await counts(second))["loaded"] == whole // BLOCK


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def turn_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    """To a file that would be right."""
    path.rename(elsewhere := path.with_name("elsewhere"))
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("harm", [cut, empty, turn_a_bit, link])
async def test_files_that_are_not_whole_end_in_computing(
    penstock: Cluster, harm: Callable[[Path], None]
) -> None:
    name = f"torn by {harm.__name__}"
    text, _ = await evicted(penstock, await fresh(penstock), name)
    worker = await fresh(penstock, keeps=True)
    for path in files(penstock):
        harm(path)
    found, _, cached = await ask(penstock, prompt_of(name))
    assert (found, cached) == (text, 0)
    assert (await counts(worker))["missed"] > 0
    found, _, cached = await ask(penstock, prompt_of(name))
    assert found == text
    assert cached > 0, "from the device"


async def test_a_folder_that_is_gone_ends_in_computing(penstock: Cluster) -> None:
    worker = await fresh(penstock)
    text, _ = await evicted(penstock, worker, "gone")
    folder = penstock.folder / "data" / "kv"
    shutil.rmtree(folder)
    folder.write_text("no folder")
    try:
        found, _, cached = await ask(penstock, prompt_of("gone"))
        assert (found, cached) == (text, 0)
        for number in range(3):
            await ask(penstock, f"behind {number}: " + "was here the water " * 90)
        await until(lambda: has_failed(worker), what="it is told that nothing can be stored")
    finally:
        folder.unlink()


async def has_failed(worker: Process) -> bool:
    return (await counts(worker)).get("failed", 0) > 0
