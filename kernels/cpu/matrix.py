"""Weights as the kernels read them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import structures as c

PANEL = 16
"""Rows of a matrix that lie together, and tokens of a KV block that do."""
GROUP = 32
"""Of a matrix with scales by groups so many of a row have one."""
BYTES_STEP = 4
"""Of an int8 matrix k is a multiple of so much."""
NIBBLES_STEP = 2 * GROUP
"""Of an int4 matrix, and of an int8 one by groups, k is a multiple of so much."""
ZEROS_STEP = 4 * GROUP
"""Of an int4 matrix with zeros, likewise."""
E4M3_GROUP = 8 * PANEL
"""Of a matrix of e4m3 with scales by blocks so many of a row have one; k is a multiple of it."""
Held = Literal[
    "", "int8", "int4", "int8_groups", "int4_zeros", "fp8", "fp8_blocks", "w8a8"
]  # fmt: skip
"""A format of few bits of its own, or that of the program's rows."""
E4M3 = np.array(
    [
        (-1) ** (bits >> 7)
        * (2.0 ** ((bits >> 3 & 15) - 7) * (1 + (bits & 7) / 8) if bits & 120 else (bits & 7) / 512)
        for bits in range(256)
    ],
    np.float32,
)
"""What its bits stand for."""
E4M3[[0x7F, 0xFF]] = np.nan


