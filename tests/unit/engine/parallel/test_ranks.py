"""Ranks in processes of their own: what an engine with them tells is what one without tells, on all
ways; and when one is lost the engine says so, and ends."""

import asyncio
import os
import signal
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from services.worker.engine import (
    Constraint,
    EngineClient,
    EngineConfig,
    EngineDied,
    EngineLoadError,
    Pooling,
    Request,
    Sampling,
)
from services.worker.engine.adapters import Adapter, Lora, peft
from services.worker.engine.engine import Engine
from services.worker.engine.executor import make_executor
from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.kv.cache import block_shape
from services.worker.engine.kv.torch_cache import TorchCache
from services.worker.engine.models.registry import read_config
from services.worker.engine.parallel import ranks as ranks_module
from services.worker.engine.parallel.kv import RanksCache
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.runners.runner import RunnerLost
from services.worker.engine.steps import EngineBroken
from services.worker.engine.weights.torch_weights import STORED
from tests.support import adapters
from tests.support.checkpoint import write_checkpoint
from tests.support.hangs import no_hanging
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import SMALL, Run, drive, greedy, make_engine, make_prompts
from tests.unit.engine.kv.test_kv_tiers import counts, evict, learn
from tests.unit.engine.process.test_engine_process import Listener, wait_until_gone
from tests.unit.engine.runners.test_triton_runner import plan
from tests.unit.engine.test_engine_split import Pair, requests
from tests.unit.engine.weights.test_quantization import copy_of_rounded

