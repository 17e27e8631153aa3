"""The runner for GPUs, on a CPU: its kernels run in Triton's interpreter, its graphs are calls."""

import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.sampling import EDIT, NO_EDITS, SAMPLING
from services.worker.engine import EngineConfig, Request, Sampling, warm_up
from services.worker.engine.config import KV_FORMATS
from services.worker.engine.plan import StepPlan
from services.worker.engine.runners import triton_runner
from services.worker.engine.runners.decode_graphs import DecodeGraphs, batch_sizes
from services.worker.engine.runners.making import make_runner
from services.worker.engine.runners.runner import Runner
from services.worker.engine.runners.step_inputs import Capacity, StepInputs
from services.worker.engine.runners.triton_runner import TritonRunner
from services.worker.engine.scheduling.cost_model import CostModel
from tests.unit.engine.checkpoints import VOCAB
from tests.unit.engine.driving import SMALL, drive, make_engine, make_prompts

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at infinities
BLOCK_SIZE = 16


def runner(folder: Path, kernels: str, **settings: object) -> Runner:
    config = SMALL | {"max_running": 4, "num_blocks": 12, "kernels": kernels} | settings
    return make_runner(EngineConfig(model=str(folder), **config))


def plan(
    pieces: list[tuple[list[int], int, list[int]]],
    sampled: list[int],
    awaited: list[tuple[int, int]] | None = None,
    **sampling: float,
) -> StepPlan:
    """Of each sequence (its new tokens, how many it had, its blocks)."""
    counts = [len(tokens) for tokens, _, _ in pieces]
    lengths = [had + len(tokens) for tokens, had, _ in pieces]
    tables = np.zeros((len(pieces), max(len(blocks) for _, _, blocks in pieces)), np.int32)
    for row, (_, _, blocks) in enumerate(pieces):
        tables[row, : len(blocks)] = blocks
    samplings = np.zeros(len(sampled), SAMPLING)
    samplings["top_p"] = 1
    for name, value in sampling.items():
        samplings[name] = value
    samplings["position"] = [lengths[row] for row in sampled]
    return StepPlan(
        token_ids=array("i", [token for tokens, _, _ in pieces for token in tokens]),
        positions=array(
            "i", [had + place for tokens, had, _ in pieces for place in range(len(tokens))]
        ),
        starts=array("i", [0, *accumulate(counts)]),
        lengths=array("i", lengths),
        tables=array("i", tables.tobytes()),
        num_decodes=counts.count(1),
        sampled=array("i", sampled),
        rows=array("i", [[*accumulate(counts)][sequence] - 1 for sequence in sampled]),
        sampling_words=array("i", samplings.tobytes()),
        awaited=array("i", chain.from_iterable(awaited or [])),
    )


def test_tokens_equal_the_references(checkpoint: Checkpoint) -> None:
    """Prompts in pieces beside decodes, greedy and drawn, batches of several sizes."""
    prompts = make_prompts(4, 30)
    ways: dict[str, Any] = {"frequency_penalty": 1.0, "logit_bias": ((7, 9.0),), "min_p": 0.1}
    settings: list[Sampling] = [
        Sampling(3, temperature=0, ignore_eos=True),
        Sampling(4, temperature=0.9, seed=7, top_p=0.8, ignore_eos=True),
        Sampling(2, temperature=1.1, seed=2**63 + 5, top_k=9, ignore_eos=True),
        Sampling(3, seed=4, ignore_eos=True, logprobs=2, prompt_logprobs=1, **ways),
    ]
    requests = [Request(str(row), prompts[row], settings[row]) for row in range(4)]
    tokens, best = [], []
    for kernels in ("reference", "triton"):
        engine = make_engine(
            checkpoint(), kernels=kernels, max_running=3, max_batched_tokens=16, num_blocks=40
        )
        assert engine.info.kernels == kernels
        run = drive(engine, requests)
        tokens.append(run.tokens)
        told = [output for step in run.steps for output in step.outputs]
        logprobs = [(o.prompt_logprobs or []) + (o.logprobs or []) for o in told]
        best.append([one.top_ids for of_output in logprobs for one in of_output])
    assert tokens[0] == tokens[1]
    assert best[0] == best[1]
    assert len(best[0]) == len(prompts[3]) - 1 + 3


