"""Weights as the kernels read them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

PANEL = 16
"""Rows of a matrix that lie together, and tokens of a KV block that do."""
BYTES_STEP = 4
"""Of an int8 matrix k is a multiple of so much."""
GROUP = 32
"""Of an int4 matrix so many of a row have a scale."""
NIBBLES_STEP = 2 * GROUP
"""Of an int4 matrix k is a multiple of so much."""
_SCALES = PANEL * 4
"""Bytes of a panel's scales, which lie behind its int8; or before each two groups of its int4."""


class Matrix:
    """Weights [n, k] in panels (native/tile.h): of float32, or uint16 that are bfloat16's bits, in
    the program's format; in any of int8 with a scale for each row, or uint8 that are int4, two in
    each, with scales of groups."""

    def __init__(
        self, panels: NDArray[np.generic], n: int, k: int, bias: NDArray[np.float32] | None = None
    ) -> None:
        """`panels`: [elements_of(n, k, its dtype)]; `bias`: [n]."""
        assert len(panels) == elements_of(n, k, panels.dtype)
        self.panels, self.n, self.k, self.bias = panels, n, k, bias

    def rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Those rows, [len(ids), k]. Slow: each lies all over its panel."""
        places, step = np.asarray(ids, np.intp), 1 if self.panels.itemsize == 4 else 2
        if self.panels.dtype == np.uint8:
            return self._rows_of_nibbles(places)
        of_panel = self.panels.reshape(-1, elements_of(PANEL, self.k, self.panels.dtype))
        panels = of_panel[:, : self.k * PANEL].reshape(-1, self.k // step, PANEL, step)
        found = panels[places // PANEL, :, places % PANEL].reshape(len(places), self.k)
        if self.panels.itemsize == 2:
            return (found.astype(np.uint32) << 16).view(np.float32)
        if self.panels.dtype == np.int8:
            scales = of_panel[:, self.k * PANEL :].copy().view(np.float32)
            of_rows: NDArray[np.float32] = scales[places // PANEL, places % PANEL][:, None]
            return found.astype(np.float32) * of_rows
        return found.astype(np.float32, copy=False)

    def _rows_of_nibbles(self, places: NDArray[np.intp]) -> NDArray[np.float32]:
        of_panel = self.panels.view(np.uint8).reshape(-1, elements_of(PANEL, self.k, np.uint8))
        each, columns, count = np.arange(len(places)), places % PANEL, self.k // NIBBLES_STEP
        blocks = of_panel[places // PANEL].reshape(len(places), count, of_panel.shape[1] // count)
        halves = np.ascontiguousarray(blocks[:, :, :_SCALES]).view(np.float16)
        scales = halves.reshape(len(places), 2 * count, PANEL)[each, :, columns].astype(np.float32)
        pairs = blocks[:, :, _SCALES:].reshape(len(places), self.k // 4, PANEL, 2)[each, :, columns]
        nibbles = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(len(places), 2 * count, GROUP)
        values = (nibbles.astype(np.float32) - 8) * scales[:, :, None]
        return values.reshape(len(places), self.k)


def elements_of(n: int, k: int, dtype: DTypeLike) -> int:
    """Of a matrix in panels with all that belongs to them; the last panel is whole, its missing
    rows are zeros."""
    panel = PANEL * k
    if np.dtype(dtype) == np.int8:
        panel += _SCALES
    if np.dtype(dtype) == np.uint8:
        panel = panel // 2 + k // NIBBLES_STEP * _SCALES
    return -(-n // PANEL) * panel


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
    """Rows [n, k], as the values that their int8 or int4 stand for."""
    if to == "int8":
        found, of_rows = quantized(rows)
        return found * of_rows[:, None]
    nibbles, of_groups = grouped(rows)
    scales = np.repeat(of_groups.astype(np.float32), GROUP, axis=1)
    return (nibbles.astype(np.float32) - 8) * scales
