"""Runs what was planned: a model, its KV cache and the sampler, on one device. What is asked of all
runners; making.py chooses one."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.adapters import Adapter
from services.worker.engine.grammar.library import Words
from services.worker.engine.kv.cache import KvCache
from services.worker.engine.outputs import ModelInfo
from services.worker.engine.plan import Collected, StepPlan

Ticket = Any
"""What a runner's `launch` gives for its `collect`."""


class RunnerLost(Exception):
    """Nothing will be computed any more: a process that computes is gone, or hangs."""

    def __init__(self, message: str, killed: bool = False) -> None:
        """`killed`: see EngineDied."""
        super().__init__(message)
        self.killed = killed


class Runner(Protocol):
    """Holds the model and the cache, and decides nothing. Steps run in the order of their launch;
    it remembers what the last one sampled until the next is launched."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def cache(self) -> KvCache: ...

    @property
    def logit_cap(self) -> float:
        """See `ModelConfig.logit_cap`."""

    def launch(self, plan: StepPlan) -> Ticket:
        """Has a step computed behind those launched before. Where the device has threads of its
        own, this returns before it is. Running a step again writes the same places of the cache
        with the same values."""

    def sample(self, ticket: Ticket, allowed: Words) -> None:
        """Has the step launched last, whose plan has M constrained rows, go on and sample.
        allowed: [M, ceil(vocab / 32)], see kernels/cpu/native/allowed.h."""

    def head_rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """[len(ids), hidden]: of the matrix that makes logits of a state, as it was read."""

    def adapt(self, place: int, adapter: Adapter | None) -> None:
        """Takes an adapter into one of `info.max_adapters` places, which no step reads that runs;
        None: takes out what is there. Tokens of a plan say which place is theirs."""

    def collect(self, ticket: Ticket) -> Collected:
        """Waits for the step. Each ticket is collected once, in the order of launches; how late
        does not change the step's seconds. Of one that was to go on and sample, and did not, what
        comes means nothing. Raises what went wrong with the step."""
