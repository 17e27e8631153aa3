"""Attention of one new token a sequence, which is a matter of reading the cache once, by as many
multiprocessors as there are.

A sequence is cut in splits of one length, whatever the batch (decision 0028), and programs share
them out; each leaves its share of the result and how much that weighs, for `merge`. So a row's
result does not depend on its batch. The query heads of a key-value head are rows of one product.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.heads import Scores
from kernels.kv_layer import KvLayer
from kernels.paged_batch import PagedBatch
from kernels.triton.attend import attend
from kernels.triton.heads import mix_heads
from kernels.triton.launch import INTERPRETED, power_of_two, scale_and_cap, tile
from kernels.triton.merge import merge

MAX_SPLITS = 32
SHORTEST_SPLIT = 256
"""Tokens: 64 KB of keys and values of a head of 128, behind which a program's start hides."""


@triton.jit
def decode_kernel(
    parts,
    weights,
    q,
    q_stride,
    lengths,
    tables,
    table_stride,
    cache,
    block_stride,
    side_stride,
    head_stride,
    scales,
    scales_block_stride,
    scales_side_stride,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SCALED: tl.constexpr,
    PACKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + sequence)
    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, PADDED)
    mask = (rows < GROUP)[:, None] & (dims[None, :] < DIM)
    row = sequence.to(tl.int64)
    x = tl.load(q + row * q_stride + heads[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
    visible = 0
    if WINDOW > 0:
        visible = tl.maximum(length - WINDOW, 0)
    for split in range(tl.program_id(2), tl.cdiv(length, SPLIT), tl.num_programs(2)):
        total, weight, best = attend(
            x,
            length - 1 + rows * 0,
            tl.maximum(split * SPLIT, visible),
            tl.minimum((split + 1) * SPLIT, length),
            tables + row * table_stride,
            cache + kv_head * head_stride,
            block_stride,
            side_stride,
            scales + kv_head * BLOCK_SIZE,
            scales_block_stride,
            scales_side_stride,
            scale,
            ROWS,
            BLOCK_SIZE,
            DIM,
            PADDED,
            TILE,
            WINDOW,
            CAP,
            SCALED,
            PACKED,
            WIDE,
        )
        place = (row * tl.num_programs(1) * GROUP + heads) * SPLITS + split
        some = weight > 0  # none of a split that lies before the window
        tl.store(
            parts + place[:, None] * DIM + dims[None, :],
            total / tl.where(some, weight, 1.0)[:, None],
            mask=mask,
        )
        log_weight = tl.where(some, best + tl.log2(weight), float("-inf"))
        tl.store(weights + place, log_weight, mask=rows < GROUP)


@dataclass(frozen=True)
class Splits:
    """How sequences are cut, and room for what comes of it; one for all layers and steps."""

    size: int
    """Tokens of a split."""
    programs: int
    """At a time, about, for the device to be full."""
    parts: Tensor
    """float32 [sequences, heads, splits, dim]"""
    weights: Tensor
    """float32 [sequences, heads, splits]: log2 of the sum of e^score"""

    @classmethod
    def of(
        cls, sequences: int, heads: int, dim: int, context: int, device: torch.device
    ) -> "Splits":
        """For sequences of up to `context` tokens."""
        step = tile(dim)
        size = max(SHORTEST_SPLIT, -(-context // (MAX_SPLITS * step)) * step)
        shape = (sequences, heads, power_of_two(-(-context // size)))
        programs = 4
        if device.type == "cuda":
            programs *= torch.cuda.get_device_properties(device).multi_processor_count
        parts = torch.empty((*shape, dim), dtype=torch.float32, device=device)
        return cls(size, programs, parts, torch.empty(shape, dtype=torch.float32, device=device))

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes + self.weights.nbytes


def decode(
    out: Tensor,
    q: Tensor,
    layer: KvLayer,
    batch: PagedBatch,
    scores: Scores,
    splits: Splits,
) -> None:
    """Of the first `num_decodes` sequences; see `ops.paged_attention`."""
    count = batch.num_decodes
    (_, _, kv_heads, block_size, _), dim = layer.values.shape, layer.dim
    group = q.shape[1] // kv_heads
    most = splits.weights.shape[-1]
    scales = layer.values if layer.scales is None else layer.scales
    scale, cap = scale_and_cap(scores)
    decode_kernel[(count, kv_heads, min(most, -(-splits.programs // (count * kv_heads))))](
        splits.parts,
        splits.weights,
        q,
        q.stride(0),
        batch.lengths,
        batch.block_tables,
        batch.block_tables.stride(0),
        layer.values,
        *layer.values.stride()[:3],
        scales,
        *scales.stride()[:2],
        scale,
        GROUP=group,
        ROWS=max(16, power_of_two(group)),
        SPLIT=splits.size,
        SPLITS=most,
        BLOCK_SIZE=block_size,
        DIM=dim,
        PADDED=max(16, power_of_two(dim)),
        TILE=tile(dim),
        WINDOW=scores.window,
        CAP=cap,
        SCALED=layer.scales is not None,
        PACKED=layer.mixed,
        WIDE=INTERPRETED,
        num_warps=4,
        num_stages=3,
    )
    merge(out[:count], splits.parts, splits.weights, batch.lengths, splits.size)
    if layer.mixed:
        mix_heads(out[:count])
