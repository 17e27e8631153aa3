"""Attention of sequences with many new tokens each: a program takes a tile of one's queries, those
of all heads that share a key-value head side by side, so that keys and values are read once."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.heads import Scores
from kernels.kv_layer import KvLayer
from kernels.paged_batch import PagedBatch
from kernels.triton.attend import attend
from kernels.triton.heads import mix_heads
from kernels.triton.launch import INTERPRETED, power_of_two, scale_and_cap, tile


@triton.jit
def prefill_kernel(
    out,
    out_stride,
    q,
    q_stride,
    tiles,
    starts,
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
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
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
    which, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(tiles + 2 * which), tl.load(tiles + 2 * which + 1)
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    length = tl.load(lengths + sequence)

    rows = tl.arange(0, ROWS)
    queries = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, PADDED)
    mask = ((rows < QUERIES * GROUP) & (queries < count))[:, None] & (dims[None, :] < DIM)
    tokens = (begin + queries).to(tl.int64)
    x = tl.load(
        q + tokens[:, None] * q_stride + heads[:, None] * DIM + dims[None, :], mask=mask, other=0.0
    )
    before = length - count
    start = 0
    if WINDOW > 0:
        start = tl.maximum(before + first + 1 - WINDOW, 0)
    total, weight, _ = attend(
        x,
        before + queries,
        start,
        before + tl.minimum(first + QUERIES, count),
        tables + sequence.to(tl.int64) * table_stride,
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
    y = total / weight[:, None]
    tl.store(
        out + tokens[:, None] * out_stride + heads[:, None] * DIM + dims[None, :],
        y.to(out.dtype.element_ty),
        mask=mask,
    )


def queries_per_tile(group: int) -> int:
    """New tokens of a program, of each of `group` query heads."""
    return max(1, 64 // group)


def prefill(out: Tensor, q: Tensor, layer: KvLayer, batch: PagedBatch, scores: Scores) -> None:
    """Of the sequences after the first `num_decodes`; see `ops.paged_attention`."""
    (_, _, kv_heads, block_size, _), dim = layer.values.shape, layer.dim
    group = q.shape[1] // kv_heads
    queries = queries_per_tile(group)
    scales = layer.values if layer.scales is None else layer.scales
    scale, cap = scale_and_cap(scores)
    prefill_kernel[(len(batch.tiles), kv_heads)](
        out,
        out.stride(0),
        q,
        q.stride(0),
        batch.tiles,
        batch.starts,
        batch.lengths,
        batch.block_tables,
        batch.block_tables.stride(0),
        layer.values,
        *layer.values.stride()[:3],
        scales,
        *scales.stride()[:2],
        scale,
        GROUP=group,
        QUERIES=queries,
        ROWS=max(16, power_of_two(queries * group)),
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
        num_stages=2,
    )
    if layer.mixed:
        mix_heads(out[batch.num_decodes :])
