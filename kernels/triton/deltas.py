"""What adapters of low rank add to linears, of each row its own adapter's: y += (x A^T) B^T, as in
Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285).

Two kernels: the first makes the few numbers of each row, in pieces of its features, the second sums
the pieces and adds to y's columns. Rows are sorted once a step. A program takes a tile of them and
one adapter of these after the other; of few rows, where programs are few, each adapter has programs
of its own. No size depends on whose rows there are, so a graph can hold it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import INTERPRETED
from kernels.triton.numbers import product

PARTS = 3
"""Layers that one matrix has at most: queries, keys, values."""
FIELDS = 4
"""Of a part at a place: where A is in memory, where B is, how many ranks, and nothing, so that all
matrices' tables begin at multiples of 16 bytes: one kernel is compiled for them."""
_FEW_ROWS = 256
_ALIGNED = 16
"""Numbers: rows of A and B begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of tiles, and the pieces in which sums are taken: by how many rows there are, and nothing
    else of a row's neighbours."""

    rows: int
    ranks: int
    """That one program of the first kernel computes; the second takes 16 at a time."""
    step: int
    pieces: int
    columns: int = 128


_FEW = Sizes(rows=16, ranks=16, step=128, pieces=8)
_MANY = Sizes(rows=64, ranks=64, step=64, pieces=4)


@dataclass(frozen=True, slots=True)
class Rows:
    places: Tensor
    """int32 [T]: of each row its adapter's, ascending; -1: none"""
    order: Tensor
    """int64 [T]: which row each is"""


@dataclass(frozen=True, slots=True)
class Deltas:
    """Of one matrix, those of all places."""

    table: Tensor
    """int64 [places, PARTS, FIELDS], of whose strides the last two are as if it lay together; of a
    part that adds nothing no ranks. What it names is of x's dtype, A [ranks, k] and B transposed
    [ranks, columns], their rows as `aligned` has them."""
    widths: tuple[int, ...]
    """Of the matrix's parts."""
    most_ranks: int
    """Of a part."""
    at_once: int
    """Different places in a step, at most."""


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    x,
    x_stride,
    places,
    order,
    table,
    place_stride,
    low,
    rows,
    inner,
    MOST_RANKS: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    STEP: tl.constexpr,
    LAYERS: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """low [PIECES, rows, LAYERS, MOST_RANKS] = x [rows, inner] times A^T, by pieces of inner; of an
    adapter's ranks up to a multiple of 16."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1) % PIECES
    tiles: tl.constexpr = (MOST_RANKS + RANKS - 1) // RANKS
    layer, tile = tl.program_id(1) // PIECES // tiles, tl.program_id(1) // PIECES % tiles
    js = tile * RANKS + tl.arange(0, RANKS)
    span = tl.cdiv(tl.cdiv(inner, PIECES), STEP) * STEP
    down_stride = tl.cdiv(inner, 16) * 16
    from_rows = x + tl.load(order + at, mask=at < rows, other=0)[:, None] * x_stride
    to = low + ((piece * rows + at[:, None]).to(tl.int64) * LAYERS + layer) * MOST_RANKS
    left = tl.load(places + at, mask=at < rows, other=-1)
    place, number = tl.max(left, 0), 0
    while place >= 0:
        own = left == place
        entry = table + place.to(tl.int64) * place_stride + layer * FIELDS
        ranks = tl.load(entry + 2).to(tl.int32)
        mine = number % tl.num_programs(2) == tl.program_id(2)
        if mine & (tile * RANKS < ranks):
            down = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
            down = tl.multiple_of(down, 16)
            from_down = down + js[None, :] * down_stride
            total = tl.zeros([ROWS, RANKS], tl.float32)
            for begin in range(piece * span, min((piece + 1) * span, inner), STEP):
                ks = begin + tl.arange(0, STEP)
                mask = own[:, None] & (ks[None, :] < inner)
                a = tl.load(from_rows + ks[None, :], mask=mask, other=0.0)
                mask = (js[None, :] < ranks) & (ks[:, None] < inner)
                b = tl.load(from_down + ks[:, None], mask=mask, other=0.0)
                total += product(a, b, WIDE)
            mask = own[:, None] & (js[None, :] < tl.cdiv(ranks, 16) * 16)  # zeros behind the last
            tl.store(to + js[None, :], total, mask=mask)
        left = tl.where(own, -1, left)
        place, number = tl.max(left, 0), number + 1


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(
    y,
    y_stride,
    places,
    order,
    table,
    place_stride,
    low,
    rows,
    width0,
    width1,
    width2,
    MOST_RANKS: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAYERS: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """y [rows, widths] += low [PIECES, rows, LAYERS, MOST_RANKS], summed over pieces, times B^T."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    layer = tl.program_id(1) % LAYERS
    begin = tl.program_id(1) // LAYERS * COLUMNS
    columns = begin + tl.arange(0, COLUMNS)
    width = tl.where(layer == 0, width0, tl.where(layer == 1, width1, width2))
    first = tl.where(layer == 0, 0, tl.where(layer == 1, width0, width0 + width1))
    up_stride = tl.cdiv(width, 16) * 16
    to = y + tl.load(order + at, mask=at < rows, other=0)[:, None] * y_stride
    to += first + columns[None, :]
    from_low = low + (at[:, None].to(tl.int64) * LAYERS + layer) * MOST_RANKS
    piece_stride = rows.to(tl.int64) * LAYERS * MOST_RANKS
    left = tl.load(places + at, mask=at < rows, other=-1)
    place, number = tl.max(left, 0), 0
    while place >= 0:
        own = left == place
        entry = table + place.to(tl.int64) * place_stride + layer * FIELDS
        ranks = tl.load(entry + 2).to(tl.int32)
        mine = number % tl.num_programs(2) == tl.program_id(2)
        if mine & (ranks > 0) & (begin < width):
            up = tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty))
            up = tl.multiple_of(up, 16)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for rank in range(0, ranks, 16):
                js = rank + tl.arange(0, 16)
                a = tl.zeros([ROWS, 16], tl.float32)
                for piece in tl.static_range(PIECES):
                    from_piece = from_low + piece * piece_stride
                    a += tl.load(from_piece + js[None, :], mask=own[:, None], other=0.0)
                mask = (js[:, None] < ranks) & (columns[None, :] < width)
                b = tl.load(up + js[:, None] * up_stride + columns[None, :], mask=mask, other=0.0)
                total += product(a.to(b.dtype), b, WIDE)
            mask = own[:, None] & (columns[None, :] < width)
            total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
            tl.store(to, total.to(y.dtype.element_ty), mask=mask)
        left = tl.where(own, -1, left)
        place, number = tl.max(left, 0), number + 1


