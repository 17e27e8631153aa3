"""A scheduler alone, whose steps always succeed."""

from typing import Any

from services.worker.engine import Request, Sampling
from services.worker.engine.kv.block_pool import BlockPool
from services.worker.engine.scheduling.chunks import Step
from services.worker.engine.scheduling.cost_model import CostModel
from services.worker.engine.scheduling.scheduler import Scheduler
from services.worker.engine.sequence import Sequence

BLOCK = 4


class Bench:
    """A scheduler whose steps always succeed; every request decodes the token 9 for ever."""

    def __init__(
        self,
        num_blocks: int,
        budget: int = 64,
        max_running: int = 8,
        cost: CostModel | None = None,
        target_itl_s: float | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = Scheduler(
            self.pool, cost or CostModel(), budget, max_running, target_itl_s=target_itl_s
        )
        self.arrivals = 0

    def add(
        self, name: str, prompt: list[int], priority: int = 0, max_tokens: int = 1000, **how: Any
    ) -> Sequence:
        self.arrivals += 1
        request = Request(name, prompt, Sampling(max_tokens), priority=priority, **how)
        sequence = Sequence(request, self.arrivals, BLOCK, frozenset({0}), 1000, queued_ns=0)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule()
        for chunk in step.chunks:
            self.scheduler.complete(chunk, [9] if chunk.samples else [])
        self.scheduler.check()
        return step

    def preempted(self) -> list[str]:
        """Steps until somebody is; who it was."""
        for _ in range(100):
            if victims := self.step().preempted:
                return [victim.id for victim in victims]
        raise AssertionError("nobody is preempted")


def tokens(count: int, first: int) -> list[int]:
    """A prompt that shares no block with one of another `first`."""
    return [first, *range(20, 19 + count)]
