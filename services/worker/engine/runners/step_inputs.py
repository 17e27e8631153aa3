"""What a step's kernels on a GPU read, at places that stay: a captured graph finds it there.

A plan's arrays are laid in one piece of pinned memory, which one copy takes to the device behind
the steps that run there. That memory may be used again when the copy is done, which torch's
allocator looks after: nothing here waits.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged_batch import PagedBatch, tiles_of
from kernels.sampling import SAMPLING
from services.worker.engine.plan import StepPlan

Ints = NDArray[np.int32]
_WORDS = SAMPLING.itemsize // 4
_ALIGNED = 4  # words; kernels read faster what begins at 16 bytes


@dataclass(frozen=True)
class Capacity:
    """Of the largest step, and of a sequence: `blocks` in each of its tables, of which it has one
    for each of `groups`. `rows` are of logits, `scratch` is a block that is no sequence's,
    `queries` what a tile of prefill attention has."""

    tokens: int
    sequences: int
    rows: int
    blocks: int
    block_size: int
    scratch: int
    queries: int
    groups: int = 1


@dataclass(frozen=True)
class DeviceStep:
    """Where on the device a step's inputs are."""

    token_ids: Tensor
    """int32 [T]; -1 - i: the i-th of the tokens that the step before sampled"""
    batches: list[PagedBatch]
    """Of each KV group, which differ in where keys and values lie"""
    wanted: Tensor
    """int32 [R + N]: tokens after which one is sampled, and those that are pooled"""
    rows: Tensor
    """[R]: the former"""
    samplings: Tensor
    """int32 [R, words of SAMPLING]"""
    adapters: Tensor | None
    """int32 [T]: as in StepPlan; None: no token has one"""


class StepInputs:
    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self._of, self._pinned = capacity, device.type == "cuda"
        tokens, sequences = capacity.tokens, capacity.sequences
        sizes = {
            "samplings": capacity.rows * _WORDS,
            "token_ids": tokens,
            "positions": tokens,
            "slots": tokens * capacity.groups,
            "tiles": 2 * tokens,
            "starts": sequences + 1,
            "lengths": sequences,
            "rows": tokens,
            "adapters": tokens,
        }
        self._places: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._places[name] = slice(end, end + size)
            end += -(-size // _ALIGNED) * _ALIGNED
        self._device = torch.zeros(end, dtype=torch.int32, device=device)
        tables = (capacity.groups, sequences, capacity.blocks)
        self._tables = torch.zeros(tables, dtype=torch.int32, device=device)

    def load(self, plan: StepPlan, before: Ints) -> DeviceStep:
        """`before`: of each row that the step before sampled, where its token is."""
        tiles = tiles_of(np.asarray(plan.starts), plan.num_decodes, self._of.queries)
        self._copy(
            plan.block_tables,
            token_ids=_ids(plan, before),
            positions=np.asarray(plan.positions),
            slots=plan.slots(self._of.block_size).reshape(-1),
            starts=np.asarray(plan.starts),
            lengths=np.asarray(plan.lengths),
            rows=np.concatenate([plan.rows, plan.pooled_rows]),
            tiles=tiles.reshape(-1),
            samplings=plan.samplings.view(np.int32),
            adapters=np.asarray(plan.adapters),
        )
        counts = len(plan.token_ids), len(plan.lengths), len(plan.rows)
        return self._step(
            *counts,
            tiles=len(tiles),
            num_decodes=plan.num_decodes,
            pooled=len(plan.pooled_rows),
            adapted=bool(plan.adapters),
        )

    def load_decodes(self, plan: StepPlan, before: Ints, count: int) -> None:
        """Sequences of one token each, filled up to `count`: those are of no tokens, and write to
        the scratch block. Row i is sequence i, whether or not it samples; one that does not is
        greedy."""
        filling = count - len(plan.lengths)
        samplings = np.zeros(count, SAMPLING)
        samplings[plan.sampled] = plan.samplings
        slots = plan.slots(self._of.block_size)
        scratch = self._of.scratch * self._of.block_size
        self._copy(
            plan.block_tables,
            token_ids=np.pad(_ids(plan, before), (0, filling)),
            positions=np.pad(plan.positions, (0, filling)),
            slots=np.pad(slots, ((0, 0), (0, filling)), constant_values=scratch).reshape(-1),
            lengths=np.pad(plan.lengths, (0, filling)),
            samplings=samplings.view(np.int32),
            adapters=np.pad(plan.adapters, (0, filling), constant_values=-1),
        )

    def decodes(self, count: int, adapted: bool) -> DeviceStep:
        """Where `load_decodes` puts them; `adapted`: some have adapters."""
        return self._step(
            count, count, count, tiles=0, num_decodes=count, pooled=0, adapted=adapted
        )

    def _step(
        self,
        tokens: int,
        sequences: int,
        rows: int,
        *,
        tiles: int,
        num_decodes: int,
        pooled: int,
        adapted: bool,
    ) -> DeviceStep:
        def part(name: str, size: int) -> Tensor:
            return self._device[self._places[name]][:size]

        slots = part("slots", tokens * self._of.groups).view(-1, tokens)
        batches = [
            PagedBatch(
                positions=part("positions", tokens),
                slots=slots[group],
                starts=part("starts", sequences + 1),
                lengths=part("lengths", sequences),
                block_tables=self._tables[group, :sequences],
                tiles=part("tiles", 2 * tiles).view(-1, 2),
                num_decodes=num_decodes,
            )
            for group in range(self._of.groups)
        ]
        return DeviceStep(
            token_ids=part("token_ids", tokens),
            batches=batches,
            wanted=part("rows", rows + pooled),
            rows=part("rows", rows),
            samplings=part("samplings", rows * _WORDS).view(-1, _WORDS),
            adapters=part("adapters", tokens) if adapted else None,
        )

    def _copy(self, tables: Ints, **fields: Ints) -> None:
        staged = torch.empty(self._device.shape, dtype=torch.int32, pin_memory=self._pinned)
        for name, values in fields.items():
            staged.numpy()[self._places[name]][: len(values)] = values
        self._device.copy_(staged, non_blocking=True)
        _, rows, width = tables.shape
        staged = torch.empty(tables.shape, dtype=torch.int32, pin_memory=self._pinned)
        staged.numpy()[:] = tables
        self._tables[:, :rows, :width].copy_(staged, non_blocking=True)


def _ids(plan: StepPlan, before: Ints) -> Ints:
    ids = np.array(plan.token_ids)
    places, rows = np.asarray(plan.awaited).reshape(-1, 2).T
    ids[places] = -1 - before[rows]
    return ids
