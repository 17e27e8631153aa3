"""What becomes of single requests: limits, ends, cancels, errors, and what is told about them."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine import FinishReason, Request, Sampling, Usage
from services.worker.engine.clock import now_ns
from services.worker.engine.plan import Result, StepPlan
from services.worker.engine.runners.runner import Ticket
from services.worker.engine.scheduling import prompt_room, scheduler
from services.worker.engine.scheduling.cost_model import StepShape
from services.worker.engine.steps import MAX_FAILED_STEPS, EngineBroken
from tests.unit.engine.driving import (
    FailsAt,
    drive,
    fail_when,
    generate,
    greedy,
    make_engine,
    make_prompts,
)

Checkpoint = Callable[..., Path]
PROMPT = list(range(3, 43))


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids", "invalid_request"),
        ({"prompt_token_ids": [3, 257]}, "prompt_token_ids", "invalid_request"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids", "invalid_request"),
        ({"prompt_token_ids": [3] * 256}, "prompt_token_ids", "context_length_exceeded"),
        ({"sampling": Sampling(0)}, "max_tokens", "invalid_request"),
        ({"sampling": Sampling(1, temperature=-0.1)}, "temperature", "invalid_request"),
        ({"sampling": Sampling(1, temperature=float("nan"))}, "temperature", "invalid_request"),
        ({"sampling": Sampling(1, top_k=-1)}, "top_k", "invalid_request"),
        ({"sampling": Sampling(1, top_k=2**31)}, "top_k", "invalid_request"),
        ({"sampling": Sampling(1, top_p=0.0)}, "top_p", "invalid_request"),
        ({"sampling": Sampling(1, top_p=1.1)}, "top_p", "invalid_request"),
        ({"sampling": Sampling(1, seed=2**64)}, "seed", "invalid_request"),
        ({"sampling": Sampling(-1)}, "max_tokens", "invalid_request"),
        ({"sampling": Sampling(1, temperature=float("inf"))}, "temperature", "invalid_request"),
        ({"sampling": Sampling(1, top_p=float("nan"))}, "top_p", "invalid_request"),
        ({"sampling": Sampling(1, seed=-1)}, "seed", "invalid_request"),
        ({"generated_prefix": 40}, "generated_prefix", "invalid_request"),
        ({"generated_prefix": -1}, "generated_prefix", "invalid_request"),
        (
            {"prefill_only": True, "export_kv": "inline", "export_from_block": -1},
            "export_from_block",
            "invalid_request",
        ),
        ({"prefill_only": True, "remote_prefill": True}, "remote_prefill", "invalid_request"),
        ({"export_kv": "inline"}, "export_kv", "invalid_request"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    checkpoint: Checkpoint, change: dict[str, Any], param: str, code: str
) -> None:
    engine = make_engine(checkpoint())
    bad = replace(Request("bad", PROMPT, greedy(4)), **change)
    run = drive(engine, [bad, Request("good", PROMPT, greedy(4))])
    error = run.last["bad"].error
    assert error
    assert (error.param, error.code) == (param, code)
    assert run.last["bad"].finish_reason is FinishReason.ERROR
    assert len(run.tokens["good"]) == 4


def test_an_id_in_use_is_refused_at_once(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint())
    engine.add(Request("a", PROMPT, greedy(4)))
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add(Request("a", PROMPT, greedy(4)))
    drive(engine, [])
    drive(engine, [Request("a", PROMPT, greedy(4))])


@pytest.mark.usefixtures("both_loops")
def test_stops_at_end_of_text_and_stop_tokens(checkpoint: Checkpoint) -> None:
    free = generate(make_engine(checkpoint()), [PROMPT], greedy(32))[0]
    stop = free[10]
    cut = free[: free.index(stop) + 1]
    engine = make_engine(checkpoint())
    run = drive(engine, [Request("a", PROMPT, greedy(32, stop_token_ids=(stop,)))])
    assert run.tokens["a"] == cut
    assert run.last["a"].finish_reason is FinishReason.STOP

    engine._eos_token_ids = frozenset({2, stop})
    sampling = Sampling(32, temperature=0)
    run = drive(engine, [Request("a", PROMPT, sampling), Request("b", PROMPT, greedy(32))])
    assert run.tokens["a"] == cut
    assert run.tokens["b"] == free


@pytest.mark.usefixtures("both_loops")
def test_ends_where_the_context_ends(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(), max_model_len=50)
    run = drive(engine, [Request("a", PROMPT, greedy(1000))])
    assert len(run.tokens["a"]) == 10
    assert run.last["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.usefixtures("both_loops")
def test_context_shrinks_to_what_the_cache_holds(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(), num_blocks=4)
    assert engine.info.max_model_len == 64
    run = drive(engine, [Request(str(i), PROMPT, greedy(1000)) for i in range(3)])
    assert [len(run.tokens[str(i)]) for i in range(3)] == [24] * 3


def test_cancel_frees_at_once_and_is_reported(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint())
    engine.add(Request("a", PROMPT, greedy(100)))
    for _ in range(5):
        engine.step()
    engine.cancel("a")
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.check()
    step = engine.step()
    (output,) = step.outputs
    assert output.finish_reason is FinishReason.CANCELLED
    assert output.usage == Usage(prompt_tokens=40, cached_tokens=0, completion_tokens=5)
    assert not engine.has_work


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continuation_goes_on_as_the_undisturbed_run(
    checkpoint: Checkpoint, temperature: float
) -> None:
    sampling = Sampling(30, temperature=temperature, seed=11, ignore_eos=True)
    whole = drive(make_engine(checkpoint()), [Request("a", PROMPT, sampling)])
    so_far = whole.tokens["a"][:13]
    rest = Request("a", PROMPT + so_far, replace(sampling, max_tokens=17), generated_prefix=13)
    run = drive(make_engine(checkpoint()), [rest])
    assert so_far + run.tokens["a"] == whole.tokens["a"]
    assert run.last["a"].usage == whole.last["a"].usage == Usage(40, 0, 30)


@pytest.mark.usefixtures("both_loops")
def test_salts_keep_tenants_apart(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint())
    cached = [
        drive(engine, [Request("r", PROMPT, greedy(2), salt=salt)]).last["r"].num_cached_tokens
        for salt in (b"a", b"b", b"a")
    ]
    assert cached == [0, 0, 32]


@pytest.mark.usefixtures("both_loops")
def test_events_mirror_the_cache(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(), num_blocks=20)
    requests = [Request(str(i), p, greedy(20)) for i, p in enumerate(make_prompts(24))]
    run = drive(engine, requests)
    mirror: set[bytes] = set()
    for step in run.steps:
        for event in step.kv_events:
            (mirror.update if event.stored else mirror.difference_update)(event.hashes)
    assert mirror == set(engine.snapshot())
    assert any(not event.stored for step in run.steps for event in step.kv_events)


def test_step_figures(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(), max_batched_tokens=16)
    run = drive(engine, [Request("a", PROMPT, greedy(4)), Request("b", PROMPT[::-1], greedy(4))])
    assert [step.step for step in run.steps] == list(range(1, len(run.steps) + 1))
    assert sum(step.prefill_tokens for step in run.steps) == 80
    assert sum(step.decode_tokens for step in run.steps) == 6
    assert all(step.prefill_tokens + step.decode_tokens <= 16 for step in run.steps)
    assert [s.load.queued_prefill_tokens for s in run.steps[:3]] == [64, 48, 32]
    timelines = {o.request_id: o.timeline for s in run.steps for o in s.outputs if o.timeline}
    assert sum(chunk.tokens for chunk in timelines["b"].chunks) == 40
    for timeline in timelines.values():
        assert timeline.queued_ns <= timeline.scheduled_ns <= timeline.chunks[0].start_ns
        assert all(chunk.start_ns < chunk.end_ns for chunk in timeline.chunks)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(timeline.chunks))
    last = run.steps[-1]
    assert last.load.prefill_tokens_per_s > 0
    assert last.load.decode_step_ms > 0
    assert (last.pending, last.load.waiting, last.load.running) == (0, 0, 0)


@pytest.mark.usefixtures("both_loops")
def test_lower_priority_waits_and_is_preempted_first(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(), num_blocks=9, max_running=3)
    prompts = make_prompts(3, longest=30, seed=2)
    requests = [
        Request(str(i), p, greedy(60), priority=i) for i, p in reversed(list(enumerate(prompts)))
    ]
    run = drive(engine, requests)
    ends = [o.request_id for s in run.steps for o in s.outputs if o.finish_reason]
    assert ends == ["0", "1", "2"]
    assert "0" not in {name for step in run.steps for name in step.preempted}
    assert run.num_preempted > 0


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("at", ["launch", "collect"])
def test_one_failing_request_leaves_the_others_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, at: FailsAt
) -> None:
    prompts = make_prompts(6)
    expected = generate(make_engine(checkpoint()), prompts, greedy(12))
    engine = make_engine(checkpoint())
    fail_when(lambda plan: max(plan.lengths) > 100, engine, at, monkeypatch)
    prompts[3] = list(range(3, 104))
    run = drive(engine, [Request(str(i), p, greedy(12)) for i, p in enumerate(prompts)])
    assert run.last["3"].error
    assert run.last["3"].error.code == "internal"
    assert [run.tokens[str(i)] for i in (0, 1, 2, 4, 5)] == [expected[i] for i in (0, 1, 2, 4, 5)]


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("at", ["launch", "collect"])
def test_an_engine_that_fails_every_request_ends(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, at: FailsAt
) -> None:
    engine = make_engine(checkpoint())

    def fail_steps(count: int) -> None:
        with monkeypatch.context() as device:
            fail_when(lambda plan: True, engine, at, device)
            for number in range(count):
                engine.add(Request(f"a{number}", PROMPT, greedy(4)))
                engine.add(Request(f"b{number}", PROMPT, greedy(4)))
                assert {output.error is None for output in engine.step().outputs} == {False}

    for _ in range(2):  # what works in between shows that it was not the device
        fail_steps(MAX_FAILED_STEPS - 1)
        drive(engine, [Request("works", PROMPT, greedy(4))])
    with pytest.raises(EngineBroken):
        fail_steps(MAX_FAILED_STEPS)


def test_an_engine_that_fails_every_request_ends_though_some_are_cancelled_meanwhile(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are not run again singly, and so do not fail, either."""
    engine = make_engine(checkpoint(), overlap=True)
    prompts = iter(make_prompts(2 * MAX_FAILED_STEPS))

    def collect(ticket: Ticket) -> list[Result]:
        raise RuntimeError("device trouble")

    def fail_steps() -> None:
        for number in range(MAX_FAILED_STEPS):
            engine.add(Request(f"fails {number}", next(prompts), greedy(4)))
            engine.add(Request(f"cancelled {number}", next(prompts), greedy(4)))
            engine._running = engine._launch()
            engine.cancel(f"cancelled {number}")
            engine.step()

    monkeypatch.setattr(engine._runner, "collect", collect)
    with pytest.raises(EngineBroken):
        fail_steps()


