"""Rows of the embedding, by ids of which some are only known on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import power_of_two


@triton.jit
def embed_kernel(out, ids, last, table, scale, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    if token < 0:  # of a row without one nothing comes but what is thrown away
        token = tl.maximum(tl.load(last - 1 - token), 0)
    at = tl.arange(0, PADDED)
    values = tl.load(table + token.to(tl.int64) * WIDTH + at, mask=at < WIDTH)
    scaled = (values.to(tl.float32) * scale).to(values.dtype)
    tl.store(out + row * WIDTH + at, scaled, mask=at < WIDTH)


def embed(ids: Tensor, last: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """Rows [T, width] of the table times `scale`, by int32 ids [T]; -1 - i stands for last[i]."""
    width = table.shape[1]
    out = torch.empty((len(ids), width), dtype=table.dtype, device=table.device)
    embed_kernel[(len(ids),)](
        out, ids, last, table, scale, WIDTH=width, PADDED=power_of_two(width), num_warps=4
    )
    return out
