"""Results of attention over parts of a sequence, put together to what it is over the whole."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import power_of_two


@triton.jit
def merge_kernel(
    out,
    out_stride,
    parts,
    weights,
    lengths,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = (sequence * tl.num_programs(1) + head) * SPLITS
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    there = splits < tl.cdiv(tl.load(lengths + sequence), SPLIT)
    weight = tl.load(weights + place + splits, mask=there, other=float("-inf"))
    best = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(best == float("-inf"), 0.0, best))
    mask = there[:, None] & (dims[None, :] < DIM)
    part = tl.load(
        parts + (place + splits[:, None]) * DIM + dims[None, :],
        mask=mask,
        other=0.0,
    )
    total = tl.sum(share, 0)
    y = tl.sum(part * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(
        out + sequence * out_stride + head * DIM + dims, y.to(out.dtype.element_ty), mask=dims < DIM
    )


def merge(out: Tensor, parts: Tensor, weights: Tensor, lengths: Tensor, split: int) -> None:
    """out [S, H, D] from parts [.., H, splits, D] and log2 of their weights [.., H, splits], of
    which those of `lengths` [S] tokens, `split` each, were written. Of 0 tokens: zeros."""
    rows, heads, dim = out.shape
    merge_kernel[(rows, heads)](
        out,
        out.stride(0),
        parts,
        weights,
        lengths,
        SPLIT=split,
        SPLITS=weights.shape[-1],
        DIM=dim,
        PADDED=power_of_two(dim),
        num_warps=4,
    )