FAMILIES = "phi3", "olmo2", "gemma2", "gemma3", "mixtral", "qwen3-moe", "qwen2-moe"


@pytest.mark.parametrize(
    ("variant", "kv_format"),
    [*((family, "auto") for family in FAMILIES), *(("gemma3", few) for few in KV_FORMATS[1:])],
)
def test_families_compute_as_on_the_reference(
    checkpoint: Checkpoint, variant: str, kv_format: str
) -> None:
    """A prompt in two pieces, over their windows, and what is decoded behind it; keys and values
    of few bits in KV groups, too."""
    folder = checkpoint(variant)
    prompt = [5, 9, 200, 31, 8, 17, 40] * 6
    steps = [
        plan([(prompt[:25], 0, [4, 2])], []),
        plan([(prompt[25:], 25, [4, 2, 7])], [0]),
        plan([([77], 42, [4, 2, 7])], [0]),
    ]
    found = []
    for kernels in ("reference", "triton"):
        ran = runner(folder, kernels, num_blocks=40, kv_format=kv_format)
        groups = len(ran.info.kv_groups)
        grouped = [in_groups(step, groups) for step in steps]
        content = [ran.collect(ran.launch(step)).results for step in grouped][1:]
        used = [block + 8 * group for group in range(groups) for block in (4, 2, 7)]
        blocks = np.frombuffer(ran.cache.read(used), np.uint8)
        found.append((content, blocks))
    assert found[0][0] == found[1][0]
    if kv_format == "auto":
        exact, wide = (blocks.view(np.float32) for _, blocks in found)
        np.testing.assert_allclose(wide, exact, rtol=1e-3, atol=1e-4)
    else:  # but for the last bits of scales, and of sums
        assert np.mean(found[0][1] == found[1][1]) > 0.9


def in_groups(step: StepPlan, count: int) -> StepPlan:
    """With a table for each KV group, of other blocks each."""
    tables = array("i", [block + 8 * group for group in range(count) for block in step.tables])
    return replace(step, tables=tables, groups=count)