def test_a_step_that_failed_and_was_run_singly_teaches_nothing(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint())
    for number, tokens in enumerate(make_prompts(3)):
        engine.add(Request(str(number), tokens, greedy(20)))
    while engine.scheduler.num_running < 3 or engine.scheduler.queued_prefill_tokens:
        engine.step()
    learned: list[StepShape] = []
    monkeypatch.setattr(engine._cost, "learn", lambda shape, seconds: learned.append(shape))
    with monkeypatch.context() as device:
        fail_when(lambda plan: plan.num_decodes > 1, engine, "collect", device)
        assert all(output.new_token_ids for output in engine.step().outputs)
    assert learned == []
    engine.step()
    assert [shape.decodes for shape in learned] == [3]


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("at", ["launch", "collect"])
def test_an_engine_that_answers_some_goes_on(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, at: FailsAt
) -> None:
    """Requests that fail beside one that works are at fault themselves, however many they are."""
    # Else a step may be of decodes alone, to see what they cost, on a machine that is busy.
    monkeypatch.setattr(prompt_room, "_DOUBT", math.inf)
    engine = make_engine(checkpoint())
    fail_when(lambda plan: 199 in plan.token_ids, engine, at, monkeypatch)
    engine.add(Request("works", PROMPT, greedy(2 * MAX_FAILED_STEPS)))
    for number in range(MAX_FAILED_STEPS + 1):
        engine.add(Request(f"bad{number}", [199, 198], greedy(4)))
        told = {output.request_id: output for output in engine.step().outputs}
        assert told[f"bad{number}"].error
        assert told["works"].new_token_ids


