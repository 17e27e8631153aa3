"""silu(gate) * up and gelu(gate) * up, of rows that hold one after the other."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPAN = 1024


@triton.jit
def gated_kernel(out, x, x_stride, WIDTH: tl.constexpr, SPAN: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = at < WIDTH
    kind = x.dtype.element_ty
    gate = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    exponent = gate
    if GELU:  # (1 + tanh(u)) / 2 = 1 / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    gate = (gate / (1 + tl.exp(-exponent))).to(kind).to(tl.float32)
    tl.store(out + row * WIDTH + at, (gate * up).to(kind), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    return _gated(x, gelu=False)


def gelu_and_mul(x: Tensor) -> Tensor:
    return _gated(x, gelu=True)


def _gated(x: Tensor, gelu: bool) -> Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    gated_kernel[(rows, triton.cdiv(width, _SPAN))](
        out, x, x.stride(0), WIDTH=width, SPAN=_SPAN, GELU=gelu, num_warps=4
    )
    return out
