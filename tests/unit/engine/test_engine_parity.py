"""The engine computes what transformers computes, however a step is put together."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.library import supported
from services.worker.engine import Request, Sampling
from services.worker.engine.engine import Engine
from services.worker.engine.plan import Result
from services.worker.engine.runners.cpu_runner import CpuRunner, CpuTicket
from services.worker.engine.runners.torch_runner import TorchRunner
from tests.support.programs import logits_of
from tests.unit.engine import checkpoints
from tests.unit.engine.driving import drive, generate, greedy, make_engine, make_prompts

Checkpoint = Callable[..., Path]
PROMPTS, TOKENS = 64, 64


def check_against_transformers(
    folder: Path, prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Each token must be the best one by transformers' logits given those before it, from which
    equality with greedy generation follows by induction."""
    model = checkpoints.load_reference(folder)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = checkpoints.reference_logits(model, prompt + output[:-1])[len(prompt) - 1 :]
        best, second = logits.topk(2).values.unbind(-1)
        assert (best - second).min() > 2e-4, "a tie: choose another seed for the checkpoint"
        assert logits.argmax(-1).tolist() == output


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_greedy_tokens_equal_transformers(checkpoint: Checkpoint, variant: str) -> None:
    prompts = make_prompts(8)
    outputs = generate(make_engine(checkpoint(variant)), prompts, greedy(48))
    check_against_transformers(checkpoint(variant), prompts, outputs)


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
@pytest.mark.parametrize("kernels", ["reference", *supported()])
def test_logits_equal_transformers(
    checkpoint: Checkpoint, variant: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant == "head-dim" and kernels != "reference":
        pytest.skip("heads of 24 are not the C++ kernels'")
    engine = make_engine(checkpoint(variant), max_batched_tokens=16, kernels=kernels)
    (prompt,) = [list(range(3, 143))]
    seen: list[torch.Tensor] = []
    watch_logits(engine, seen, monkeypatch)
    (output,) = generate(engine, [prompt], greedy(4))
    reference = checkpoints.load_reference(checkpoint(variant))
    expected = checkpoints.reference_logits(reference, prompt + output[:-1])[len(prompt) - 1 :]
    torch.testing.assert_close(torch.cat(seen), expected, rtol=1e-4, atol=1e-4)


def watch_logits(engine: Engine, seen: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the logits of each sampled row into `seen`."""
    runner = engine._runner
    if isinstance(runner, TorchRunner):
        compute = runner._model.forward

        def record(ops: Any) -> torch.Tensor:
            logits = compute(ops)
            seen.extend(row[None].float() for row in logits)
            return logits

        monkeypatch.setattr(runner._model, "forward", record)
        return
    assert isinstance(runner, CpuRunner)
    collect, program = runner.collect, runner._program

    def collect_and_look(ticket: CpuTicket) -> list[Result]:
        results = collect(ticket)
        rows = logits_of(program)[: len(ticket.plan.rows)]
        seen.extend(torch.from_numpy(row.copy())[None] for row in rows)
        return results

    monkeypatch.setattr(runner, "collect", collect_and_look)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(PROMPTS)


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint, prompts: list[list[int]]) -> list[list[int]]:
    outputs = generate(make_engine(checkpoint(), overlap=False), prompts, greedy(TOKENS))
    check_against_transformers(checkpoint(), prompts, outputs)
    return outputs


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        ({"max_running": 3, "max_batched_tokens": 3}, False),
        ({"max_running": 64, "max_batched_tokens": 64, "num_blocks": 1024}, False),
        ({"max_running": 10, "max_batched_tokens": 1000, "block_size": 5}, False),
        ({"block_size": 1, "num_blocks": 600}, True),
        ({"num_blocks": 16, "max_running": 16}, True),
        ({"num_blocks": 16, "max_running": 16, "prefix_caching": False}, True),
    ],
)
def test_greedy_tokens_do_not_depend_on_scheduling(
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    expected: list[list[int]],
    settings: dict[str, Any],
    preempts: bool,
) -> None:
    engine = make_engine(checkpoint(), **settings)
    requests = [Request(str(i), p, greedy(TOKENS)) for i, p in enumerate(prompts)]
    run = drive(engine, requests)
    assert [run.tokens[str(i)] for i in range(PROMPTS)] == expected
    assert (run.num_preempted > 0) == preempts
    assert {output.finish_reason for output in run.last.values()} == {"length"}


@pytest.mark.usefixtures("both_loops")
def test_greedy_tokens_do_not_depend_on_cache_hits(
    checkpoint: Checkpoint, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = make_engine(checkpoint(), num_blocks=1024)
    first = generate(engine, prompts, greedy(TOKENS))
    again = [Request(str(i), p, greedy(TOKENS)) for i, p in enumerate(prompts)]
    run = drive(engine, again)
    assert first == expected == [run.tokens[str(i)] for i in range(PROMPTS)]
    for index, prompt in enumerate(prompts):
        cached = run.last[str(index)].num_cached_tokens
        assert cached == (len(prompt) - 1) // 16 * 16


@pytest.mark.usefixtures("both_loops")
def test_shared_prefixes_and_extensions_hit_and_stay_right(checkpoint: Checkpoint) -> None:
    base = make_prompts(1, seed=3)[0] + list(range(3, 90))
    tails = make_prompts(6, longest=20, seed=4)
    prompts = [base + tail for tail in tails]
    engine = make_engine(checkpoint())
    generate(engine, [base], greedy(1))
    run = drive(engine, [Request(str(i), p, greedy(24)) for i, p in enumerate(prompts)])
    outputs = [run.tokens[str(i)] for i in range(len(prompts))]
    check_against_transformers(checkpoint(), prompts, outputs)
    assert all(run.last[str(i)].num_cached_tokens >= len(base) // 16 * 16 for i in range(6))


@pytest.mark.usefixtures("both_loops")
def test_seeded_tokens_do_not_depend_on_scheduling(
    checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    rng = random.Random(1)

    def requests(order: list[int]) -> list[Request]:
        return [
            Request(
                str(i),
                prompts[i],
                Sampling(24, temperature=0.8, top_k=(0, 40)[i % 2], top_p=0.9, seed=i),
            )
            for i in order
        ]

    alone = drive(
        make_engine(checkpoint(), max_running=1, overlap=False), requests(list(range(24)))
    )
    order = rng.sample(range(24), 24)
    together = drive(make_engine(checkpoint(), num_blocks=16), requests(order))
    assert together.num_preempted > 0
    assert alone.tokens == together.tokens


def test_bfloat16_runs_and_stays_near_float32(checkpoint: Checkpoint) -> None:
    prompts = make_prompts(4)
    engine = make_engine(checkpoint(), dtype="bfloat16")
    assert engine.info.dtype == "bfloat16"
    outputs = generate(engine, prompts, greedy(1))
    model = checkpoints.load_reference(checkpoint())
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = checkpoints.reference_logits(model, prompt)[-1]
        assert logits[output[0]] > logits.max() - 0.1 * (logits.max() - logits.mean())


def test_mistral_without_a_window_is_llama(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = json.loads((checkpoint() / "config.json").read_text())
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(checkpoint() / "model.safetensors", tmp_path)
    prompts = make_prompts(4)
    engine = make_engine(tmp_path)
    assert engine.info.architecture == "MistralForCausalLM"
    check_against_transformers(tmp_path, prompts, generate(engine, prompts, greedy(8)))


def test_sharded_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    sharded = checkpoints.make(tmp_path, "gqa", shard="100KB")
    assert (sharded / "model.safetensors.index.json").exists()
    prompts = make_prompts(2)
    assert generate(make_engine(sharded), prompts, greedy(8)) == generate(
        make_engine(checkpoint()), prompts, greedy(8)
    )
