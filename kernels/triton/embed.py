"""Rows of the embedding, by ids of which some are only known on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import power_of_two
from kernels.triton.linear import bytes_of_row
from kernels.triton.matrix import NarrowMatrix, group_of


@triton.jit
def token_of(ids, last):
    """The program's; of a row without one nothing comes but what is thrown away."""
    token = tl.load(ids + tl.program_id(0))
    if token < 0:
        token = tl.maximum(tl.load(last - 1 - token), 0)
    return token.to(tl.int64)


@triton.jit
def embed_kernel(out, ids, last, table, scale, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row, token = tl.program_id(0).to(tl.int64), token_of(ids, last)
    at = tl.arange(0, PADDED)
    values = tl.load(table + token * WIDTH + at, mask=at < WIDTH)
    scaled = (values.to(tl.float32) * scale).to(values.dtype)
    tl.store(out + row * WIDTH + at, scaled, mask=at < WIDTH)


@triton.jit
def narrow_embed_kernel(
    out,
    ids,
    last,
    numbers,
    scales,
    zeros,
    scale,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Bytes lie as matrix.py says."""
    row, token = tl.program_id(0).to(tl.int64), token_of(ids, last)
    at = tl.arange(0, PADDED)
    mask = at < WIDTH
    NIBBLES: tl.constexpr = HELD == "int4" or HELD == "int4_zeros"
    byte = at // 64 * 32 + at % 32 if NIBBLES else at
    byte = byte // 4 * 4 + byte % 2 * 2 + byte // 2 % 2
    place = token // 16 * (BYTES * 16) + token % 16 * 32 + byte // 32 * 512 + byte % 32
    bits = tl.load(numbers + place, mask=mask, other=0).to(tl.int32)
    of_group = token
    if GROUP:
        of_group = at // GROUP * N + token
    if NIBBLES:
        zero = 8
        if HELD == "int4_zeros":
            zero = tl.load(zeros + of_group, mask=mask, other=0).to(tl.int32)
        values = ((bits >> at // 32 % 2 * 4 & 15) - zero).to(tl.float32)
    elif HELD == "fp8" or HELD == "fp8_blocks":
        wide = (bits & 0x80) << 24 | (bits & 0x7F) << 20
        values = wide.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        values = (bits << 24 >> 24).to(tl.float32)
    if GROUP:
        values *= tl.load(scales + of_group, mask=mask, other=0.0).to(tl.float32)
    else:
        values *= tl.load(scales + of_group)
    tl.store(out + row * WIDTH + at, (values * scale).to(out.dtype.element_ty), mask=mask)


def embed(ids: Tensor, last: Tensor, table: Tensor | NarrowMatrix, scale: float = 1.0) -> Tensor:
    """Rows [T, width] of the table times `scale`, by int32 ids [T]; -1 - i stands for last[i]."""
    if isinstance(table, NarrowMatrix):
        return _embed_narrow(ids, last, table, scale)
    width = table.shape[1]
    out = torch.empty((len(ids), width), dtype=table.dtype, device=table.device)
    embed_kernel[(len(ids),)](
        out, ids, last, table, scale, WIDTH=width, PADDED=power_of_two(width), num_warps=4
    )
    return out


def _embed_narrow(ids: Tensor, last: Tensor, table: NarrowMatrix, scale: float) -> Tensor:
    out = torch.empty((len(ids), table.k), dtype=table.dtype, device=ids.device)
    narrow_embed_kernel[(len(ids),)](
        out,
        ids,
        last,
        table.numbers,
        table.scales,
        table.numbers if table.zeros is None else table.zeros,
        scale,
        N=table.n,
        WIDTH=table.k,
        BYTES=bytes_of_row(table),
        GROUP=group_of(table.held),
        HELD=table.held,
        PADDED=power_of_two(table.k),
        num_warps=4,
    )
    return out