@pytest.mark.usefixtures("both_loops")
def test_nan_ends_its_request_alone_and_is_not_cached(checkpoint: Checkpoint) -> None:
    """A sequence whose KV turned bad neither poisons its batch nor whoever gets its blocks."""
    prompts = make_prompts(4, seed=8)
    expected = generate(make_engine(checkpoint()), prompts, greedy(12))
    engine = make_engine(checkpoint(), num_blocks=24)
    poisoned = Request("bad", PROMPT, greedy(50))
    engine.add(poisoned)
    engine.step()
    bad = engine.scheduler.sequences["bad"]
    size = engine.info.kv_bytes_per_block
    engine._runner.cache.write(bad.blocks, b"\xff" * size * len(bad.blocks))  # NaN in any format
    run = drive(engine, [Request(str(i), p, greedy(12)) for i, p in enumerate(prompts)])
    assert run.last["bad"].error
    assert [run.tokens[str(i)] for i in range(4)] == expected
    again = drive(engine, [poisoned])
    assert again.last["bad"].num_cached_tokens == 0
    assert again.last["bad"].error is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 257}, "exceeds the model's context 256"),
        ({"max_model_len": 100, "num_blocks": 3}, "exceeds the 48 tokens that 3 KV blocks"),
        ({"num_blocks": None, "kv_cache_bytes": 100}, "less than one block"),
        ({"max_batched_tokens": 3}, "max_batched_tokens"),
        ({"block_size": 0}, "block_size"),
        ({"model": "/nowhere"}, "'/nowhere' is not a directory"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    checkpoint: Checkpoint, settings: dict[str, Any], words: str
) -> None:
    folder = Path(settings.pop("model", checkpoint()))
    with pytest.raises(ValueError, match=words):
        make_engine(folder, **settings)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": [0, 256]},
        {"prompt_token_ids": [3] * 255},
        {"sampling": Sampling(1)},
        {"sampling": Sampling(1, temperature=0.0, top_k=0, top_p=1.0, seed=2**64 - 1)},
        {"sampling": Sampling(1, top_p=1e-9, top_k=10_000)},
        {"sampling": Sampling(2**31), "prompt_token_ids": [3] * 250},
        {"generated_prefix": 39},
    ],
)
def test_what_is_just_within_its_limits_is_served(
    checkpoint: Checkpoint, change: dict[str, Any]
) -> None:
    request = replace(Request("a", PROMPT, greedy(1)), **change)
    run = drive(make_engine(checkpoint()), [request])
    assert run.last["a"].error is None
    assert run.tokens["a"]