def held(step: StepPlan, rows: list[int], edited: bool) -> StepPlan:
    """With rows that a grammar constrains; `edited`: and others, that are edited or tell logprobs,
    among them one that is constrained."""
    samplings, edits = step.samplings.copy(), NO_EDITS
    if edited:
        edits = np.array([(7, 1.5, 2.0), (9, 1, -np.inf), (7, 2.0, 4.0)], EDIT)
        samplings["num_edits"][:2], samplings["first_edit"][1] = (2, 1), 2
        samplings["logprobs"] = [0, 3, 1][: len(samplings)]
    words = array("i", samplings.tobytes())
    return replace(step, sampling_words=words, edits=edits, constrained=array("i", rows))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_constrained_rows_sample_as_on_the_reference(
    checkpoint: Checkpoint, temperature: float
) -> None:
    """Beside others, in replayed steps and in those that are not, with edits and logprobs; what
    was sampled is what the next step goes on after; what nothing is allowed of fails alone."""
    drawn = {"temperature": temperature, "seed": 5}
    blocks = [4, 2, 7]
    prompts = plan([([5, 9, 200], 0, [4]), ([8, 17], 0, [2]), ([31, 40], 0, [7])], [])
    decodes = plan(
        [([6], n, [b]) for n, b in zip((3, 2, 2), blocks, strict=True)], [0, 1, 2], **drawn
    )
    after = [([0], n + 1, [b]) for n, b in zip((3, 2, 2), blocks, strict=True)]
    waits = [(0, 0), (1, 1), (2, 2)]
    words = np.zeros((2, -(-VOCAB // 32)), np.int32)
    words[0, [0, 3, 8]] = 0b10010, -1, 1  # the last token is the last word's only one
    nothing = words * [[1], [0]]
    words[1, 5] = 0x0F0F0F0F
    steps = [
        (held(decodes, [0, 2], edited=False), words),
        (held(plan(after, [0, 1, 2], waits, **drawn), [1, 2], edited=True), words[::-1].copy()),
        (
            held(plan([([6], 3, [4]), ([5, 6], 0, [9])], [0, 1], **drawn), [1], edited=False),
            words[:1],
        ),
        (held(decodes, [0, 2], edited=True), nothing.astype(np.int32)),
    ]
    told = []
    for kernels in ("reference", "triton"):
        ran = runner(checkpoint(), kernels)
        ran.collect(ran.launch(prompts))
        tickets = []
        for step, allowed in steps:
            tickets.append(ran.launch(step))
            ran.sample(tickets[-1], allowed)
        told.append([result for ticket in tickets for result in ran.collect(ticket).results])
    for one, other in zip(*told, strict=True):
        assert (one.tokens, one.error) == (other.tokens, other.error)
        assert [of.top_ids for of in one.logprobs] == [of.top_ids for of in other.logprobs]
    allowed = [[(words[0, t // 32] >> t % 32) & 1 for t in result.tokens] for result in told[1]]
    assert allowed[0] == [1]
    assert [result.error is None for result in told[1]] == [True] * 10 + [False]
    assert told[1][-1].error.param == "constraint"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_take_what_those_before_sampled(checkpoint: Checkpoint, temperature: float) -> None:
    """Four steps are in the queue before the first is collected."""
    one, other, third = [5, 9, 200, 31, 8], [77, 3, 12], [90, 91, 92, 93, 94, 95]
    drawn = {"temperature": temperature, "seed": 3}
    plans = [
        plan([(one, 0, [4]), (other, 0, [2])], [0, 1], **drawn),
        plan([([0], 5, [4]), ([0], 3, [2])], [1], [(0, 0), (1, 1)], **drawn),
        plan([([0], 4, [2])], [0], [(0, 0)], **drawn),
        plan([([0], 5, [2]), (third, 0, [7])], [0, 1], [(0, 0)], **drawn),
    ]
    found = []
    for kernels in ("reference", "triton"):
        ran = runner(checkpoint(), kernels)
        tickets = [ran.launch(each) for each in plans]
        collected = [ran.collect(ticket) for ticket in tickets]
        found.append([[result.tokens for result in step.results] for step in collected])
        assert all(step.seconds > 0 for step in collected)
    assert found[0] == found[1]
    assert [[len(tokens) for tokens in step] for step in found[1]] == [
        [1, 1],
        [0, 1],
        [1],
        [1, 1],
    ]


def test_steps_that_have_all_compiled_are_such_as_it_runs(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU's engine runs them before it is ready; they leave nothing behind."""
    monkeypatch.setattr(warm_up, "_grow", lambda *_: 1)
    ran = runner(checkpoint(), "triton", max_batched_tokens=3, max_running=2, max_adapters=0)
    assert isinstance(ran, TritonRunner)
    ran.info = replace(ran.info, device="cuda", max_model_len=2)
    tokens: list[int] = []
    launch = ran.launch

    def watched(step: StepPlan) -> Any:
        tokens.append(len(step.token_ids))
        return launch(step)

    monkeypatch.setattr(ran, "launch", watched)
    warm_up.warm_up(ran, CostModel(), 2, 3)
    assert tokens[:6] == [1, 2, 3] * 2
    assert not any(ran.cache.read(list(range(12))))


def test_a_prompts_piece_samples_nothing(checkpoint: Checkpoint) -> None:
    ran = runner(checkpoint(), "triton")
    (result,) = ran.collect(ran.launch(plan([([5, 6, 7], 0, [1])], []))).results
    assert result.tokens == []
    assert result.error is None


def test_what_fills_a_batch_up_writes_to_no_block(checkpoint: Checkpoint) -> None:
    ran = runner(checkpoint(), "triton")
    assert isinstance(ran, TritonRunner)
    size = ran.info.kv_bytes_per_block
    marks = b"\xab" * size
    others = [block for block in range(ran.info.num_blocks) if block not in (1, 3, 5)]
    ran.cache.write(others, marks * len(others))
    decodes = plan([([9], 4, [1]), ([8], 2, [5]), ([7], 20, [3, 3])], [0, 1, 2])
    assert ran._graphs[False].size(3) == 4
    ran.collect(ran.launch(decodes))
    assert ran.cache.read(others) == marks * len(others)
    assert ran.cache.read([ran.info.num_blocks]) != bytes(size), "nothing was filled up"


def test_decodes_are_filled_up() -> None:
    of = Capacity(tokens=8, sequences=4, blocks=3, block_size=4, rows=8, scratch=6, queries=16)
    inputs = StepInputs(of, torch.device("cpu"))
    crowded = plan([([1], 9, [1, 2, 3])] * 4, [0, 1, 2, 3], temperature=1, seed=9)
    crowded.adapters.extend([5] * 4)
    inputs.load_decodes(crowded, np.zeros(0, np.int32), 4)
    before = np.array([2, 0], np.int32)
    alone = plan([([1], 4, [5, 2]), ([0], 1, [4])], [1], [(1, 0)], temperature=0.5, seed=2)
    assert inputs.decodes(4, adapted=False).adapters is None
    alone.adapters.extend([3, -1])
    inputs.load_decodes(alone, before, 4)
    step = inputs.decodes(4, adapted=True)
    assert step.adapters is not None
    assert step.adapters.tolist() == [3, -1, -1, -1]
    (batch,) = step.batches
    assert step.token_ids.tolist() == [1, -3, 0, 0]
    assert batch.positions.tolist() == [4, 1, 0, 0]
    assert batch.lengths.tolist() == [5, 2, 0, 0]
    assert batch.slots.tolist() == [2 * 4, 4 * 4 + 1, 6 * 4, 6 * 4]
    assert batch.block_tables[:2, :2].tolist() == [[5, 2], [4, 0]]
    rows = step.samplings.numpy().reshape(-1).view(SAMPLING)
    assert rows["temperature"].tolist() == [0, 0.5, 0, 0]
    assert rows["position"].tolist() == [0, 2, 0, 0]
    assert [part.data_ptr() % 8 for part in (step.samplings, batch.lengths)] == [0, 0]


def test_in_each_group_they_lie_elsewhere_and_are_filled_up_with_the_scratch_block() -> None:
    of = Capacity(
        tokens=8, sequences=4, blocks=3, block_size=4, rows=8, scratch=20, queries=16, groups=2
    )
    inputs = StepInputs(of, torch.device("cpu"))
    step = in_groups(plan([([1], 4, [5, 2]), ([3], 1, [4])], [0, 1]), 2)
    inputs.load_decodes(step, np.zeros(0, np.int32), 4)
    own, other = inputs.decodes(4, adapted=False).batches
    assert own.slots.tolist() == [2 * 4, 4 * 4 + 1, 20 * 4, 20 * 4]
    assert other.slots.tolist() == [10 * 4, 12 * 4 + 1, 20 * 4, 20 * 4]
    assert own.block_tables[:2, :2].tolist() == [[5, 2], [4, 0]]
    assert other.block_tables[:2, :2].tolist() == [[13, 10], [12, 8]]


def test_batch_sizes() -> None:
    for most in (1, 2, 3, 8, 33, 64, 250, 256, 300, 1000):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        pairs = zip([0, *sizes], sizes, strict=False)
        assert all(size - smaller <= max(8, size / 4) for smaller, size in pairs)
        assert len(sizes) <= 64
    called: list[int] = []
    graphs = DecodeGraphs(20, called.append, torch.device("cpu"))
    assert [graphs.size(rows) for rows in (1, 3, 4, 9, 17, 20)] == [1, 4, 4, 16, 20, 20]
    graphs.run(16)
    assert called == [16]


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_blocks_are_read_and_written(checkpoint: Checkpoint, kv_format: str) -> None:
    """With their scales, where there are some: a sequence goes on from blocks that came over."""
    prompt = [5, 9, 200, 31, 8, 17, 40]
    first, second = (runner(checkpoint(), "triton", kv_format=kv_format) for _ in range(2))
    stored = "float32" if kv_format == "auto" else kv_format
    assert first.info.kv_format == f"{stored} rows"
    shape = first.info.kv_shape_per_block
    each = {"auto": 4, "int4": 0.5 + 4 / shape[-1]}.get(kv_format, 1 + 4 / shape[-1])
    assert first.info.kv_bytes_per_block == math.prod(shape) * each
    first.collect(first.launch(plan([(prompt, 0, [3])], [0])))
    content = first.cache.read([3])
    assert len(content) == first.info.kv_bytes_per_block
    second.cache.write([8], content)
    assert second.cache.read([8]) == content
    results = []
    for ran, block in ((first, 3), (second, 8)):
        results.append(ran.collect(ran.launch(plan([([44], 7, [block])], [0]))).results)
    assert results[0] == results[1]


@pytest.mark.parametrize(("kv_format", "steps_of_the_largest"), [("fp8", 16), ("int8", 254)])
def test_keys_and_values_of_eight_bits_are_nearly_the_same(
    checkpoint: Checkpoint, kv_format: str, steps_of_the_largest: int
) -> None:
    """Read with its scales, the cache holds what was computed, to half a step."""
    steps = plan([([5, 9, 200, 31, 8, 17, 40], 0, [3])], [0])
    exact, narrow = (runner(checkpoint(), "triton", kv_format=name) for name in ("auto", kv_format))
    for ran in (exact, narrow):
        ran.collect(ran.launch(steps))
    assert isinstance(exact, TritonRunner)
    assert isinstance(narrow, TritonRunner)
    wanted, layer = exact.cache.layer(0), narrow.cache.layer(0)
    assert layer.scales is not None
    found = layer.values[3].float() * layer.scales[3][..., None]
    wanted_block = wanted.values[3]
    largest = wanted_block.abs().amax(-1, keepdim=True)
    assert ((found - wanted_block).abs() <= largest * 1.001 / steps_of_the_largest).all()
    assert found.abs().max() > 0


def test_a_row_looks_back_on_keys_and_values_of_four_bits(checkpoint: Checkpoint) -> None:
    """As the reference does, whose cache takes the same bytes."""
    prompt = [5, 9, 200, 31, 8, 17, 40]
    of_both = []
    for kernels in ("triton", "reference"):
        ran = runner(checkpoint(), kernels, kv_format="int4")
        ran.collect(ran.launch(plan([(prompt, 0, [3])], [0])))
        steps = plan([([44], 7, [3])], [0])
        of_both.append((ran.collect(ran.launch(steps)).results, bytes(ran.cache.read([3]))))
    (results, content), (wanted, expected) = of_both
    assert results == wanted
    same = np.frombuffer(content, np.uint8) == np.frombuffer(expected, np.uint8)
    assert same.mean() > 0.95  # but for the last bits of scales, and of sums


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": "triton"}, "device 'cpu': the kernels 'triton' need an NVIDIA GPU"),
        ({"kernels": "auto", "device": "cuda"}, "'cuda': the kernels 'triton' need an NVIDIA GPU"),
        ({"kernels": "avx2", "device": "cuda"}, "kernels 'avx2' are a CPU's, device is 'cuda'"),
    ],
)
def test_what_cannot_be_is_refused(
    checkpoint: Checkpoint,
    settings: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_runner, "INTERPRETED", False)
    with pytest.raises(ValueError, match=message):
        runner(checkpoint(), **({"kernels": "auto"} | settings))


def test_eight_bits_are_refused_on_a_gpu_without_them(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_runner, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"kv_format 'fp8' needs .* 8.9 or more, 'cuda:0' has 8.6"):
        runner(checkpoint(), "triton", device="cuda:0", kv_format="fp8")
