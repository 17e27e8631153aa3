"""A model cut over ranks, as the engine drives it: it is told what a step computes and says what
that sampled, as of one device. What a tensor is made of never comes here."""

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.adapters import Adapter
from services.worker.engine.config import CPU_KERNELS, EngineConfig
from services.worker.engine.grammar.library import Words
from services.worker.engine.kv.cache import block_shape
from services.worker.engine.kv.groups import block_layers
from services.worker.engine.models.registry import read_config
from services.worker.engine.outputs import ModelInfo
from services.worker.engine.parallel.board import SLOTS
from services.worker.engine.parallel.kv import RanksCache
from services.worker.engine.parallel.shard import Shard, check_cut
from services.worker.engine.parallel.team import Team
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.runners.making import in_words
from services.worker.engine.runners.runner import RunnerLost
from services.worker.engine.sizes import kv_bytes_per_block, stored_as
from services.worker.engine.weights.weights import shapes

log = logging.getLogger(__name__)

_MOST_RUNNING = SLOTS // 2
"""Steps that are not collected: each has two messages on the board at most."""
_OWN = {
    *("device", "threads", "num_parameters", "parameter_bytes"),
    *("weights", "huge_bytes", "workspace_bytes"),
}
"""Fields of ModelInfo that ranks may differ in. The rest decides what blocks and steps mean."""


class Ranks:
    """As `Executor`, and its `Runner`."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises UnsupportedModel, and ValueError, before anything loads where it can."""
        model, count = read_config(config.model), config.tensor_parallel
        check_cut(model, count)
        self._shards = [Shard(model, rank, count) for rank in range(count)]
        self._team = Team(config)
        parts: list[ModelInfo] = self._team.loaded()
        self._check_alike(parts)
        own = parts[0]
        self.logit_cap = model.logit_cap
        self.info = replace(
            own,
            device=config.device,
            threads=sum(part.threads for part in parts),
            num_parameters=sum(int(np.prod(shape)) for shape in shapes(model).values()),
            parameter_bytes=sum(part.parameter_bytes for part in parts),
            weights=f"{count} ranks",
            kv_bytes_per_block=kv_bytes_per_block(config, model, own.dtype),
            kv_shape_per_block=block_shape(model, config.block_size, block_layers(own.kv_groups)),
        )
        self.cache = RanksCache(
            self._team,
            self._shards,
            self.info.kv_shape_per_block,
            stored_as(config, own.dtype),
            in_panels=own.kernels in CPU_KERNELS,
        )
        self._numbers = itertools.count()
        self._running: deque[int] = deque()
        log.info("%s", in_words(self.info))

    def _check_alike(self, parts: Sequence[ModelInfo]) -> None:
        """Hosts may differ in what they compute with, and the checkpoint's folders in what they
        say. Raises ValueError, with the ranks ended."""
        own = parts[0]
        for rank, part in enumerate(parts):
            for name in (one.name for one in fields(ModelInfo) if one.name not in _OWN):
                told, first = getattr(part, name), getattr(own, name)
                if told != first:
                    who = self._team.name(rank)
                    self._team.end()
                    raise ValueError(
                        f"{who} has {name} {told!r}, the first {first!r}: ranks must be alike"
                    )

    @property
    def runner(self) -> "Ranks":
        return self

    @property
    def alarms(self) -> list[int]:
        return self._team.alarms

    def check(self) -> None:
        self._team.check()

    def close(self) -> None:
        self._team.end()

    def launch(self, plan: StepPlan) -> int:
        if len(self._running) == _MOST_RUNNING:
            raise RuntimeError(f"{_MOST_RUNNING} steps wait to be collected")
        self._team.show_all("launch", plan)
        number = next(self._numbers)
        self._running.append(number)
        return number

    def sample(self, ticket: int, allowed: Words) -> None:
        self._team.show_all("sample", allowed)

    def collect(self, ticket: int) -> Collected:
        launched = self._running.popleft()
        assert ticket == launched, "steps are collected in order"
        answers = self._team.ask_all("collect")
        collected: Collected = answers[0][1]
        for rank, (tokens, _) in enumerate(answers):
            if tokens != answers[0][0]:
                self._team.end()
                raise RunnerLost(f"rank {rank} sampled other tokens than the first")
        return collected

    def head_rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = sum(self._team.ask_all("head_rows", list(ids)))
        return found

    def adapt(self, place: int, adapter: Adapter | None) -> None:
        for shard in self._shards:
            own = None if adapter is None else shard.adapter(adapter)
            self._team.tell(shard.rank, "adapt", place, own)
        if refused := [words for words in self._team.answers() if words]:
            raise MemoryError(refused[0])
