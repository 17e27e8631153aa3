"""Both loops of the engine, on a model of memory, under random arrivals, cancels, preemptions,
splits and failures, with one token a step or several, guessed or not: whoever ends, ends with the
tokens that he would have alone."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Literal
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.worker.engine import (
    EngineConfig,
    FinishReason,
    KvBlocks,
    ModelInfo,
    Pooling,
    Request,
    Sampling,
    StepOutput,
)
from services.worker.engine import engine as engine_module
from services.worker.engine.engine import Engine
from services.worker.engine.executor import Local
from services.worker.engine.kv import transfer as kv_transfer
from services.worker.engine.kv.groups import KvGroup, most_tokens
from services.worker.engine.plan import StepPlan
from services.worker.engine.sequence import Sequence
from tests.unit.engine.arrivals import Arrival, arrivals
from tests.unit.engine.guessing import Oracle
from tests.unit.engine.memory_runner import (
    EOS,
    VOCAB,
    Content,
    MemoryRunner,
    answer,
    next_token,
    numbers,
)
from tests.unit.engine.memory_tier import ANSWERS, Answer, MemoryTier

Loop = Literal["plain", "overlapped", "guessing"]
BAD = 9
"""A token at which the model fails."""
POOLINGS = {"last": Pooling("last"), "mean": Pooling("mean")}
ARRIVALS = st.tuples(arrivals, st.sampled_from(["", "", "", *POOLINGS])).map(
    lambda both: replace(both[0], kind=both[1] or both[0].kind)
)
WINDOWS = st.sampled_from([(0,), (0,), (3,), (6,), (0, 2), (0, 5), (0, 4, 4), (7, 3)])
"""Of a model's KV groups; each group takes blocks for itself."""
MOST_BAD = 2  # requests: of three steps in a row that fail wholly, the engine ends


