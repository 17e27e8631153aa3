"""A rank's forward pass on the C++ kernels: between their operations the ranks meet."""

from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from kernels.cpu import structures as c
from kernels.cpu.matrix import Matrix
from kernels.cpu.program import Ints
from kernels.cpu.recorder import MEET, Floats, Recorder, Rows
from kernels.heads import QkNorm
from kernels.mixture import Mixture
from services.worker.engine.parallel.peers import Peers
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.plan import StepPlan


class RankRecorder(Recorder):
    """What ranks sum is float32, whatever weights are. Rows that layers add to are whole on each
    rank; the first one has them in the sum, too, the others their own part alone."""

    def __init__(
        self, shard: Shard, group: ProcessGroup, linears: Mapping[Matrix, Mapping[str, int]]
    ) -> None:
        """`linears`: the names of each matrix's layers."""
        super().__init__()
        self._shard, self._peers, self._linears = shard, Peers(shard, group), linears
        self._of_others: NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Of the step's tokens: whether another rank has its embedding."""

    def own_ids(self, plan: StepPlan, sampled: Ints) -> Ints:
        """Rows of this rank's part of the embedding, for a step behind the one that sampled these:
        of tokens that are another rank's, any."""
        ids, awaited = np.array(plan.token_ids), np.array(plan.awaited).reshape(-1, 2)
        if len(awaited):  # of a row without one nothing comes but what is thrown away
            ids[awaited[:, 0]] = np.maximum(np.array(sampled)[awaited[:, 1]], 0)
        own = self._shard.vocabulary
        self._of_others = (ids < own.start) | (ids >= own.stop)
        return array("i", (ids.clip(own.start, own.stop - 1) - own.start).tolist())

    def embed(self, table: Matrix, scale: float = 1.0) -> Rows:
        x = super().embed(table, scale)

        def meet(rows: Floats, _: Floats) -> None:
            rows[self._of_others] = 0
            self._peers.sum(torch.from_numpy(rows))

        return self._meet(x, x, meet)

    def linear(self, x: Rows, weights: Matrix) -> Rows:
        y = super().linear(x, weights)
        after = self._shard.after(next(iter(self._linears[weights])))
        if after == "gather":
            return self._meet(y, Rows(self._shard.model.vocab_size, y.which), self._gathered)
        return self._summed(y) if after == "sum" else y

    def experts(self, x: Rows, mixture: Mixture[Matrix]) -> Rows:
        return self._summed(super().experts(x, mixture))

    def add(self, x: Rows, y: Rows) -> Rows:
        *_, op, meeting = self.ops
        if meeting["kind"] != MEET or meeting["source"] is not y:
            return super().add(x, y)
        self.ops.pop()
        x = super().add(x, y)
        if self._shard.rank:
            op["epilogue"] = c.PUT
        return self._summed(x)

    def rotary(self, qkv: Rows, layer: int, rope: int = 0, norm: QkNorm | None = None) -> Rows:
        if norm is None or not self._peers.norms_all:
            return super().rotary(qkv, layer, rope, norm)
        of_all = QkNorm(torch.from_numpy(norm.q), torch.from_numpy(norm.k), norm.epsilon)

        def meet(rows: Floats, _: Floats) -> None:
            rows[:] = self._peers.norm_all(torch.from_numpy(rows), of_all).numpy()

        return super().rotary(self._meet(qkv, qkv, meet), layer, rope)

    def _summed(self, y: Rows) -> Rows:
        return self._meet(y, y, lambda rows, _: self._peers.sum(torch.from_numpy(rows)))

    def _gathered(self, own: Floats, whole: Floats) -> None:
        whole[:] = self._peers.whole(torch.from_numpy(own), "gather").numpy()

    def _meet(self, source: Rows, target: Rows, meet: Callable[[Any, Any], None]) -> Rows:
        self.ops.append({"kind": MEET, "source": source, "target": target, "meet": meet})
        return target