@dataclass(frozen=True, slots=True)
class Narrow:
    """How a panel lies that is of few bits, see native/tile.h."""

    weights: int
    """Of native/linear.h."""
    bits: int
    step: int
    """k is a multiple of it. By groups: of a block, before which its scales lie, and its zeros."""
    head: int
    """Bytes of these; 0: the panel has a scale, a float, for each row, behind all."""

    def panel_bytes(self, k: int) -> int:
        numbers = PANEL * k * self.bits // 8
        return numbers + (k // self.step * self.head if self.head else PANEL * 4)


NARROW: dict[Held, Narrow] = {
    "int8": Narrow(c.INT8, 8, BYTES_STEP, 0),
    "int4": Narrow(c.INT4, 4, NIBBLES_STEP, PANEL * 2 * 2),
    "int8_groups": Narrow(c.INT8_GROUPS, 8, NIBBLES_STEP, PANEL * 2 * 2),
    "int4_zeros": Narrow(c.INT4_ZEROS, 4, ZEROS_STEP, PANEL * 4 * 3),
    "fp8": Narrow(c.FP8, 8, BYTES_STEP, 0),
    "fp8_blocks": Narrow(c.FP8_BLOCKS, 8, E4M3_GROUP, PANEL * 4),
    "w8a8": Narrow(c.W8A8, 8, BYTES_STEP, 0),
}


class Matrix:
    """Weights [n, k] in panels (native/tile.h): of float32, or uint16 that are bfloat16's bits, in
    the program's format; or the bytes of a format of few bits, in any."""

    def __init__(
        self,
        panels: NDArray[np.generic],
        n: int,
        k: int,
        bias: NDArray[np.float32] | None = None,
        held: Held = "",
    ) -> None:
        """`panels`: [elements_of(n, k, held)]; `bias`: [n]."""
        assert len(panels) == elements_of(n, k, held)
        self.panels, self.n, self.k, self.bias, self.held = panels, n, k, bias, held

    def rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Those rows, [len(ids), k]. Slow: each lies all over its panel."""
        places = np.asarray(ids, np.intp)
        of_panel = self.panels.reshape(-1, elements_of(PANEL, self.k, self.held))
        panels, columns = of_panel[places // PANEL], places % PANEL
        assert self.held != "w8a8"  # in the order of its instruction set, and no table's
        if self.held in ("int8", "fp8"):
            numbers = _by_steps(panels[:, : self.k * PANEL], columns, 2)
            scales = np.ascontiguousarray(panels[:, self.k * PANEL :]).view(np.float32)
            of_rows: NDArray[np.float32] = scales[np.arange(len(places)), columns][:, None]
            return self._of_bytes(numbers) * of_rows
        if self.held:
            return self._rows_by_groups(panels, columns)
        found = _by_steps(panels, columns, 1 if self.panels.itemsize == 4 else 2)
        if self.panels.itemsize == 2:
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found.astype(np.float32, copy=False)

    def _of_bytes(self, numbers: NDArray[np.uint8]) -> NDArray[np.float32]:
        if self.held in ("fp8", "fp8_blocks"):
            return np.nan_to_num(E4M3[numbers])  # scales are NaN there
        return numbers.view(np.int8).astype(np.float32)

    def _rows_by_groups(
        self, panels: NDArray[np.generic], columns: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        narrow, count = NARROW[self.held], len(columns)
        group, of_scales = GROUP, "<f2"
        if self.held == "fp8_blocks":
            group, of_scales = E4M3_GROUP, "<f4"
        groups, each = self.k // group, np.arange(count)
        of_block = narrow.panel_bytes(narrow.step)
        blocks = panels.view(np.uint8).reshape(count, self.k // narrow.step, of_block)
        ends = narrow.step // group * PANEL * np.dtype(of_scales).itemsize  # of a block's scales
        found = np.ascontiguousarray(blocks[:, :, :ends]).view(of_scales)
        scales = found.reshape(count, groups, PANEL)[each, :, columns, None].astype(np.float32)
        content = blocks[:, :, narrow.head :].reshape(count, PANEL * self.k * narrow.bits // 8)
        if narrow.bits == 8:
            numbers = _by_steps(content, columns, 2)
            values = self._of_bytes(numbers).reshape(count, groups, group)
            return (values * scales).reshape(count, self.k)
        pairs = content.reshape(count, self.k // 4, PANEL, 2)[each, :, columns]
        nibbles = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(count, groups, GROUP)
        zeros: Any = 8
        if self.held == "int4_zeros":
            of_blocks = np.ascontiguousarray(blocks[:, :, ends : narrow.head])
            zeros = of_blocks.reshape(count, groups, PANEL)[each, :, columns, None]
        values = nibbles.astype(np.float32) - np.float32(zeros)
        return (values * scales).reshape(count, self.k)


def _by_steps(panels: NDArray[Any], columns: NDArray[np.intp], step: int) -> NDArray[Any]:
    """Of panels [rows, PANEL k] a column each, [rows, k]; `step` of its numbers lie together."""
    count, k = len(columns), panels.shape[1] // PANEL
    steps = panels.reshape(count, k // step, PANEL, step)[np.arange(count), :, columns]
    return steps.reshape(count, k)


def elements_of(n: int, k: int, held: Held) -> int:
    """Of a matrix in panels with all that belongs to them, of few bits bytes; the last panel is
    whole, its missing rows are zeros."""
    return -(-n // PANEL) * (NARROW[held].panel_bytes(k) if held else PANEL * k)


@np.errstate(invalid="ignore")
def quantized(rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Of rows [n, k] the nearest int8 of -127 to 127, and what each row's are to be multiplied
    with, [n]: what lies furthest from 0 is met exactly. A row with NaN or infinity is all NaN."""
    scales = np.abs(rows).max(axis=1, initial=0) / np.float32(127)
    scales[np.isinf(scales)] = np.nan
    steps = np.where(scales > 0, scales, np.float32(1))
    # A subnormal scale is rough: the furthest may be more than 127 of it.
    return np.clip(np.rint(rows / steps[:, None]), -127, 127).astype(np.int8), scales


@np.errstate(invalid="ignore")
def in_e4m3(rows: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Likewise the bits of the nearest e4m3, ties to even, up to 448."""
    scales = np.abs(rows).max(axis=1, initial=0) / np.float32(448)
    scales[np.isinf(scales)] = np.nan
    steps = np.where(scales > 0, scales, np.float32(1))
    numbers = np.clip(rows / steps[:, None], -448, 448)
    bits = numbers.view(np.uint32)
    nearest = ((bits + 0x7FFFF + (bits >> 20 & 1)) << 1 >> 21) - (120 << 3)
    furthest = np.abs(numbers)
    smallest = np.rint(np.nan_to_num(furthest) * 512).astype(np.uint32)
    found = np.where(furthest < 2**-6, smallest, nearest) | bits >> 31 << 7
    found[np.isnan(scales)] = 0
    return found.astype(np.uint8), scales


@np.errstate(invalid="ignore")
def grouped(rows: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Of rows [n, k] the nearest int4, each 8 more than it is, and what each group's are to be
    multiplied with, [n, k / GROUP]: what lies furthest from 0 is the one that is -8. A group with
    NaN or infinity is all NaN."""
    groups = rows.reshape(len(rows), -1, GROUP)
    at = np.abs(groups).argmax(axis=2)[:, :, None]
    furthest, most = np.take_along_axis(groups, at, 2), np.finfo(np.float16).max
    held = np.clip(furthest / -8, -most, most)
    scales = np.where(np.isfinite(furthest), held, np.nan).astype(np.float16)
    steps = np.where(scales != 0, scales, 1).astype(np.float32)
    found = np.clip(np.rint(groups / steps), -8, 7) + 8
    return found.astype(np.uint8).reshape(rows.shape), scales[:, :, 0]


def rounded(rows: NDArray[np.float32], to: str) -> NDArray[np.float32]:
    """Rows [n, k], as the values that their numbers in a format stand for."""
    if to in ("int8", "w8a8"):
        found, of_rows = quantized(rows)
        return found * of_rows[:, None]
    if to == "fp8":
        bits, of_rows = in_e4m3(rows)
        return E4M3[bits] * of_rows[:, None]
    nibbles, of_groups = grouped(rows)
    scales = np.repeat(of_groups.astype(np.float32), GROUP, axis=1)
    return (nibbles.astype(np.float32) - 8) * scales
