"""Ranks as threads of the test's process: the same parts, operations and collectives over gloo as
in processes of their own, without their start."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from services.worker.engine import EngineConfig
from services.worker.engine import engine as engine_module
from services.worker.engine.adapters import Adapter
from services.worker.engine.engine import Engine
from services.worker.engine.executor import Local
from services.worker.engine.models.registry import read_config
from services.worker.engine.parallel.shard import Shard, check_cut
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.runner import Runner, runner_of
from services.worker.engine.torch_runner import Launched
from tests.unit.engine.driving import make_engine


class ThreadRanks:
    """As `Runner`: all ranks compute each step, the first one's answer is given."""

    def __init__(self, config: EngineConfig) -> None:
        model, count = read_config(config.model), config.tensor_parallel
        check_cut(model, count)
        self._pool, store = ThreadPoolExecutor(count), dist.HashStore()
        alone = replace(config, tensor_parallel=1, threads=1)
        self.shards = [Shard(model, rank, count) for rank in range(count)]

        def join(shard: Shard) -> Runner:
            group = dist.ProcessGroupGloo(store, shard.rank, count, timedelta(seconds=60))
            return runner_of(alone, shard, group)

        self.ranks = list(self._pool.map(join, self.shards))
        self.info, self.cache = self.ranks[0].info, self.ranks[0].cache
        self.logit_cap = model.logit_cap
        self.logits: list[list[Tensor]] = []
        """Of each step, of each rank, on PyTorch."""

    def adapt(self, place: int, adapter: Adapter | None) -> None:
        for shard, rank in zip(self.shards, self.ranks, strict=True):
            rank.adapt(place, adapter and shard.adapter(adapter))

    def launch(self, plan: StepPlan) -> Any:
        tickets = list(self._pool.map(lambda rank: rank.launch(plan), self.ranks))
        if isinstance(tickets[0], Launched):
            self.logits.append([ticket.logits for ticket in tickets])
        return tickets

    def sample(self, ticket: Any, allowed: Any) -> None:
        for rank, own in zip(self.ranks, ticket, strict=True):
            rank.sample(own, allowed)

    def collect(self, ticket: Any) -> Collected:
        found = [rank.collect(own) for rank, own in zip(self.ranks, ticket, strict=True)]
        tokens = [[result.tokens for result in one.results] for one in found]
        assert all(one == tokens[0] for one in tokens)
        return found[0]


def engine_of_threads(
    folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Engine:
    """Not warmed up: that takes ranks that share a core seconds."""
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "warm_up", lambda *_: None)
        patch.setattr(engine_module, "make_executor", lambda config: Local(ThreadRanks(config)))
        return make_engine(folder, tensor_parallel=ranks, **settings)
