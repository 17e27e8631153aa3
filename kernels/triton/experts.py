"""Layers of experts: products of rows that are ordered by expert, each with its expert's matrix.

Shapes: T rows, of which each chooses C of E experts. Everything has a place that the shapes alone
set, so that a graph can hold it: nothing is waited for, and tiles that a step does not need end at
once. Of few rows one program finds all of it (`route_kernel`), for launches are what takes time
there: as torch's operations there are thirty.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.cpu.matrix import Held
from kernels.triton.launch import INTERPRETED, power_of_two
from kernels.triton.linear import bytes_of_row, height, in_int8, operands, step_of
from kernels.triton.matrix import NarrowMatrix
from kernels.triton.narrow import narrow_products
from kernels.triton.numbers import product

_FEW, _MANY = 16, 64
"""Rows of a tile, by how many an expert has in the mean."""
_COLUMNS, _STEP, _SPAN = 64, 64, 1024
_NARROW_COLUMNS = 128
_BAND, _ROUTED = 2**12, 2**14
"""Numbers of logits, both ways filled up to powers of two: that one program takes at a time, as its
registers have room for, and that it takes at all."""
_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Grouped:
    """Choices, ordered by expert, in tiles of one expert each."""

    order: Tensor
    """int32 [T C]: which choice, t C + c, each is"""
    places: Tensor
    """int32 [T C]: of each choice its place in that order"""
    experts: Tensor
    """int32 [tiles]: whose tile it is; E: nobody's"""
    first: Tensor
    """int32 [tiles]: its first choice"""
    end: Tensor
    """int32 [tiles]: where its expert's end"""
    rows: int
    """Of a tile"""
    count: int
    """E"""