class World:
    def __init__(self, engine: Engine, runner: MemoryRunner) -> None:
        self.engine = engine
        self.runner = runner
        self.now = 0
        self.arrivals: dict[str, Arrival] = {}
        self.answers_at: dict[str, int] = {}
        """Remote ones, by the step at which the other side of the split answers."""
        self.tokens: dict[str, list[int]] = {}
        self.exported: dict[str, list[KvBlocks]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.pooled: dict[str, bytes | None] = {}

    def add(self, arrival: Arrival) -> None:
        name, arrival = str(len(self.arrivals)), replace(arrival)
        arrival.prompt = arrival.prompt[: self.engine.info.max_model_len - 1]
        if sum(other.fails for other in self.arrivals.values()) == MOST_BAD:
            arrival.fails = False
        if arrival.fails and arrival.kind != "remote":
            arrival.prompt[-1] = BAD
        self.arrivals[name] = arrival
        self.tokens[name], self.exported[name] = [], []
        self.engine.add(
            Request(
                name,
                arrival.prompt,
                Sampling(arrival.max_tokens),
                salt=arrival.salt,
                priority=arrival.priority,
                prefill_only=arrival.kind == "prefill",
                export_kv="inline" if arrival.kind == "prefill" else None,
                remote_prefill=arrival.kind == "remote",
                pooling=POOLINGS.get(arrival.kind),
            )
        )

    def command(self) -> None:
        for name, arrival in self.arrivals.items():
            if name in self.ended:
                continue
            if arrival.cancel_at is not None and self.now >= arrival.at_step + arrival.cancel_at:
                self.engine.cancel(name)
            elif self.answers_at.get(name, self.now + 1) <= self.now:
                del self.answers_at[name]
                self._answer(name, arrival.prompt)
            self.check()

    def _answer(self, name: str, prompt: list[int]) -> None:
        """A prompt that another engine computed."""
        blocks = self._handed(prompt)
        data = b"".join(
            self.runner.encode(content)
            for groups in blocks
            for block in groups
            for content in block
        )
        self.engine.write_kv(KvBlocks(name, 0, len(blocks), data))
        first = next_token(tuple(prompt))
        self.tokens[name].append(first)
        self.engine.start_decode(name, first)

    def _handed(self, prompt: list[int]) -> list[list[list[Content]]]:
        """Of each block of a prompt, and of each KV group of which it is handed over: contents."""
        info, whole = self.engine.info, tuple(prompt)
        size, count = info.block_size, len(whole)
        return [
            [
                [whole[: at + 1] if at < count else () for at in range(first, first + size)]
                for group in info.kv_groups
                if first // size >= group.first_seen(count, size)
            ]
            for first in range(0, count, size)
        ]

    def step(self) -> None:
        output = self.engine.step()
        for reserved in output.kv_reserved:
            delay = self.arrivals[reserved.request_id].remote_delay
            self.answers_at[reserved.request_id] = self.now + delay
        for export in output.kv_exports:
            self.exported[export.request_id].append(export)
        self._take(output)
        self.check()
        self.now += 1

    def _take(self, output: StepOutput) -> None:
        for one in output.outputs:
            assert one.request_id not in self.ended, "output after the end"
            self.tokens[one.request_id] += one.new_token_ids
            if one.finish_reason:
                self.ended[one.request_id] = one.finish_reason
                self.pooled[one.request_id] = one.pooled

    def check(self) -> None:
        """What a step that runs uses is nobody's to take."""
        self.engine.check()
        pool = self.engine.pool
        assert all(pool.ref_count(block) for block in self.runner.used())

    def check_answers(self) -> None:
        for name, arrival in self.arrivals.items():
            whole = answer(arrival.prompt, arrival.max_tokens, self.engine.info.max_model_len)
            got, reason = self.tokens[name], self.ended[name]
            if arrival.kind in POOLINGS and reason is FinishReason.STOP:
                assert not got
                told = np.frombuffer(self.pooled[name] or b"", "<f4").tolist()
                assert told == pytest.approx(numbers(arrival.prompt, arrival.kind), abs=1e-5)
                continue
            assert self.pooled[name] is None
            assert got == whole[: len(got)]
            match reason:
                case FinishReason.ERROR:
                    assert BAD in arrival.prompt
                case FinishReason.CANCELLED:
                    assert arrival.cancel_at is not None
                case FinishReason.PREFILL_DONE:
                    assert got
                    self._check_exports(name, arrival.prompt)
                case FinishReason.STOP:
                    assert got == whole
                    assert got[-1] == EOS
                case FinishReason.LENGTH:
                    assert got == whole

    def _check_exports(self, name: str, prompt: list[int]) -> None:
        exports = {export.first_block: export for export in self.exported[name]}
        for index, groups in enumerate(self._handed(prompt)):
            wanted = [content for block in groups for content in block]
            got = self.runner.decode(exports.pop(index).data) if groups else []
            told = zip(got, wanted, strict=True)
            assert all(one == other for one, other in told if other)
        assert not exports


@contextmanager
def engine_on_memory(
    loop: Loop,
    num_blocks: int,
    block_size: int,
    budget: int,
    max_running: int,
    windows: tuple[int, ...],
    late: Iterator[bool],
    fails: Iterator[bool],
    more: Iterator[int],
    tier: MemoryTier | None = None,
) -> Iterator[World]:
    """`windows`: of its KV groups. `more`: how many tokens a row samples beside its first, or what
    an oracle's guesses are drawn from. `tier`: below the device."""

    def right(sequence: Sequence, count: int) -> list[int]:
        tokens = tuple(sequence.tokens)
        for _ in range(count):
            tokens = (*tokens, next_token(tokens))
        return list(tokens[len(sequence.tokens) :])

    def trouble(plan: StepPlan, contents: list[Content]) -> bool:
        # By itself a step fails only if it can be taken apart to find whose fault it was.
        by_itself = next(fails, False) and len(plan.lengths) > 1
        return by_itself or any(BAD in content for content in contents)

    groups = tuple(KvGroup((layer,), window) for layer, window in enumerate(windows))
    at_once = max(budget, max_running) * (1 + (loop == "overlapped"))
    context = most_tokens(groups, num_blocks, block_size, at_once, num_blocks * block_size)
    assume(context > 1)
    info = ModelInfo(
        architecture="memory",
        vocab_size=VOCAB,
        max_model_len=context,
        eos_token_ids=(EOS,),
        dtype="float32",
        device="cpu",
        kernels="none",
        threads=1,
        weights="none",
        huge_bytes=0,
        workspace_bytes=0,
        num_parameters=1,
        parameter_bytes=1,
        num_blocks=num_blocks,
        block_size=block_size,
        kv_bytes_per_block=8 * block_size,
        kv_shape_per_block=(1, 1, 1, block_size, 2),
        kv_format="none",
        kv_groups=groups,
    )
    guesses = loop == "guessing"
    runner = MemoryRunner(
        info, lambda: next(late, True), trouble, (lambda: 0) if guesses else lambda: next(more, 0)
    )
    oracle = Oracle(right, 9, lambda below: next(more, 0) % below)
    with (
        mock.patch.object(engine_module, "NgramProposer", return_value=oracle),
        mock.patch.object(engine_module, "make_executor", return_value=Local(runner)),
        mock.patch.object(engine_module, "warm_up"),
        mock.patch.object(engine_module, "make_tier", return_value=tier),
        mock.patch.object(kv_transfer, "PIECE_BYTES", 1),
    ):
        config = EngineConfig(
            model="/",
            overlap=loop == "overlapped",
            speculation="ngram" if guesses else "off",
            max_batched_tokens=max(budget, max_running),
            max_running=max_running,
        )
        with closing(Engine(config)) as engine:
            yield World(engine, runner)


@pytest.mark.parametrize("loop", ["plain", "overlapped", "guessing"])
@settings(max_examples=200, deadline=None)
@given(
    plan=st.lists(ARRIVALS, min_size=1, max_size=10),
    num_blocks=st.integers(3, 24),
    windows=WINDOWS,
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 16),
    max_running=st.integers(1, 5),
    late=st.lists(st.booleans(), max_size=40),
    fails=st.lists(st.sampled_from([False] * 7 + [True]), max_size=40),
    more=st.lists(st.sampled_from([0, 0, 1, 2, 5]), max_size=40),
    disk=st.none() | st.lists(st.sampled_from(ANSWERS), max_size=60),
)
def test_everybody_gets_what_he_would_get_alone(
    loop: Loop,
    plan: list[Arrival],
    num_blocks: int,
    block_size: int,
    budget: int,
    max_running: int,
    windows: tuple[int, ...],
    late: list[bool],
    fails: list[bool],
    more: list[int],
    disk: list[Answer] | None,
) -> None:
    pending = sorted(plan, key=lambda arrival: arrival.at_step)
    limit = 31 + sum(len(a.prompt) + a.max_tokens * 21 + a.remote_delay + 10 for a in plan) * 2
    with engine_on_memory(
        loop,
        num_blocks,
        block_size,
        budget,
        max_running,
        windows,
        iter(late),
        iter(fails),
        iter(more),
        None if disk is None else MemoryTier(iter(disk)),
    ) as world:
        engine = world.engine
        while pending or engine.scheduler.sequences or engine.has_work:
            while pending and pending[0].at_step <= world.now:
                world.add(pending.pop(0))
            world.command()
            world.step()
            assert world.now < limit, "somebody starves"
        assert len(world.ended) == len(plan)
        world.check_answers()
        assert not world.runner.queue
        assert engine.pool.num_free == num_blocks
        # What is left in the cache under a prefix is that prefix.
        for arrival in plan:
            prompt = [token for token in arrival.prompt if token != BAD] or [1]
            world.add(Arrival(world.now, prompt, 3, salt=arrival.salt))
            while engine.has_work:
                world.step()
        assert len(world.ended) == 2 * len(plan)
        world.check_answers()
