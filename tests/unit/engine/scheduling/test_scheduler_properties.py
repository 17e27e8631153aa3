"""Scheduler and pool together under random arrivals, cancels, preemptions, splits and failures.

`Memory` stands for the KV cache: for each slot it remembers which prefix of tokens, under which
salt, was computed there. A chunk may only be computed when all slots before it hold the sequence's
own prefix; so a block that is reused too early, shared wrongly or published half-written is caught.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import FinishReason, Request, Sampling
from services.worker.engine.kv.block_pool import BlockPool
from services.worker.engine.scheduling.chunks import Chunk, Step, shape_of
from services.worker.engine.scheduling.cost_model import CostModel
from services.worker.engine.scheduling.low_lane import PATIENT
from services.worker.engine.scheduling.prompt_room import time_for_prompts
from services.worker.engine.scheduling.scheduler import Scheduler
from services.worker.engine.sequence import Sequence, Status
from tests.unit.engine.arrivals import Arrival, arrivals
from tests.unit.engine.synthetic import decodes, prompt

EOS = 0


def next_token(tokens: list[int]) -> int:
    """A "model": depends on all tokens; ends a sequence now and then."""
    return hash(tuple(tokens)) % 11


def cost_of(prompt_token: float, decode: float) -> CostModel:
    """Of an engine whose tokens take so long."""
    cost = CostModel()
    for shape in [prompt(1), prompt(8), decodes(1, 8), decodes(5, 8)] * 10:
        cost.learn(shape, prompt_token * shape.prompt_tokens + decode * shape.decodes)
    return cost


costs = st.sampled_from([CostModel(), cost_of(0.01, 0.02), cost_of(1.0, 0.001)])
"""Nothing is known; a few tokens of a prompt fit beside a decode; not one does."""


class Memory:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}

    def write(self, sequence: Sequence, start: int, count: int) -> None:
        for position in range(start, start + count):
            self.slots[self._slot(sequence, position)] = self._content(sequence, position)

    def check(self, sequence: Sequence, length: int) -> None:
        for position in range(length):
            held = self.slots.get(self._slot(sequence, position))
            assert held == self._content(sequence, position), f"position {position} is overwritten"

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.blocks[position // self.block_size], position % self.block_size

    def _content(self, sequence: Sequence, position: int) -> tuple[bytes, tuple[int, ...]]:
        return sequence.request.salt, tuple(sequence.tokens[: position + 1])


class World:
    """Drives the scheduler as the engine does, without tensors, and checks each step."""

    def __init__(
        self, num_blocks: int, block_size: int, budget: int, max_running: int, cost: CostModel
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, cost, max(budget, max_running), max_running)
        self.memory = Memory(block_size)
        self.max_len = num_blocks * block_size
        self.now = 0
        self.arrivals: dict[str, Arrival] = {}
        self.first_scheduled: list[Sequence] = []
        self.ended: dict[str, FinishReason | str] = {}
        self.waiting_outside: dict[str, int] = {}
        """Request ids and the step at which the other side of the split answers."""

    def add(self, arrival: Arrival) -> None:
        name = str(len(self.arrivals))
        self.arrivals[name] = arrival
        request = Request(
            name,
            arrival.prompt[: self.max_len - 1],
            Sampling(arrival.max_tokens),
            salt=arrival.salt,
            priority=arrival.priority,
            prefill_only=arrival.kind == "prefill",
            remote_prefill=arrival.kind == "remote",
        )
        self.scheduler.add(
            Sequence(
                request,
                len(self.arrivals),
                self.pool.block_size,
                frozenset({EOS}),
                self.max_len,
                queued_ns=0,
            )
        )

    def step(self) -> None:
        step = self.scheduler.schedule()
        self._check_step(step)
        self._note_first([*step.reserved, *(chunk.sequence for chunk in step.chunks)])
        for sequence in step.reserved:
            delay = self.arrivals[sequence.id].remote_delay
            self.waiting_outside[sequence.id] = self.now + delay
        for chunk in step.chunks:
            self._run(chunk)
        self.scheduler.check()
        self.now += 1

    def cancel_and_answer(self) -> None:
        for name, arrival in self.arrivals.items():
            sequence = self.scheduler.sequences.get(name)
            if sequence is None:
                continue
            cancelled = arrival.cancel_at is not None
            if cancelled and self.now >= arrival.at_step + (arrival.cancel_at or 0):
                self._end(sequence, "cancelled")
            elif self.waiting_outside.get(name, self.now + 1) <= self.now:
                del self.waiting_outside[name]
                self._answer(sequence)
        self.scheduler.check()

    def _answer(self, sequence: Sequence) -> None:
        assert sequence.status is Status.AWAITING_KV
        cached = sequence.num_received * self.pool.block_size
        self.memory.check(sequence, min(cached, sequence.num_prompt))
        self.memory.write(sequence, cached, sequence.num_prompt - cached)
        if reason := self.scheduler.start_decode(sequence, next_token(sequence.tokens)):
            self._end(sequence, reason)

    def _run(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if self.arrivals[sequence.id].fails:
            self.scheduler.drop(chunk)
            self.scheduler.abort(sequence)
            self.ended[sequence.id] = "failed"
            return
        self.memory.check(sequence, chunk.start)
        self.memory.write(sequence, chunk.start, chunk.count)
        tokens = [next_token(sequence.tokens)] if chunk.samples else []
        reason = self.scheduler.complete(chunk, tokens)
        if reason is FinishReason.PREFILL_DONE:
            self.memory.check(sequence, sequence.num_prompt)
        if reason:
            self._end(sequence, reason)

    def _end(self, sequence: Sequence, why: FinishReason | str) -> None:
        self.scheduler.finish(sequence)
        self.waiting_outside.pop(sequence.id, None)
        self.ended[sequence.id] = why
        assert not sequence.blocks
        assert sequence.id not in self.scheduler.sequences

    def _note_first(self, scheduled: list[Sequence]) -> None:
        for sequence in sorted(scheduled, key=lambda sequence: sequence.order):
            if sequence not in self.first_scheduled:
                self.first_scheduled.append(sequence)

    def _check_step(self, step: Step) -> None:
        names = [chunk.sequence.id for chunk in step.chunks]
        assert len(set(names)) == len(names)
        assert sum(chunk.count for chunk in step.chunks) <= self.scheduler.max_batched_tokens
        assert self.scheduler.num_running <= self.scheduler.max_running
        singles = [chunk.count == 1 for chunk in step.chunks]
        assert singles == sorted(singles, reverse=True)
        for chunk in step.chunks:
            sequence = chunk.sequence
            assert sequence.status is Status.RUNNING
            assert chunk.count >= 1
            assert chunk.start == sequence.num_computed
            assert chunk.start + chunk.count <= len(sequence.tokens)
            assert len(sequence.blocks) * self.pool.block_size >= chunk.start + chunk.count
        for sequence in self.scheduler.sequences.values():
            if sequence.status is Status.RUNNING and sequence.id not in names:
                # Decode first: no running decode is left out of a step, but of the low lane,
                # which stands aside for the prompts of those who wait.
                # A prompt's last token is none.
                at_prompts_last = sequence.num_launched == sequence.num_prompt - 1
                assert (
                    at_prompts_last
                    or sequence.num_remaining > 1
                    or (
                        sequence.request.priority >= PATIENT
                        and any(chunk.sequence.request.priority < PATIENT for chunk in step.chunks)
                    )
                )
        self._check_time(step)
        for victim in step.preempted:
            assert victim.id not in names
            assert victim.status is Status.WAITING

    def _check_time(self, step: Step) -> None:
        """Beside decodes, prompts add no more to the step than they may, but for a token: who comes
        while some time is left gets one at least. Who was preempted and comes back with a token to
        decode counts as a prompt: he was not among the decodes that the time was for."""
        cost = self.scheduler.cost
        kept = [one for one in step.chunks if one.is_decode and one.sequence not in step.admitted]
        others = [one for one in step.chunks if one not in kept]
        present = min(len(self.scheduler.sequences), self.scheduler.max_running)
        tokens = sum(one.count for one in others)
        seconds, _ = time_for_prompts(cost, shape_of(kept), present, tokens, None)
        taken = [cost.chunk_s(one.start, one.count) for one in others]
        tokens_s = [s for one, s in zip(others, taken, strict=True) if one.count == 1]
        assert sum(taken) <= seconds * 1.001 + max(tokens_s, default=0.0)


@settings(max_examples=200, deadline=None)
@given(
    plan=st.lists(arrivals, min_size=1, max_size=12),
    num_blocks=st.integers(3, 12),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 16),
    max_running=st.integers(1, 5),
    cost=costs,
)
def test_every_request_ends_and_no_block_is_lost(
    plan: list[Arrival],
    num_blocks: int,
    block_size: int,
    budget: int,
    max_running: int,
    cost: CostModel,
) -> None:
    world = World(num_blocks, block_size, budget, max_running, cost)
    plan = sorted(plan, key=lambda arrival: arrival.at_step)
    limit = 31 + sum(len(a.prompt) + a.max_tokens * 21 + a.remote_delay + 10 for a in plan)
    pending = list(plan)
    while pending or world.scheduler.sequences:
        while pending and pending[0].at_step <= world.now:
            world.add(pending.pop(0))
        world.cancel_and_answer()
        world.step()
        assert world.now < limit, "somebody starves"
    assert len(world.ended) == len(plan)
    world.pool.check([])
    assert world.pool.num_free == num_blocks
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (0, 0)
    assert world.scheduler.schedule() == Step()


@settings(max_examples=100, deadline=None)
@given(
    plan=st.lists(arrivals, min_size=2, max_size=12),
    num_blocks=st.integers(3, 8),
    budget=st.integers(1, 8),
    cost=costs,
)
def test_those_that_came_together_are_first_scheduled_in_order(
    plan: list[Arrival], num_blocks: int, budget: int, cost: CostModel
) -> None:
    world = World(num_blocks, 4, budget, 3, cost)
    for arrival in plan:
        arrival.cancel_at, arrival.at_step = None, 0
        world.add(arrival)
    while world.scheduler.sequences:
        world.cancel_and_answer()
        world.step()
    orders = [sequence.order for sequence in world.first_scheduled]
    assert len(orders) == len(plan)
    assert orders == sorted(orders)