def rows_of(places: Tensor) -> Rows:
    """places: int32 [T], of each row in the step's order."""
    return Rows(*places.sort(stable=True))


def add_deltas(y: Tensor, x: Tensor, of: Rows, deltas: Deltas) -> None:
    """To y [T, n], in place, of x [T, k], of y's dtype. Of both rows need not lie side by side."""
    rows, inner = x.shape
    sizes = _FEW if rows <= _FEW_ROWS else _MANY
    layers, most = len(deltas.widths), aligned(deltas.most_ranks)
    pieces = min(sizes.pieces, triton.cdiv(inner, sizes.step))
    tiles = triton.cdiv(rows, sizes.rows)
    ways = min(rows, deltas.at_once) if sizes is _FEW else 1
    low = torch.empty((pieces, rows, layers, most), dtype=torch.float32, device=x.device)
    given = (of.places, of.order, deltas.table, deltas.table.stride(0), low, rows)
    common = {
        "MOST_RANKS": most,
        "PIECES": pieces,
        "ROWS": sizes.rows,
        "LAYERS": layers,
        "FIELDS": FIELDS,
        "WIDE": INTERPRETED,
        "num_warps": 4,
    }
    grid = tiles, layers * triton.cdiv(most, sizes.ranks) * pieces, ways
    own = {"RANKS": sizes.ranks, "STEP": sizes.step, "num_stages": 3}
    shrink_kernel[grid](x, x.stride(0), *given, inner, **own, **common)
    grid = tiles, layers * triton.cdiv(max(deltas.widths), sizes.columns), ways
    widths = (*deltas.widths, 0, 0)[:PARTS]
    own = {"COLUMNS": sizes.columns, "num_stages": 2}
    expand_kernel[grid](y, y.stride(0), *given, *widths, **own, **common)


def aligned(width: int) -> int:
    """Numbers from a row of A or B to the next."""
    return -(-width // _ALIGNED) * _ALIGNED