def routed(logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Grouped]:
    """logits: [T, E]. Gives the shares of `reference.route`, and its choices in order."""
    rows, count = logits.shape
    high, wide = height(rows), power_of_two(count)
    if not rows or high * wide > _ROUTED:
        shares, experts = reference.route(logits, chosen, normed)
        return shares, grouped(experts, count)
    choices, band = rows * chosen, min(high, max(1, _BAND // wide))
    tile, tiles = tiles_of(choices, count)

    def ints(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=logits.device)

    shares = torch.empty((rows, chosen), dtype=torch.float32, device=logits.device)
    of = Grouped(ints(choices), ints(choices), ints(tiles), ints(tiles), ints(tiles), tile, count)
    route_kernel[(1,)](
        of.order,
        of.places,
        of.experts,
        of.first,
        of.end,
        ints(choices),
        shares,
        logits,
        logits.stride(0),
        rows,
        tile,
        tiles,
        COUNT=count,
        CHOSEN=chosen,
        NORMED=normed,
        BAND=band,
        PADDED=wide,
        num_warps=max(1, band * wide // 256),
    )
    return shares, of


def tiles_of(choices: int, count: int) -> tuple[int, int]:
    """Rows of a tile, and how many tiles there may be."""
    rows = _FEW if choices <= _FEW * count else _MANY
    return rows, choices // rows + min(choices, count)


def grouped(chosen: Tensor, count: int) -> Grouped:
    """chosen: int64 [T, C], of `count` experts."""
    choices, device = chosen.numel(), chosen.device
    rows, most = tiles_of(choices, count)
    sorted_ones, order = chosen.reshape(-1).sort(stable=True)
    starts = torch.searchsorted(sorted_ones, torch.arange(count + 1, device=device))
    tiles = (starts.diff() + rows - 1) // rows
    ends = tiles.cumsum(0)
    which = torch.arange(most, device=device)
    experts = torch.searchsorted(ends, which, right=True)
    own = experts.clamp(max=count - 1)
    first = starts[own] + (which - (ends - tiles)[own]) * rows
    places = torch.empty_like(order)
    places[order] = torch.arange(choices, device=device)
    return Grouped(
        order.int(), places.int(), experts.int(), first.int(), starts[own + 1].int(), rows, count
    )


@triton.jit(do_not_specialize=["rows", "tile", "tiles"])
def route_kernel(
    order,
    places,
    experts,
    first,
    end,
    whose,
    shares,
    logits,
    stride,
    rows,
    tile,
    tiles,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMED: tl.constexpr,
    BAND: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Fills a `Grouped`, of `tiles` tiles of `tile` rows, and shares [rows, CHOSEN]; whose: int32,
    likewise. A row chooses an expert once, so choices of an expert are in the order of rows."""
    every = tl.arange(0, PADDED)
    expert = every[None, :]
    counts = tl.zeros([PADDED], tl.int32)
    for begin in range(0, rows, BAND):
        row = begin + tl.arange(0, BAND)[:, None]
        mask = (row < rows) & (expert < COUNT)
        x = tl.load(logits + row.to(tl.int64) * stride + expert, mask=mask, other=0.0)
        x = tl.where(expert < COUNT, x.to(tl.float32), float("-inf"))
        # As whole numbers, in the same order, so that what is no number is some choice, too. Below
        # all of them there is room: for experts that there are not, and for which choice one is.
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        keys = tl.where(x == x, bits ^ ((bits >> 31) & _HIGHEST), _HIGHEST)
        keys = tl.where(expert < COUNT, keys, _LOWEST)
        for choice in range(CHOSEN):
            best = tl.max(keys, 1)[:, None]
            found = tl.min(tl.where(keys == best, expert, PADDED), 1)[:, None]
            keys = tl.where(expert == found, _LOWEST + 1 + choice, keys)
        taken = (keys > _LOWEST) & (keys <= _LOWEST + CHOSEN)
        share = tl.exp(x - tl.max(x, 1)[:, None])
        share /= tl.sum(share, 1)[:, None]
        if NORMED:
            share /= tl.sum(tl.where(taken, share, 0.0), 1)[:, None]
        taken &= row < rows
        own = row * CHOSEN + keys - _LOWEST - 1
        tl.store(shares + own, share, mask=taken)
        tl.store(whose + own, expert + 0 * own, mask=taken)
        counts += tl.sum(taken.to(tl.int32), 0)
    tl.debug_barrier()  # choices are read by other threads than wrote them

    starts = tl.cumsum(counts, 0) - counts
    at = starts
    for begin in range(0, rows, BAND):
        row = begin + tl.arange(0, BAND)
        which = tl.full([BAND, PADDED], -1, tl.int32)
        for choice in tl.static_range(CHOSEN):
            found = tl.load(whose + row * CHOSEN + choice, mask=row < rows, other=-1)
            which = tl.where(expert == found[:, None], choice, which)
        ones = (which >= 0).to(tl.int32)
        place = at[None, :] + tl.cumsum(ones, 0) - ones
        own = row[:, None] * CHOSEN + which
        tl.store(places + own, place, mask=which >= 0)
        tl.store(order + place, own, mask=which >= 0)
        at += tl.sum(ones, 0)

    needed = tl.cdiv(counts, tile)
    begins = tl.cumsum(needed, 0) - needed
    for number in range(0, tl.cdiv(rows, tile)):
        tl.store(experts + begins + number, every, mask=number < needed)
        tl.store(first + begins + number, starts + number * tile, mask=number < needed)
        tl.store(end + begins + number, starts + counts, mask=number < needed)
    for spare in range(tl.sum(needed, 0), tiles, PADDED):
        tl.store(experts + spare + every, COUNT, mask=spare + every < tiles)


@triton.jit
def experts_kernel(
    out,
    x,
    x_stride,
    x_scales,
    weights,
    scales,
    zeros,
    order,
    experts,
    first,
    end,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    BYTES: tl.constexpr,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out [T C, WIDTH] = rows of x [.., INNER] times weights [COUNT, WIDTH, INNER], HELD in few
    bits, or "", as rows are. CHOSEN: the choices of a row of x, whose `order` it is; 0: x has a row
    for each, in that order."""
    which = tl.program_id(0)
    expert = tl.load(experts + which).to(tl.int64)
    if expert >= COUNT:
        return
    at = tl.load(first + which) + tl.arange(0, ROWS)
    inside = at < tl.load(end + which)
    rows = at
    if CHOSEN > 0:
        rows = tl.load(order + at, mask=inside, other=0) // CHOSEN
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if HELD != "":
        own = expert.to(tl.int32) * WIDTH + tl.minimum(columns, WIDTH - 1)
        turned = narrow_products(
            x,
            x_stride,
            rows,
            inside,
            weights,
            scales,
            zeros,
            own,
            0,
            BYTES // STEP,
            COUNT * WIDTH,
            INNER,
            BYTES,
            HELD,
            ROWS,
            COLUMNS,
            STEP,
            WIDE,
        )
        if HELD == "w8a8":
            turned *= tl.load(x_scales + rows, mask=inside, other=0.0)[None, :]
        total = tl.trans(turned)
    else:
        own = weights + expert * WIDTH * INNER + columns[None, :].to(tl.int64) * INNER
        from_rows = x + rows[:, None].to(tl.int64) * x_stride
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, INNER, STEP):
            ks = begin + tl.arange(0, STEP)
            mask = inside[:, None] & (ks[None, :] < INNER)
            a = tl.load(from_rows + ks[None, :], mask=mask, other=0.0)
            mask = (columns[None, :] < WIDTH) & (ks[:, None] < INNER)
            b = tl.load(own + ks[:, None], mask=mask, other=0.0)
            total += product(a, b, WIDE)
    to = out + at[:, None].to(tl.int64) * WIDTH + columns[None, :]
    mask = inside[:, None] & (columns[None, :] < WIDTH)
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def mix_kernel(
    out, x, places, shares, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, SPAN: tl.constexpr
):
    """Of each row the sum of its choices' rows of x, by `places`, times their shares."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = at < WIDTH
    total = tl.zeros([SPAN], tl.float32)
    for choice in range(CHOSEN):
        place = tl.load(places + row * CHOSEN + choice).to(tl.int64)
        share = tl.load(shares + row * CHOSEN + choice)
        total += share * tl.load(x + place * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, total.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class _Given:
    """Of weights what the kernel is given."""

    parts: tuple[Tensor, Tensor, Tensor]
    width: int
    held: Held = ""
    bytes: int = 0
    """Of a row"""
    columns: int = _COLUMNS
    step: int = _STEP
    warps: int = 4


def _given(weights: Tensor | NarrowMatrix, groups: Grouped) -> _Given:
    if isinstance(weights, Tensor):
        return _Given((weights, weights, weights), weights.shape[1])
    return _Given(
        operands(weights),
        weights.n // groups.count,
        weights.held,
        bytes_of_row(weights),
        _NARROW_COLUMNS,
        step_of(weights),
        4 if groups.rows == _FEW else 8,
    )


def of_experts(x: Tensor, weights: Tensor | NarrowMatrix, groups: Grouped, chosen: int) -> Tensor:
    """x: [T, inner], a row for each `chosen` choices, or with `chosen` 0 [T C, inner], one for each
    in their order; weights: [E, width, inner], or such of few bits, one expert behind the other.
    Gives [T C, width], in that order."""
    given, inner = _given(weights, groups), x.shape[1]
    out = torch.empty((len(groups.order), given.width), dtype=x.dtype, device=x.device)
    x_scales = x
    if given.held == "w8a8":
        x, x_scales = in_int8(x)
    experts_kernel[(len(groups.experts), triton.cdiv(given.width, given.columns))](
        out,
        x,
        x.stride(0),
        x_scales,
        *given.parts,
        groups.order,
        groups.experts,
        groups.first,
        groups.end,
        WIDTH=given.width,
        INNER=inner,
        COUNT=groups.count,
        CHOSEN=chosen,
        BYTES=given.bytes,
        HELD=given.held,
        ROWS=groups.rows,
        COLUMNS=given.columns,
        STEP=given.step,
        WIDE=INTERPRETED,
        num_warps=given.warps,
        num_stages=3,
    )
    return out


def mix(x: Tensor, groups: Grouped, shares: Tensor) -> Tensor:
    """x: [T C, width], as `of_experts` gives it; shares: float32 [T, C]. Gives [T, width]."""
    rows, chosen = shares.shape
    width = x.shape[1]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    mix_kernel[(rows, triton.cdiv(width, _SPAN))](
        out, x, groups.places, shares, WIDTH=width, CHOSEN=chosen, SPAN=_SPAN, num_warps=4
    )
    return out
