"""Rows times a matrix of few bits.

Of few rows it is a matter of reading the matrix once, by as many multiprocessors as there are:
where its columns do not make enough programs, k is cut in splits, whose sums `sum_kernel` puts
together in their order. Shapes alone say how, so a graph can hold it.

How many rows there are is seen by a kernel's compiler as the next power of two alone (`height`), so
a matrix has a kernel for each of these, and an engine that ran `heights` has compiled all.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cpu.matrix import NARROW
from kernels.triton.launch import INTERPRETED, power_of_two
from kernels.triton.matrix import CHUNK, NarrowMatrix, group_of
from kernels.triton.narrow import narrow_products
from kernels.triton.numbers import nearest

_STEP = 128
"""Bytes of a row at a time, at most, where nothing else says how many."""
_LEAST_BYTES = 256
"""Of a row, in a split."""
_SPAN = 1024


@triton.jit(do_not_specialize=["count"])
def linear_kernel(
    x,
    x_stride,
    numbers,
    scales,
    zeros,
    out,
    count,
    x_scales,
    bias,
    N: tl.constexpr,
    K: tl.constexpr,
    BYTES: tl.constexpr,
    HELD: tl.constexpr,
    BIASED: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out [SPLITS, count, N], of as many parts of the steps."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    inside = rows < count
    each: tl.constexpr = (BYTES // STEP + SPLITS - 1) // SPLITS
    total = narrow_products(
        x,
        x_stride,
        rows,
        inside,
        numbers,
        scales,
        zeros,
        tl.minimum(columns, N - 1),
        split * each,
        tl.minimum((split + 1) * each, BYTES // STEP),
        N,
        K,
        BYTES,
        HELD,
        ROWS,
        COLUMNS,
        STEP,
        WIDE,
    )
    if HELD == "w8a8":
        total *= tl.load(x_scales + rows, mask=inside, other=0.0)[None, :]
    if BIASED and SPLITS == 1:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    to = out + (split * count + rows)[None, :].to(tl.int64) * N + columns[:, None]
    mask = inside[None, :] & (columns < N)[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(out, parts, bias, N, BIASED: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr):
    """Of a row the sum of its splits' parts [SPLITS, count, N]."""
    row, count = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = at < N
    total = tl.zeros([SPAN], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (row + split * count) * N + at, mask=mask, other=0.0)
    if BIASED:
        total += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def int8_kernel(
    out, scales, x, x_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, LEAST: tl.constexpr
):
    """A row as numbers of -127 to 127 with one scale; NaN or infinity make it NaN."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    values = tl.load(x + row * x_stride + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    furthest = tl.maximum(tl.max(tl.abs(values), 0), LEAST)
    tl.store(scales + row, furthest / 127.0 + tl.sum(values - values, 0))
    found = nearest(tl.minimum(tl.maximum(values * (127.0 / furthest), -127.0), 127.0))
    tl.store(out + row * WIDTH + at, found.to(tl.int32).to(tl.int8), mask=at < WIDTH)


def in_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.in_int8`."""
    rows, width = x.shape
    found = torch.empty((rows, width), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    padded = power_of_two(width)
    int8_kernel[(rows,)](
        found,
        scales,
        x,
        x.stride(0),
        WIDTH=width,
        PADDED=padded,
        LEAST=2.0**-64,
        num_warps=4 if padded <= 4096 else 8,
    )
    return found, scales


def linear(x: Tensor, matrix: NarrowMatrix, bias: Tensor | None = None) -> Tensor:
    """See `reference.narrow_linear`: x [T, k], whose rows need not lie side by side, the matrix
    [n, k], bias [n]; gives [T, n] of x's dtype."""
    count, n = len(x), matrix.n
    out = torch.empty((count, n), dtype=x.dtype, device=x.device)
    if not count:
        return out
    high = height(count)
    rows, columns, how = tile(high, x.dtype)
    step = step_of(matrix)
    tiles = triton.cdiv(high, rows) * triton.cdiv(n, columns)
    splits = splits_of(tiles, high, bytes_of_row(matrix), step, x.device)
    parts = out
    if splits > 1:
        parts = torch.empty((splits, count, n), dtype=torch.float32, device=x.device)
    x_scales = matrix.scales
    if matrix.held == "w8a8":
        x, x_scales = in_int8(x)
    linear_kernel[(triton.cdiv(count, rows), triton.cdiv(n, columns), splits)](
        x,
        x.stride(0),
        *operands(matrix),
        parts,
        count,
        x_scales,
        out if bias is None else bias,
        N=n,
        K=matrix.k,
        BYTES=bytes_of_row(matrix),
        HELD=matrix.held,
        BIASED=bias is not None,
        SPLITS=splits,
        ROWS=rows,
        COLUMNS=columns,
        STEP=step,
        WIDE=INTERPRETED,
        **how,
    )
    if splits > 1:
        sum_kernel[(count, triton.cdiv(n, _SPAN))](
            out,
            parts,
            out if bias is None else bias,
            n,
            BIASED=bias is not None,
            SPLITS=splits,
            SPAN=_SPAN,
            num_warps=4,
        )
    return out


def height(rows: int) -> int:
    """What so many rows are compiled as."""
    return power_of_two(rows)


def heights(most: int) -> list[int]:
    """Numbers of rows, up to `most`, that are compiled as all from 1 to `most` are."""
    found = [1 << power for power in range(most.bit_length())]
    return [rows for rows in found if rows < most] + [most]


def tile(height: int, dtype: torch.dtype) -> tuple[int, int, dict[str, int]]:
    """Rows and columns of a tile, and how it is compiled. Products of float32 take registers."""
    found = min(128 if dtype == torch.bfloat16 else 16, max(16, height))
    if found <= 32:
        return found, 128, {"num_warps": 4, "num_stages": 4}
    return found, 128, {"num_warps": 8, "num_stages": 3}


def operands(matrix: NarrowMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """What kernels are given of it; zeros are only read where there are some."""
    numbers = matrix.numbers.view(torch.int8 if matrix.held == "w8a8" else torch.int32)
    return numbers, matrix.scales, matrix.numbers if matrix.zeros is None else matrix.zeros


def bytes_of_row(matrix: NarrowMatrix) -> int:
    return matrix.numbers.shape[1] * CHUNK


def step_of(matrix: NarrowMatrix) -> int:
    """Bytes of a row at a time: those of a group where it has groups."""
    if group := group_of(matrix.held):
        return CHUNK if NARROW[matrix.held].bits == 4 else group
    size = bytes_of_row(matrix)
    return min(_STEP, size & -size)


def splits_of(tiles: int, rows: int, size: int, step: int, device: torch.device) -> int:
    """Parts of k, a power of two: as many as fill the device, of which none is too short, and whose
    sums, written and read again, are a quarter of the matrix's bytes at most."""
    most = min(_programs(device) // tiles, size // max(_LEAST_BYTES, step), size // (32 * rows))
    return 1 << max(1, min(16, most)).bit_length() - 1


@functools.cache
def _programs(device: torch.device) -> int:
    """Two a multiprocessor, as registers have room for; where there is no GPU, as on an H100."""
    count = 132
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return 2 * count