def test_usage_counts_no_more_as_cached_than_the_prompt(checkpoint: Checkpoint) -> None:
    """What is gone on with is found in the cache too, but is no prompt."""
    engine = make_engine(checkpoint())
    whole = drive(engine, [Request("a", PROMPT, greedy(40))])
    rest = Request("b", PROMPT + whole.tokens["a"][:39], greedy(1), generated_prefix=39)
    last = drive(engine, [rest]).last["b"]
    assert last.num_cached_tokens == 64
    assert last.usage == Usage(prompt_tokens=40, cached_tokens=40, completion_tokens=40)


def test_a_preempted_request_was_scheduled_when_it_first_was(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(), num_blocks=9, max_running=3, max_batched_tokens=16)
    run = drive(engine, [Request(str(i), PROMPT[i:], greedy(30)) for i in range(3)])
    assert run.num_preempted
    for name in "012":
        (timeline,) = [
            o.timeline for s in run.steps for o in s.outputs if o.timeline and o.request_id == name
        ]
        first = next(s for s in run.steps if s.started_ns >= timeline.scheduled_ns)
        assert first.started_ns == timeline.scheduled_ns
        assert sum(chunk.tokens for chunk in timeline.chunks) == 40 - int(name)


@pytest.mark.usefixtures("both_loops")
def test_a_long_step_is_told_before_it_begins(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint())
    told: list[str] = []
    engine.on_long_step = lambda expected_s: told.append(f"expected {expected_s:.1f}")
    compute = engine._runner.launch

    def run(plan: StepPlan) -> Ticket:
        told.append("runs")
        return compute(plan)

    monkeypatch.setattr(engine._runner, "launch", run)
    for expected_s in (1.0, 0.9):
        monkeypatch.setattr(engine._cost, "step_s", lambda *_, s=expected_s: s)
        drive(engine, [Request("a", PROMPT, greedy(1))])
    assert told == ["expected 1.0", "runs", "runs"]


