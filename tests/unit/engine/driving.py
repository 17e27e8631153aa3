"""Runs requests through an engine to their end."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import Tensor

from services.worker.engine import EngineConfig, Request, RequestOutput, Sampling, StepOutput
from services.worker.engine.engine import Engine
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.runners.runner import Ticket
from tests.unit.engine.checkpoints import VOCAB

SMALL: dict[str, Any] = {
    "num_blocks": 256,
    "max_batched_tokens": 64,
    "max_running": 16,
    "target_itl_ms": 1e6,  # what a step computes does not depend on how busy the machine is
    "threads": 1,
}


_made: list[Engine] = []


def make_engine(folder: Path, **settings: Any) -> Engine:
    """One that is closed when the test ends, or its module where a fixture of that made it."""
    _made.append(Engine(EngineConfig(model=str(folder), **(SMALL | settings))))
    return _made[-1]


def closing_engines() -> Iterator[None]:
    """A fixture: closes those that were made since it began."""
    before = len(_made)
    yield
    while len(_made) > before:
        _made.pop().close()


def make_prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def greedy(max_tokens: int, **fields: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True, **fields)


@dataclass
class Run:
    """All that an engine told while it was driven."""

    steps: list[StepOutput] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, RequestOutput] = field(default_factory=dict)
    """The output with the finish reason."""

    def add(self, step: StepOutput) -> None:
        self.steps.append(step)
        for output in step.outputs:
            assert output.request_id not in self.last, "output after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason:
                self.last[output.request_id] = output

    @property
    def num_preempted(self) -> int:
        return sum(len(step.preempted) for step in self.steps)


def drive(engine: Engine, requests: Iterable[Request], max_steps: int = 20_000) -> Run:
    """Adds all requests and steps until nothing is left; no block may be left held."""
    for request in requests:
        engine.add(request)
    run = Run()
    while engine.has_work:
        run.add(engine.step())
        assert len(run.steps) < max_steps, "the engine does not come to an end"
    engine.check()
    assert engine.pool.num_free == engine.pool.num_blocks
    return run


def generate(engine: Engine, prompts: Sequence[list[int]], sampling: Sampling) -> list[list[int]]:
    """The output tokens of each prompt, all run together."""
    run = drive(engine, [Request(str(i), p, sampling) for i, p in enumerate(prompts)])
    return [run.tokens[str(i)] for i in range(len(prompts))]


def assert_moves(request: Request, tokens: list[int], prefill: Engine, decode: Engine) -> None:
    """It answers the same `tokens`, more than nine, where its prompt is computed by another engine
    and handed over, and where it goes on elsewhere after nine."""
    name = request.request_id
    decode.add(replace(request, remote_prefill=True))
    while not decode.step().kv_reserved:  # its grammar may not be there yet
        pass
    for step in drive(prefill, [replace(request, prefill_only=True, export_kv="inline")]).steps:
        for blocks in step.kv_exports:
            decode.write_kv(blocks)
    decode.start_decode(name, tokens[0])
    assert drive(decode, []).tokens[name] == tokens[1:]
    rest = replace(
        request,
        prompt_token_ids=request.prompt_token_ids + tokens[:9],
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - 9),
        generated_prefix=9,
    )
    assert drive(prefill, [rest]).tokens[name] == tokens[9:]


FailsAt = Literal["launch", "collect"]


def fail_when(
    bad: Callable[[StepPlan], bool], engine: Engine, at: FailsAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Has the steps fail that are `bad`: at once, or when they are to have been computed."""
    runner = engine._runner
    real_launch, real_collect = runner.launch, runner.collect

    def launch(plan: StepPlan) -> Ticket:
        if at == "launch" and bad(plan):
            raise RuntimeError("device trouble")
        return plan, real_launch(plan)

    def collect(ticket: Ticket) -> Collected:
        plan, real = ticket
        collected = real_collect(real)
        if at == "collect" and bad(plan):
            raise RuntimeError("device trouble")
        return collected

    monkeypatch.setattr(runner, "launch", launch)
    monkeypatch.setattr(runner, "collect", collect)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Logits, but for what rows lose where they meet int8 or int4: they are int16 there (decision
    0065)."""
    assert found.shape == expected.shape
    assert (found - expected).norm() < 1e-3 * expected.norm()
