"""Sequences whose keys and values lie scattered over a cache of NaN."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import reference
from kernels.kv_layer import INT4, KvLayer
from kernels.paged_batch import PagedBatch, tiles_of

NUM_LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Paged:
    batch: PagedBatch
    layer: KvLayer
    content: list[tuple[Tensor, Tensor]]
    """Of each sequence its keys and values, [length, G, D] each."""

    def copy(self) -> KvLayer:
        """The layer's content in memory of its own, laid out as the layer is."""
        values, scales = self.layer.values, self.layer.scales
        return KvLayer(_copied(values), None if scales is None else _copied(scales))


def _copied(part: Tensor) -> Tensor:
    whole = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype)
    if part.dtype.itemsize == 1:
        whole.view(torch.uint8).copy_(part.view(torch.uint8))
        return whole
    return whole.copy_(part)


def paged(
    query_lens: list[int],
    seq_lens: list[int],
    kv_heads: int,
    dim: int,
    *,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    queries: int = 64,
) -> Paged:
    """A batch on scattered blocks, stored through the reference's `store_kv`; sequences of one new
    token come first. `stored`: in which few bits, or None: in `dtype`; `queries`: of a tile."""
    num_blocks = sum(-(-length // block_size) for length in seq_lens) + 3
    # As in the engine: a layer's cache is a strided view of a larger tensor.
    shape = (num_blocks, NUM_LAYERS, 2, kv_heads, block_size)
    memory = torch.full((*shape, dim // 2 if stored == INT4 else dim), torch.nan)
    whole = -1 if stored == torch.int8 else 0x1F  # of which none is NaN
    if stored in (torch.int8, INT4):
        memory = torch.full_like(memory, whole, dtype=stored)
    memory = memory.to(stored or dtype)
    scales = torch.full(shape, torch.nan)
    layer = KvLayer(memory[:, LAYER], scales[:, LAYER] if stored else None)
    free = (1 + torch.randperm(num_blocks - 1)).tolist()  # block 0, where a bad load looks, is NaN
    tables, slots, positions, content = [], [], [], []
    for count, length in zip(query_lens, seq_lens, strict=True):
        table = [free.pop() for _ in range(-(-length // block_size))]
        k, v = (torch.randn(length, kv_heads, dim).to(dtype) for _ in range(2))
        at = torch.arange(length)
        places = torch.tensor(table)[at // block_size] * block_size + at % block_size
        reference.store_kv(k, v, layer, places)
        tables.append(table)
        slots.append(places[length - count :])
        positions.append(at[length - count :])
        content.append((k, v))
    width = max(map(len, tables))
    rows = [table + [table[-1]] * (width - len(table)) for table in tables]
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    decodes = query_lens.count(1)
    batch = PagedBatch(
        positions=torch.cat(positions).int(),
        slots=torch.cat(slots).int(),
        starts=torch.from_numpy(starts),
        lengths=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(rows, dtype=torch.int32),
        tiles=torch.from_numpy(tiles_of(starts, decodes, queries)),
        num_decodes=decodes,
    )
    others = memory[:, 1 - LAYER].float()
    assert ((others == whole) | others.isnan()).all(), "another layer was written to"
    return Paged(batch, layer, content)
