"""The inner loop of attention: rows of queries of one key-value head over a stretch of its
sequence's tokens, whose places in the cache the block table names.

Softmax as it goes (Milakov, Gimelshein, arXiv 1805.02867; tiled as in FlashAttention, 2205.14135).
Tiles begin at multiples of TILE whatever the stretch, and one that a row does not see changes
nothing of the row: its result does not depend on the rows it is computed with.
"""

import triton
import triton.language as tl

from kernels.triton.numbers import numbers_of_4_bits, product


@triton.jit
def attend(
    q,
    positions,
    start,
    end,
    table,
    keys,
    block_stride,
    side_stride,
    scales,
    scales_block_stride,
    scales_side_stride,
    scale,
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
    """Rows q [ROWS, PADDED] at `positions` [ROWS] over the tokens [start, end).

    keys: of the head in block 0; values lie `side_stride` further. SCALED: both are 8 bits wide and
    have a factor for each token. PACKED: so wide are two numbers of 4 bits. `scale` is of the
    scores, times log2(e); where they are capped, as log2(e) times CAP is, divided by the cap.
    Gives the weighted sums [ROWS, PADDED], the weights' sums and the best scores, to base 2.
    """
    PER: tl.constexpr = 2 if PACKED else 1
    dims = tl.arange(0, PADDED // PER)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, PADDED], tl.float32)
    for first in range(start // TILE * TILE, end, TILE):
        tokens = first + tl.arange(0, TILE)
        inside = (tokens >= start) & (tokens < end)
        block = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = tokens % BLOCK_SIZE
        places = block * block_stride + offset * (DIM // PER)
        # What lies outside of the stretch may be NaN, which a weight of zero would not silence.
        mask = inside[:, None] & (dims[None, :] < DIM // PER)
        k = tl.load(keys + places[:, None] + dims[None, :], mask=mask, other=0.0)
        v = tl.load(keys + side_stride + places[:, None] + dims[None, :], mask=mask, other=0.0)
        if PACKED:
            k, v = numbers_of_4_bits(k), numbers_of_4_bits(v)
        if WIDE:  # the interpreter takes whole numbers for bfloat16's bits
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = product(q, tl.trans(k.to(q.dtype)), WIDE) * scale
        if SCALED:
            at = scales + block * scales_block_stride + offset
            scores *= tl.load(at, mask=inside, other=0.0)[None, :]
        if CAP > 0:
            scores = CAP * (2 * tl.sigmoid(2 * scores) - 1)  # of tanh
        seen = inside[None, :] & (tokens[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen &= tokens[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        weight = weight * shrink + tl.sum(weights, 1)
        if SCALED:
            weights *= tl.load(at + scales_side_stride, mask=inside, other=0.0)[None, :]
        total = total * shrink[:, None] + product(weights.to(q.dtype), v.to(q.dtype), WIDE)
        best = higher
    return total, weight, best
