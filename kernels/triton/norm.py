"""Root mean square norm of rows, alone or of a sum that it makes on the way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import power_of_two


@triton.jit
def norm_kernel(
    out,
    out_stride,
    x,
    x_stride,
    y,
    y_stride,
    weight,
    epsilon,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    mask = at < WIDTH
    kind = x.dtype.element_ty
    values = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(y + row * y_stride + at, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(kind)
        tl.store(x + row * x_stride + at, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
    normed = (values * scale).to(weight.dtype.element_ty).to(tl.float32)
    normed *= tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, normed.to(kind), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return _norm(torch.empty(x.shape, dtype=x.dtype, device=x.device), x, None, weight, epsilon)


def rms_norm_in_place(x: Tensor, weight: Tensor, epsilon: float) -> None:
    _norm(x, x, None, weight, epsilon)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return x, _norm(torch.empty(x.shape, dtype=x.dtype, device=x.device), x, y, weight, epsilon)


def _norm(out: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    rows, width = x.shape
    added = x if y is None else y
    padded = power_of_two(width)
    norm_kernel[(rows,)](
        out,
        out.stride(0),
        x,
        x.stride(0),
        added,
        added.stride(0),
        weight,
        epsilon,
        WIDTH=width,
        PADDED=padded,
        ADDS=y is not None,
        num_warps=4 if padded <= 4096 else 8,
    )
    return out
