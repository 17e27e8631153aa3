"""silu(gate) * up, of rows that hold one after the other."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPAN = 1024


@triton.jit
def silu_mul_kernel(out, x, x_stride, WIDTH: tl.constexpr, SPAN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = at < WIDTH
    kind = x.dtype.element_ty
    gate = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * WIDTH + at, (silu * up).to(kind), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    silu_mul_kernel[(rows, triton.cdiv(width, _SPAN))](
        out, x, x.stride(0), WIDTH=width, SPAN=_SPAN, num_warps=4
    )
    return out
