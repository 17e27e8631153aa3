"""What an engine does before anybody asks it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.library import supported
from kernels.cpu.matrix import NARROW, Held
from kernels.kv_layer import KvLayer
from kernels.sampling import Top
from kernels.triton import deltas, linear, rotary
from kernels.triton.matrix import NarrowMatrix
from services.worker.engine import Request, warm_up
from services.worker.engine.config import SCORED_ROWS
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.scheduling.cost_model import CostModel, StepShape
from tests.support.compiled import compiled
from tests.unit.engine.driving import drive, greedy, make_engine
from tests.unit.engine.synthetic import Machine, additive

Checkpoint = Callable[..., Path]


class Timed:
    """A runner that takes as long as it is told, on the clock that the warm-up looks at."""

    def __init__(self, runner: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.info, self.cache, self._machine = runner.info, runner.cache, machine
        self.now = 0.0
        self.first_s = 0.0
        self.ran: list[tuple[int, int]] = []
        """Decodes, and tokens of a prompt."""
        self.longest = 0
        """Context of a decode."""
        monkeypatch.setattr(warm_up, "perf_counter", lambda: self.now)

    def launch(self, plan: StepPlan) -> float:
        tokens = len(plan.token_ids) - plan.num_decodes
        context = sum(plan.lengths[: plan.num_decodes])
        shape = StepShape(tokens, tokens**2 // 2, plan.num_decodes, context)
        took = self._machine(shape) + (0 if self.ran else self.first_s)
        self.now += took
        self.ran.append((plan.num_decodes, tokens))
        self.longest = max(self.longest, plan.lengths[0] if plan.num_decodes else 0)
        return took

    def collect(self, ticket: float) -> Collected:
        return Collected([], ticket)

    def warm_up(self, max_running: int = 16, max_batched_tokens: int = 128) -> CostModel:
        cost = CostModel()
        warm_up.warm_up(self, cost, max_running, max_batched_tokens)
        return cost


@pytest.mark.parametrize("kernels", ["reference", *supported()])
def test_it_leaves_nothing_behind(checkpoint: Checkpoint, kernels: str) -> None:
    """No KV, no hash, no step and no rate: only what is known of its speed."""
    engine = make_engine(checkpoint(), num_blocks=20, kernels=kernels)
    assert not any(engine._runner.cache.read(list(range(20))))
    assert engine.snapshot() == []
    assert engine.pool.take_events() == []
    assert engine.pool.num_free == 20
    assert not engine.has_work
    load = engine.load()
    assert (load.prefill_tokens_per_s, load.decode_step_ms, load.prompt_share) == (0, 0, 1)
    assert engine._cost.step_s(StepShape(64, 64 * 32)) > 0
    assert engine._cost.step_s(StepShape(0, 0, 16, 16)) > 0
    step = drive(engine, [Request("a", [3] * 40, greedy(1))]).steps[0]
    assert (step.step, step.prefill_tokens, step.load.prefill_tokens_per_s > 0) == (1, 40, True)


def test_it_runs_one_decode_a_full_batch_and_prompts_up_to_a_whole_step(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(make_engine(checkpoint())._runner, additive, monkeypatch)
    cost = timed.warm_up()
    decodes = [(1, 0), (1, 0), (8, 0), (16, 0), (16, 0)]
    assert timed.ran == [*decodes, (0, 16), (0, 16), (0, 32), (0, 64), (0, 128)]
    for shape in (
        StepShape(0, 0, 1, 1),
        StepShape(0, 0, 16, 16),
        StepShape(0, 0, 16, 16 * timed.longest),
        StepShape(128, 128**2 // 2),
    ):
        assert cost.step_s(shape) == pytest.approx(additive(shape), rel=0.1)


def test_on_a_slow_machine_it_stops_at_a_step_that_takes_long(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(make_engine(checkpoint())._runner, lambda s: 100 * additive(s), monkeypatch)
    timed.warm_up()
    prompts = [tokens for decodes, tokens in timed.ran if not decodes]
    assert set(prompts) == {16}
    assert timed.now < 10


def test_it_ends_soon_though_a_full_batch_would_take_seconds(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(
        make_engine(checkpoint())._runner,
        lambda shape: 0.04 + 0.05 * (shape.decodes + shape.prompt_tokens),
        monkeypatch,
    )
    timed.warm_up(max_running=64)
    assert max(decodes for decodes, _ in timed.ran) == 8
    assert timed.now < 6


def test_what_took_long_the_first_time_is_run_again(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was compiled, or brought into memory: the time says nothing of the next."""
    timed = Timed(make_engine(checkpoint())._runner, additive, monkeypatch)
    timed.first_s = 0.9
    cost = timed.warm_up()
    assert timed.ran.count((1, 0)) == 2
    assert (0, 128) in timed.ran
    assert cost.step_s(StepShape(0, 0, 1, 1)) < 2 * additive(StepShape(0, 0, 1, 1))