CPU = torch.device("cpu")
HOW: dict[str, Any] = {
    "dtype": "float32",
    "quantization": "int8",
    "kv_format": "int8",
    "max_batched_tokens": 48,
}
"""On the C++ kernels, as both formats are cut there; others are in test_shards.py."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), hidden=128, seed=0)


@pytest.fixture(scope="module")
def two(folder: Path) -> Engine:
    """Where a test loses a rank, it is the last one."""
    return make_engine(folder, tensor_parallel=2, **HOW)


@pytest.fixture
def one(folder: Path) -> Engine:
    return make_engine(folder, **HOW)


def numbers(run: Run) -> dict[str, Any]:
    return {name: np.frombuffer(last.pooled or b"", "<f4") for name, last in run.last.items()}


def test_it_is_told_of_as_one_engine(two: Engine, one: Engine) -> None:
    alike = "kv_format", "kv_shape_per_block", "kv_bytes_per_block", "num_parameters", "num_blocks"
    for name in alike:
        assert getattr(two.info, name) == getattr(one.info, name)
    assert two.info.weights == "2 ranks"
    assert two.info.parameter_bytes < 2 * one.info.parameter_bytes


def test_all_that_may_be_asked_for_is_the_same(two: Engine, one: Engine) -> None:
    prompts = make_prompts(6, seed=6)
    ways = [
        greedy(12),
        Sampling(max_tokens=12, temperature=0.8, seed=3, logprobs=2),
        greedy(12, repetition_penalty=1.3, bad_words=((5,), (7, 8))),
        Sampling(max_tokens=4, temperature=0, prompt_logprobs=1),
        Sampling(max_tokens=9, temperature=0, constraint=Constraint("regex", "[a-f]{9}")),
        Sampling(max_tokens=9, temperature=1.2, seed=4, constraint=Constraint("regex", "[a-f]{9}")),
    ]
    asked = [
        Request(f"{index}", prompt, way)
        for index, (prompt, way) in enumerate(zip(prompts, ways, strict=True))
    ]
    want, found = drive(one, asked), drive(two, asked)
    assert found.tokens == want.tokens
    assert [last.error for last in found.last.values()] == [None] * len(ways)


def test_numbers_are_the_same(two: Engine, one: Engine) -> None:
    """Also logits of tokens of which each rank knows some."""
    kinds = [Pooling("last"), Pooling("mean"), Pooling("logits", 0, (3, 200, 310))]
    asked = [
        Request(f"{index}", prompt, Sampling(1), pooling=kinds[index % 3])
        for index, prompt in enumerate(make_prompts(6, seed=9))
    ]
    want, found = numbers(drive(one, asked)), numbers(drive(two, asked))
    for name, values in want.items():
        # A sum in another order may round a key to the next of its 8 bits.
        np.testing.assert_allclose(found[name], values, rtol=0, atol=3e-3 * np.abs(values).max())


def test_adapters_are_cut_as_what_they_change(
    two: Engine, one: Engine, folder: Path, tmp_path: Path
) -> None:
    files = adapters.make(tmp_path / "adapter", folder, seed=1, rank=3)
    read = replace(peft.read(files, folder, 64), id="a")
    asked = [
        Request(f"{index}", prompt, greedy(12), adapter="a" if index % 2 else "")
        for index, prompt in enumerate(make_prompts(4, seed=2))
    ]
    plain = drive(one, [replace(request, adapter="") for request in asked]).tokens
    told = []
    for engine in (one, two):
        assert engine.load_adapter(read) == ""
        told.append(drive(engine, asked).tokens)
        engine.drop_adapter("a")
    assert told[0] == told[1] != plain
    assert drive(two, [replace(request, adapter="") for request in asked]).tokens == plain


@pytest.mark.parametrize("wide_prefills", [True, False])
def test_engines_of_different_widths_hand_over(
    two: Engine,
    one: Engine,
    folder: Path,
    wide_prefills: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_payload, "FOLDER", tmp_path)
    work = requests(8)
    want = drive(make_engine(folder, **HOW), work).tokens
    pair = Pair(two, one) if wide_prefills else Pair(one, two)
    for request in work:
        pair.add(request)
    assert pair.run() == want


@pytest.mark.usefixtures("loading_pays")
def test_what_is_on_disk_is_for_engines_of_any_width(
    two: Engine, folder: Path, tmp_path: Path
) -> None:
    disk = {"kv_disk_dir": str(tmp_path / "kv"), "checkpoint": "it", **HOW}
    prompt = make_prompts(1, longest=200, seed=5)[0] * 9
    want = drive(two, [Request("it", prompt[:150], greedy(12))]).tokens
    for number, ranks in enumerate((2, 1, 2)):
        engine = make_engine(folder, num_blocks=32, tensor_parallel=ranks, **disk)
        learn(engine)
        run = drive(engine, [Request("it", prompt[:150], greedy(12))])
        assert run.tokens == want
        assert counts(engine).loaded == (9 if number else 0)
        evict(engine)
        engine.close()


def test_blocks_are_what_one_device_has(two: Engine) -> None:
    """Whatever bytes they are of."""
    size = two.info.kv_bytes_per_block
    content = bytes(index * 7 % 251 for index in range(3 * size))
    two._runner.cache.write([4, 9, 2], content)
    assert bytes(two._runner.cache.read([9, 4])) == content[size : 2 * size] + content[:size]


class Caches:
    """Stands for a team: of each rank what its cache holds."""

    def __init__(
        self, shards: list[Shard], shape: tuple[int, int, int, int, int], dtype: torch.dtype
    ) -> None:
        layers, sides, _, tokens, dim = shape
        self.of = [
            TorchCache(8, (layers, sides, len(s.kv_heads), tokens, dim), dtype, CPU) for s in shards
        ]

    def tell(self, rank: int, operation: str, blocks: list[int], data: Any) -> None:
        self.of[rank].write(blocks, data.data)

    def ask_all(self, operation: str, blocks: list[int]) -> list[Any]:
        return [cache.read(blocks) for cache in self.of]


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_blocks_of_few_bits_are_cut_with_their_scales(
    folder: Path, ranks: int, kv_format: str
) -> None:
    """Of 4 key-value heads some ranks have two, one, or the same as another."""
    model = replace(read_config(folder), num_heads=8, num_kv_heads=4)
    shape = block_shape(model, 16)
    shards = [Shard(model, rank, ranks) for rank in range(ranks)]
    dtype = STORED[kv_format]
    team, whole = Caches(shards, shape, dtype), TorchCache(8, shape, dtype, CPU)
    cache = RanksCache(team, shards, shape, kv_format)  # type: ignore[arg-type]
    size = len(whole.read([0]))
    content = np.random.default_rng(1).integers(0, 256, 2 * size, np.uint8).tobytes()
    cache.write([5, 1], content)
    whole.write([5, 1], content)
    assert bytes(cache.read([1, 5, 0])) == bytes(whole.read([1, 5, 0]))
    of_all = whole.layer(1)
    for shard, own in zip(shards, team.of, strict=True):
        heads, part = list(shard.kv_heads), own.layer(1)
        assert torch.equal(part.values, of_all.values[:, :, heads])
        assert of_all.scales is not None
        assert part.scales is not None
        assert part.scales.view(torch.int32).equal(of_all.scales[:, :, heads].view(torch.int32))


@pytest.mark.parametrize(
    ("name", "value"), [("kernels", "other"), ("kv_format", "other"), ("num_blocks", 9)]
)
def test_ranks_that_loaded_unlike_parts_are_ended(
    one: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    """What each has of its own may differ."""
    second = replace(one.info, threads=7, device="cuda:1", **{name: value})
    team = Mock(loaded=lambda: [one.info, second])
    team.name.return_value = "rank 1 of 2"
    monkeypatch.setattr(ranks_module, "Team", lambda config: team)
    with pytest.raises(ValueError, match=f"rank 1 of 2 has {name} {value!r}, the first "):
        ranks_module.Ranks(EngineConfig(model=str(folder), tensor_parallel=2, **(SMALL | HOW)))
    team.end.assert_called_once_with()


def test_a_killed_rank_ends_the_engine(two: Engine) -> None:
    """Whatever it is told then, and be it an adapter, whose fault that is not."""
    two.add(Request("0", [3, 4, 5], greedy(200)))
    for _ in range(3):
        two.step()
    members = two.executor._team._members  # type: ignore[attr-defined]
    pids = [member._process.pid for member in members]
    os.kill(pids[1], signal.SIGKILL)
    with no_hanging(), pytest.raises(EngineBroken, match="rank 1 of 2 was ended by signal 9") as e:
        drive(two, [])
    assert e.value.killed
    for pid in pids:
        wait_until_gone(pid)
    numbers = np.zeros((1, 128), np.float32)
    adapter = Adapter("a", {"model.layers.0.self_attn.o_proj": Lora(numbers, numbers.T)})
    team = two.executor._team  # type: ignore[attr-defined]
    for told in (
        lambda: two.load_adapter(adapter),
        two.executor.check,
        lambda: team.tell_all("head_rows", []),
        lambda: team.show_all("launch", None),
    ):
        with pytest.raises(RunnerLost, match="rank 1 of 2 was ended by signal 9"):
            told()


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_triton_s_kernels_give_the_same(tmp_path: Path, quantization: str) -> None:
    """In the interpreter: a prompt, and behind it two tokens, of which only the device knows one.
    Queries are normed over all heads; one sequence has an adapter."""
    folder = rounded = checkpoints.make(tmp_path / "model", "olmo2", num_hidden_layers=1)
    if quantization != "auto":
        rounded = copy_of_rounded(folder, tmp_path / "rounded", quantization)
    how = SMALL | {"max_running": 2, "num_blocks": 8, "dtype": "float32"}
    how |= {"max_adapters": 1, "max_step_adapters": 1, "max_adapter_rank": 3}
    adapter = peft.read(adapters.make(tmp_path / "a", folder, rank=3), folder, 3)
    steps = [
        plan([([5, 9, 200, 31, 8], 0, [4]), ([17, 40, 3], 0, [2])], [0, 1]),
        plan([([0], 5, [4]), ([77], 3, [2])], [0, 1], [(0, 0)]),
    ]
    told = []
    steps[0].adapters.extend([0] * 5 + [-1] * 3)
    steps[1].adapters.extend([0, -1])
    few_bits = {"tensor_parallel": 2, "quantization": quantization}
    for own in (
        {"model": str(rounded), "kernels": "reference"},
        {"model": str(folder), "kernels": "triton"} | few_bits,
    ):
        executor = make_executor(EngineConfig(**(how | own)))
        runner = executor.runner
        assert runner.info.kernels == own["kernels"]
        runner.adapt(0, adapter)
        tickets = [runner.launch(step) for step in steps]
        told.append([[r.tokens for r in runner.collect(one).results] for one in tickets])
        if own["kernels"] == "reference":
            plain = runner.collect(runner.launch(replace(steps[0], adapters=array("i"))))
            assert plain.results[0].tokens != told[0][0][0]
        executor.close()
    assert told[0] == told[1]


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[tuple[EngineClient, Listener, list[int]]]:
    """And the ranks' processes."""
    listener = Listener()
    client = EngineClient(
        EngineConfig(model=str(folder), tensor_parallel=2, **(SMALL | HOW)), listener
    )
    await client.start()
    try:
        children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
        assert len(children) == 2
        yield client, listener, [int(pid) for pid in children]
    finally:
        await client.stop()