def test_a_long_step_is_judged_by_what_it_computes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint())
    asked: list[StepShape] = []
    monkeypatch.setattr(engine._cost, "step_s", lambda shape: asked.append(shape) or 0.0)
    monkeypatch.setattr(engine._meter, "add", lambda *_: None)
    monkeypatch.setattr(scheduler, "time_for_prompts", lambda *_: (math.inf, 1.0))
    engine.add(Request("a", PROMPT, greedy(3)))
    engine.step()
    drive(engine, [Request("b", PROMPT[20:], greedy(2))])
    assert asked == [
        StepShape(40, 40 * 41 // 2),
        StepShape(20, 20 * 21 // 2, 1, 41),
        StepShape(0, 0, 2, 42 + 21),
    ]


def test_load_tells_who_waits_and_who_holds_a_place(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(), max_running=2, num_blocks=20)
    engine.add(Request("remote", PROMPT, greedy(4), remote_prefill=True))
    engine.add(Request("runs", PROMPT[::-1], greedy(4)))
    engine.add(Request("waits", PROMPT, greedy(4)))
    step = engine.step()
    load = step.load
    assert (load.waiting, load.running, load.max_running, step.pending) == (1, 2, 2, 2)
    assert (load.free_blocks, load.total_blocks, load.block_size) == (14, 20, 16)
    assert load.queued_prefill_tokens == 40
    assert load.prefill_tokens_per_s > 0
    assert load.decode_step_ms == 0
    engine.cancel("remote")
    drive(engine, [])


def test_a_step_that_only_reports_counts_as_one(checkpoint: Checkpoint) -> None:
    """A refusal waits for no other request."""
    engine = make_engine(checkpoint())
    assert not engine.has_work
    engine.add(Request("bad", [], greedy(1)))
    assert engine.has_work
    step = engine.step()
    assert (step.step, step.prefill_tokens, step.decode_tokens, step.pending) == (1, 0, 0, 0)
    (output,) = step.outputs
    assert output.error
    assert output.usage is None
    assert not engine.has_work


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 0},
        {"max_model_len": 0},
        {"threads": 0},
        {"kv_cache_bytes": 0},
        {"max_batched_tokens": 0},
        {"max_running": 0},
    ],
)
def test_a_setting_of_nothing_is_refused_by_name(
    checkpoint: Checkpoint, settings: dict[str, Any]
) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        make_engine(checkpoint(), **settings)


@pytest.mark.usefixtures("both_loops")
def test_settings_at_their_limits_work(checkpoint: Checkpoint) -> None:
    engine = make_engine(
        checkpoint(), max_model_len=48, num_blocks=3, max_batched_tokens=2, max_running=2
    )
    assert engine.info.max_model_len == 48
    assert len(drive(engine, [Request("a", PROMPT, greedy(100))]).tokens["a"]) == 8
    assert make_engine(checkpoint(), max_model_len=256).info.max_model_len == 256


