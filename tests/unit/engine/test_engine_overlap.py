"""The overlapped loop: the next step is planned and launched while one runs. That it gives the same
as the plain one, the other tests show with both (`both_loops`)."""

import itertools
import socket
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import pytest

from kernels.cpu.library import supported
from services.worker.engine import EngineConfig, FinishReason, KvBlocks, Request, StepOutput
from services.worker.engine.layout import plan_step
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.process import loop as process
from services.worker.engine.process.loop import Channel, Closed
from services.worker.engine.runners.runner import Ticket
from services.worker.engine.scheduling.chunks import Chunk
from services.worker.engine.sequence import Sequence
from services.worker.engine.steps import MAX_FAILED_STEPS, EngineBroken
from tests.support.hangs import no_hanging
from tests.unit.engine.driving import drive, fail_when, generate, greedy, make_engine, make_prompts

Checkpoint = Callable[..., Path]
PROMPT = list(range(3, 43))


@pytest.mark.parametrize(
    ("overlap", "order"),
    [
        (False, ["launch", "collect"] * 4),
        (True, ["launch", *["launch", "collect"] * 3, "collect"]),
    ],
)
def test_the_next_step_is_launched_before_one_is_waited_for(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, overlap: bool, order: list[str]
) -> None:
    """And a step that could only compute what nobody needs is not: the length's end is known."""
    engine = make_engine(checkpoint(), overlap=overlap)
    runner, told = engine._runner, []
    launch, collect = runner.launch, runner.collect

    def note_launch(plan: StepPlan) -> Ticket:
        told.append("launch")
        return launch(plan)

    def note_collect(ticket: Ticket) -> Collected:
        told.append("collect")
        return collect(ticket)

    monkeypatch.setattr(runner, "launch", note_launch)
    monkeypatch.setattr(runner, "collect", note_collect)
    drive(engine, [Request("a", PROMPT, greedy(4))])
    assert told == order


def test_it_is_for_gpus_unless_asked_for(tmp_path: Path) -> None:
    for device, overlap, overlaps in (
        ("cpu", None, False),
        ("cuda:1", None, True),
        ("cpu", True, True),
        ("cuda", False, False),
    ):
        config = EngineConfig(model=str(tmp_path), device=device, overlap=overlap)
        assert config.overlaps is overlaps


def test_a_stop_token_costs_a_row_whose_keys_nobody_finds(checkpoint: Checkpoint) -> None:
    """Nor counts it. Of 40 tokens and 8 more, the row of the one behind the stop would complete a
    block."""
    free = generate(make_engine(checkpoint()), [PROMPT], greedy(30))[0]
    cut = next(i for i, token in enumerate(free) if i > 5 and token not in free[:i])
    stop = greedy(30, stop_token_ids=(free[cut],))
    snapshots = []
    for overlap in (False, True):
        engine = make_engine(checkpoint(), overlap=overlap)
        run = drive(engine, [Request("a", PROMPT, stop)])
        assert run.tokens["a"] == free[: cut + 1]
        assert run.last["a"].finish_reason is FinishReason.STOP
        assert sum(step.decode_tokens for step in run.steps) == cut
        snapshots.append(sorted(engine.snapshot()))
    assert snapshots[0] == snapshots[1]


@pytest.mark.parametrize("num_blocks", [256, 4])
def test_a_row_for_nothing_holds_nobody_up(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    """Who comes as another stops is computed at once, where there is room or there will be with
    that row's end: the engine does not wait for a command."""
    free = generate(make_engine(checkpoint()), [PROMPT], greedy(3))[0]
    engine = make_engine(checkpoint(), overlap=True, num_blocks=num_blocks)
    commands, its_commands = (Channel(end) for end in socket.socketpair())
    _transfers, its_transfers = (Channel(end) for end in socket.socketpair())
    step, ended = engine.step, []

    def then_the_next() -> StepOutput:
        output = step()
        for last in (one.request_id for one in output.outputs if one.finish_reason):
            ended.append(last)
            next_one = ("add", Request("b", PROMPT, greedy(2)))
            commands.send(next_one if last == "a" else ("shutdown",))
        return output

    monkeypatch.setattr(engine, "step", then_the_next)
    monkeypatch.setattr(process, "HEARTBEAT_S", 1e6)
    commands.send(("add", Request("a", PROMPT, greedy(9, stop_token_ids=(free[2],)))))
    with no_hanging(), pytest.raises(Closed):
        process.serve(its_commands, its_transfers, engine)
    assert ended == ["a", "b"]


def test_a_cancelled_ones_blocks_are_free_when_the_step_that_runs_has_ended(
    checkpoint: Checkpoint,
) -> None:
    engine = make_engine(checkpoint(), overlap=True)
    engine.add(Request("a", PROMPT, greedy(100)))
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    assert engine.pool.num_free == engine.pool.num_blocks - 3
    engine.check()
    assert engine.has_work
    (output,) = engine.step().outputs
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.CANCELLED, [])
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.has_work