async def test_a_rank_that_dies_while_nothing_runs_is_noticed(folder: Path) -> None:
    async with started(folder) as (client, _, ranks), asyncio.timeout(60):
        os.kill(ranks[0], signal.SIGKILL)
        with pytest.raises(EngineDied, match="rank 0 of 2 was ended by signal 9") as caught:
            await client.wait_closed()
        assert caught.value.killed
    wait_until_gone(ranks[1])


async def test_a_rank_that_hangs_ends_the_engine(folder: Path) -> None:
    async with started(folder) as (client, listener, ranks), asyncio.timeout(60):
        client.add(Request("0", [3, 4, 5], greedy(200)))
        await listener.until(lambda: len(listener.tokens.get("0", [])) > 2)
        os.kill(ranks[1], signal.SIGSTOP)
        client.add(Request("1", [3, 4, 5], greedy(200)))
        with pytest.raises(EngineDied, match="rank 1 of 2 shows no life for 5 s") as caught:
            await client.wait_closed()
        assert not caught.value.killed
    for pid in ranks:
        wait_until_gone(pid)


async def test_ranks_end_with_their_engine(folder: Path) -> None:
    """Even one that is stopped, and the one that waits for it."""
    async with started(folder) as (client, _, ranks):
        os.kill(ranks[1], signal.SIGSTOP)
        client.add(Request("0", [3, 4, 5], greedy(200)))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        for pid in ranks:
            wait_until_gone(pid)


async def test_what_cannot_be_cut_is_told_before_anything_loads(folder: Path) -> None:
    config = EngineConfig(model=str(folder), tensor_parallel=3, **(SMALL | HOW))
    with pytest.raises(EngineLoadError, match="tensor_parallel 3 does not divide the model's num"):
        await EngineClient(config, lambda step: None).start()
