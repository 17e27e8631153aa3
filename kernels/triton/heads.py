"""Keys and values in 4 bits: heads are mixed by the Walsh-Hadamard matrix, and stored two numbers
to a byte (reference.mix_heads, kv_layer.INT4)."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_layer import LEAST, KvLayer
from kernels.triton.launch import power_of_two
from kernels.triton.numbers import nearest

_GROUPS = 16
"""Of one program: features that are mixed together."""


@triton.jit
def mix_heads_kernel(
    x,
    row_stride,
    groups,
    unit,
    GROUPS: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    of = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = x + row * row_stride + of[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    mask = (of < groups)[:, None]
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    # Sums of neighbours come before all differences of such: as often as a power of two has places,
    # and each place was a neighbour's once, and all are where they were.
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(values, [GROUPS, TOGETHER // 2, 2]))
        values = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [GROUPS, TOGETHER])
    tl.store(at, (values * unit).to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_4_bits_kernel(
    x,
    row_stride,
    slots,
    cache,
    block_stride,
    side_stride,
    head_stride,
    scales,
    scales_block_stride,
    scales_side_stride,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Of a token's keys and values x [2 KV_HEADS, 2 HALF] one head."""
    token, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    side, kv_head = which // KV_HEADS, which % KV_HEADS
    dims = tl.arange(0, PADDED)
    at = x + token * row_stride + which * (2 * HALF) + 2 * dims
    a = tl.load(at, mask=dims < HALF, other=0.0).to(tl.float32)
    b = tl.load(at + 1, mask=dims < HALF, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0))
    high = tl.maximum(tl.max(a, 0), tl.max(b, 0))
    furthest = tl.where(high < most, -most, most)
    furthest = tl.where(most < LEAST, -8.0, furthest)
    none = tl.sum(a - a, 0) + tl.sum(b - b, 0)  # NaN of what is no number
    slot = tl.load(slots + token)
    block, offset = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
    place = block * scales_block_stride + side * scales_side_stride + kv_head * BLOCK_SIZE + offset
    tl.store(scales + place, furthest / -8 + none)
    factor = -8 / furthest
    lower = tl.minimum(nearest(a * factor), 7.0).to(tl.int32) + 8
    upper = tl.minimum(nearest(b * factor), 7.0).to(tl.int32) + 8
    place = block * block_stride + side * side_stride + kv_head * head_stride + offset * HALF
    both = (lower & 15) | (upper & 15) << 4
    tl.store(cache + place + dims, both.to(tl.uint8), mask=dims < HALF)


def mix_heads(x: Tensor) -> None:
    """In place: x [T, heads, D], of whose strides the last two are as if it lay together."""
    rows, heads, dim = x.shape
    if not rows:
        return
    together = dim & -dim
    groups = heads * dim // together
    mix_heads_kernel[(rows, triton.cdiv(groups, _GROUPS))](
        x,
        x.stride(0),
        groups,
        together**-0.5,
        GROUPS=_GROUPS,
        TOGETHER=together,
        STAGES=together.bit_length() - 1,
        num_warps=4,
    )


def store_4_bits(x: Tensor, layer: KvLayer, slots: Tensor) -> None:
    """Keys and values x [T, 2 G, D], mixed, to their slots."""
    _, _, kv_heads, block_size, half = layer.values.shape
    assert layer.scales is not None
    store_4_bits_kernel[(len(x), 2 * kv_heads)](
        x,
        x.stride(0),
        slots,
        layer.values,
        *layer.values.stride()[:3],
        layer.scales,
        *layer.scales.stride()[:2],
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        HALF=half,
        PADDED=power_of_two(half),
        LEAST=LEAST,
        num_warps=1,
    )