def test_what_comes_from_elsewhere_is_not_written_into_what_a_step_uses(
    checkpoint: Checkpoint,
) -> None:
    """One is cancelled while it runs, and another wants all blocks for what it gets."""
    engine = make_engine(checkpoint(), overlap=True, num_blocks=8)
    engine.add(Request("a", PROMPT, greedy(80)))
    for _ in range(3):
        engine.step()
    used = set(engine.scheduler.sequences["a"].blocks)
    engine.cancel("a")
    engine.add(Request("remote", list(range(100, 220)), greedy(2), remote_prefill=True))
    assert engine.step().kv_reserved == []
    (reserved,) = engine.step().kv_reserved
    assert used <= set(engine.scheduler.sequences["remote"].blocks)
    size = engine.info.kv_bytes_per_block
    engine.write_kv(KvBlocks(reserved.request_id, 0, 8, bytes(8 * size)))
    assert not any(engine._runner.cache.read(list(range(8))))
    engine.cancel("remote")
    drive(engine, [])


@pytest.mark.usefixtures("both_loops")
def test_times_of_steps_do_not_overlap(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint(), max_batched_tokens=16)
    requests = [Request(str(i), p, greedy(10)) for i, p in enumerate(make_prompts(6))]
    run = drive(engine, requests)
    for step, after in pairwise(run.steps):
        assert step.duration_ns > 0
        assert step.started_ns + step.duration_ns <= after.started_ns
    for timeline in (o.timeline for s in run.steps for o in s.outputs if o.timeline):
        assert timeline.queued_ns <= timeline.scheduled_ns <= timeline.chunks[0].start_ns
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(timeline.chunks))
        assert all(chunk.start_ns < chunk.end_ns for chunk in timeline.chunks)


@pytest.mark.usefixtures("both_loops")
def test_a_long_step_is_told_after_the_output_of_the_one_before(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever hears of a step's end takes it that no long one is under way."""
    engine = make_engine(checkpoint(), max_batched_tokens=16)
    told: list[str] = []
    engine.on_long_step = lambda expected_s: told.append("long")
    monkeypatch.setattr(
        engine._cost, "step_s", lambda shape: 2.0 if shape.prompt_tokens == 8 else 0.1
    )
    engine.add(Request("a", PROMPT, greedy(2)))
    while engine.has_work:
        told.append(str(engine.step().step))
    assert told == ["1", "2", "long", "3", "4"]


def test_an_engine_whose_steps_all_fail_ends_with_one_launched_behind(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint(), overlap=True)
    for number in range(2):
        engine.add(Request(str(number), PROMPT, greedy(40)))
    engine.step()
    fail_when(lambda plan: True, engine, "collect", monkeypatch)

    def fail_steps() -> None:
        for number in range(MAX_FAILED_STEPS + 2):
            engine.add(Request(f"a{number}", PROMPT, greedy(40)))
            engine.step()

    with pytest.raises(EngineBroken):
        fail_steps()


@pytest.mark.usefixtures("both_loops")
def test_what_is_learned_is_how_long_the_device_took_however_late_its_end_was_seen(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may stand still when a step ends, or plan for long before the next one."""
    engine = make_engine(checkpoint())
    learned: list[float] = []
    monkeypatch.setattr(engine._cost, "learn", lambda shape, seconds: learned.append(seconds))
    hosts = itertools.count(10**9, 6 * 10**7)  # the host's clock, whenever it looks
    monkeypatch.setattr("services.worker.engine.engine.now_ns", lambda: next(hosts))
    real = engine._runner.collect
    monkeypatch.setattr(
        engine._runner, "collect", lambda ticket: replace(real(ticket), seconds=0.02)
    )
    steps = drive(engine, [Request("a", PROMPT, greedy(8))]).steps
    assert learned == [0.02] * 8
    assert all(step.duration_ns > 5e7 for step in steps), "which is told as it was"


@pytest.mark.parametrize("kernels", ["reference", *supported()])
def test_the_seconds_of_steps_in_a_queue_do_not_overlap(
    checkpoint: Checkpoint, kernels: str
) -> None:
    runner = make_engine(checkpoint(), kernels=kernels)._runner
    sequence = Sequence(Request("a", [5] * 60, greedy(1)), 0, 16, frozenset(), 100, 0)
    sequence.hold([3, 1, 2, 0])
    plan = plan_step([Chunk.of(sequence, 60)], {})
    before = perf_counter()
    tickets = [runner.launch(plan) for _ in range(20)]
    seconds = [runner.collect(ticket).seconds for ticket in tickets]
    assert 0 < sum(seconds) < perf_counter() - before
    assert min(seconds) > 0