def test_it_asks_for_no_more_than_there_is(checkpoint: Checkpoint) -> None:
    """Of tokens in a step, of the model's context, of blocks."""
    engine = make_engine(checkpoint(), num_blocks=2, max_running=5, max_batched_tokens=5)
    assert engine._cost.step_s(StepShape(5, 15)) > 0
    make_engine(checkpoint(), max_model_len=17, max_batched_tokens=512)


def test_an_engine_whose_model_fails_does_not_come_up(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(make_engine(checkpoint())._runner, additive, monkeypatch)

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(timed, "launch", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        timed.warm_up()


MOST, RUNNING, GUESSES = 1024, 64, 128
LLAMA_8B = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)


def on_a_gpu(timed: Timed, adapters: int = 0) -> Timed:
    """A runner whose kernels are compiled as they first run."""
    device = {"kernels": "triton", "device": "cuda"}
    timed.info = replace(timed.info, **device, max_adapters=adapters, max_model_len=700)
    return timed


class Watched(Timed):
    """Of each step tokens, rows of logits, and those of them that are taken as float32."""

    def launch(self, plan: StepPlan) -> float:
        wide = len(plan.rows) if Top.of(plan.samplings).width else 0
        self.steps.append((len(plan.token_ids), len(plan.rows), wide))
        self.places.append({*plan.adapters})
        assert len(plan.lengths) <= RUNNING
        assert max(plan.lengths) <= self.info.max_model_len
        return super().launch(plan)

    steps: list[tuple[int, int, int]]
    places: list[set[int]]

    def warm_up(self, *_: int) -> CostModel:
        self.steps, self.places, cost = [], [], CostModel()
        warm_up.warm_up(self, cost, RUNNING, MOST, GUESSES if self.info.generates else 0)
        return cost


def kernels_of(run: Callable[[int], object], counts: Iterable[int]) -> set[Any]:
    with compiled() as found:
        for count in counts:
            run(count)
    return found


def test_on_a_gpu_nothing_is_left_to_compile_whatever_number_of_rows_a_step_has(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each step takes seconds at first: of all layers and of the head, in a process that
    sees what Triton's compiler would."""
    timed = on_a_gpu(Watched(make_engine(checkpoint())._runner, additive, monkeypatch), adapters=1)
    timed.first_s = 30
    timed.warm_up()
    tokens, rows, wide = map(set, zip(*timed.steps, strict=True))
    most_rows = RUNNING + SCORED_ROWS + GUESSES
    assert (max(tokens), max(rows)) == (MOST, most_rows)
    assert wide - {0} == {*linear.heights(most_rows)} - {1}  # nothing is behind one token

    def ran(n: int, k: int, held: Held) -> Callable[[int], object]:
        matrix = NarrowMatrix.empty(held, n, k, torch.bfloat16, "meta")
        return lambda count: linear.linear(room(count, k), matrix)

    for held in NARROW:
        every = range(1, MOST + 1) if held in ("int8", "int4") else range(3, MOST + 1, 31)
        for shape in LLAMA_8B:
            run = ran(*shape, held)
            assert kernels_of(run, every) <= kernels_of(run, tokens), (held, shape)
    run = ran(128256, 4096, "int8")
    assert kernels_of(run, range(1, most_rows + 1)) <= kernels_of(run, rows)

    cache = KvLayer(room(9, 2, 2, 16, 64))
    angles = (room(1000, 32), room(1000, 32))

    def rotary_of_the_second_group(count: int) -> None:
        ints = room(3, count).int()
        rotary.rotary_store(room(count, 384), angles, ints[0], ints[1], cache)

    adapted = {
        n for n, of in zip((n for n, *_ in timed.steps), timed.places, strict=True) if 0 in of
    }
    table = room(2, deltas.PARTS, deltas.FIELDS).long()
    of_it = deltas.Deltas(table, (256,), 64, at_once=8)

    def adapters(count: int) -> None:
        own = deltas.Rows(room(count).int(), room(count).long())
        deltas.add_deltas(room(count, 256), room(count, 128), own, of_it)

    assert kernels_of(adapters, range(1, 600)) <= kernels_of(adapters, adapted)
    assert len(kernels_of(rotary_of_the_second_group, range(1, 40))) == 1


def room(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_kernels_of_adapters_run_where_they_are_compiled_as_they_first_do(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_engine(checkpoint())._runner
    for device, most in (("cpu", 16), ("cuda", 0), ("cuda", 1)):
        timed = on_a_gpu(Watched(runner, additive, monkeypatch), most)
        timed.info = replace(timed.info, device=device)
        timed.warm_up()
        assert ({0} in timed.places) == (device == "cuda" and most > 0)
        assert any(wide for *_, wide in timed.steps) == (device == "cuda")


def test_models_that_pool_are_compiled_without_logits(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = on_a_gpu(Watched(make_engine(checkpoint())._runner, additive, monkeypatch))
    timed.info = replace(timed.info, num_logits=0, generates=False)
    timed.warm_up()
    assert {*linear.heights(MOST)} <= {tokens for tokens, *_ in timed.steps}
    assert {rows for _, rows, _ in timed.steps} == {0}