def test_the_cache_holds_what_fits_its_bytes(checkpoint: Checkpoint) -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        block = 2 * 2 * 16 * 2 * 16 * size  # layers, sides, tokens, heads, dim
        info = make_engine(
            checkpoint(), dtype=dtype, num_blocks=None, kv_cache_bytes=6 * block - 1
        ).info
        assert (info.num_blocks, info.kv_bytes_per_block) == (5, block)
        assert info.kv_shape_per_block == (2, 2, 2, 16, 16)
        assert info.max_model_len == 80
        assert size <= info.parameter_bytes / info.num_parameters < size + 0.5
        assert info.eos_token_ids == (2,)


def test_a_step_lies_as_the_kernels_are_promised(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes first; each token's slot in its own block; tables padded with blocks that exist."""
    engine = make_engine(checkpoint(), num_blocks=20)
    seen: list[StepPlan] = []
    compute = engine._runner.launch
    monkeypatch.setattr(engine._runner, "launch", lambda plan: seen.append(plan) or compute(plan))
    engine.add(Request("short", PROMPT[:5], greedy(3)))
    engine.step()
    engine.add(
        Request("long", PROMPT, Sampling(3, temperature=0.5, top_k=7, top_p=0.9, seed=2**64 - 1))
    )
    engine.step()
    sequences = [engine.scheduler.sequences[name] for name in ("short", "long")]
    plan = seen[-1]
    assert plan.num_decodes == 1
    assert plan.starts.tolist() == [0, 1, 41]
    assert plan.lengths.tolist() == [6, 40]
    assert plan.positions.tolist() == [5, *range(40)]
    assert plan.token_ids.tolist() == [sequences[0].tokens[5], *PROMPT]
    assert plan.sampled.tolist() == [0, 1]
    assert plan.rows.tolist() == [0, 40]
    of = plan.samplings[["temperature", "top_k", "top_p", "seed", "position"]]
    assert of.tolist() == [(0, 0, 1, 0, 6), (0.5, 7, 0.9, 2**64 - 1, 40)]
    assert plan.block_tables.shape == (1, 2, 3)
    assert plan.block_tables[0, 1].tolist() == list(sequences[1].blocks)
    assert plan.block_tables[0, 0, 0] == sequences[0].blocks[0]
    assert all(0 <= block < 20 for block in plan.block_tables.flatten().tolist())


@pytest.mark.parametrize("target_itl_ms", [0, -1.0, math.inf, math.nan])
def test_a_target_that_is_no_time_is_refused(checkpoint: Checkpoint, target_itl_ms: float) -> None:
    with pytest.raises(ValueError, match="target_itl_ms must be positive"):
        make_engine(checkpoint(), target_itl_ms=target_itl_ms)


def test_the_target_is_the_schedulers_in_seconds(checkpoint: Checkpoint) -> None:
    assert make_engine(checkpoint(), target_itl_ms=25.0).scheduler.target_itl_s == 0.025
    assert make_engine(checkpoint(), target_itl_ms=None).scheduler.target_itl_s is None


def test_a_step_that_failed_says_nothing_of_the_engines_speed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts were run one by one."""
    engine = make_engine(checkpoint())
    before = list(engine._cost._costs)
    fail_when(lambda plan: 5 in plan.token_ids, engine, "collect", monkeypatch)
    engine.add(Request("bad", [5] * 20, greedy(1)))
    engine.add(Request("good", [6] * 20, greedy(1)))
    engine.step()
    assert engine._cost._costs == before
    drive(engine, [Request("next", [6] * 20, greedy(1))])
    assert engine._cost._costs != before


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_a_prompt_that_goes_on_samples_nothing(checkpoint: Checkpoint, kernels: str) -> None:
    engine = make_engine(checkpoint(), max_batched_tokens=16, kernels=kernels)
    engine.add(Request("a", PROMPT, greedy(2)))
    assert [engine.step().outputs for _ in range(2)] == [[], []]
    (output,) = engine.step().outputs
    assert len(output.new_token_ids) == 1


def test_times_are_of_the_wall_clock() -> None:
    """To the hour, whoever sets it meanwhile: spans of several processes lie side by side."""
    assert abs(now_ns() - time.time_ns()) < 3600 * 10**9
