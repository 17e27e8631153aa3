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
from services.worker.engine.config import CPU_KERNELS
from services.worker.engine.engine import Engine
from services.worker.engine.executor import Local
from services.worker.engine.kv.cache import block_shape
from services.worker.engine.kv.groups import block_layers
from services.worker.engine.models.registry import read_config
from services.worker.engine.parallel.kv import RanksCache
from services.worker.engine.parallel.shard import Shard, check_cut
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.runners.making import runner_of
from services.worker.engine.runners.runner import Runner
from services.worker.engine.runners.torch_runner import Launched
from services.worker.engine.sizes import kv_bytes_per_block, stored_as
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
        own = self.ranks[0].info
        self.info = replace(
            own,
            kv_bytes_per_block=kv_bytes_per_block(config, model, own.dtype),
            kv_shape_per_block=block_shape(model, config.block_size, block_layers(own.kv_groups)),
        )
        self.cache = RanksCache(
            self,  # type: ignore[arg-type]
            self.shards,
            self.info.kv_shape_per_block,
            stored_as(config, own.dtype),
            in_panels=own.kernels in CPU_KERNELS,
        )
        self.logit_cap = model.logit_cap
        self.logits: list[list[Tensor]] = []
        """Of each step, of each rank, on PyTorch."""

    def ask_all(self, operation: str, blocks: list[int]) -> list[memoryview]:
        """As `Team`, of blocks."""
        return [rank.cache.read(blocks) for rank in self.ranks]

    def tell(self, rank: int, operation: str, blocks: list[int], data: Any) -> None:
        self.ranks[rank].cache.write(blocks, data.data)

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
