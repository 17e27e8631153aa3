"""Weights as the kernels read them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

PANEL = 16
"""Rows of a matrix that lie together, and tokens of a KV block that do."""
BYTES_STEP = 4
"""Of an int8 matrix k is a multiple of so much."""
_SCALES = PANEL * 4
"""Bytes of a panel's scales, which lie behind its int8."""


class Matrix:
    """Weights [n, k] in panels (native/tile.h): of float32, or uint16 that are bfloat16's bits, in
    the program's format; or of int8 with a scale for each row, in any."""

    def __init__(
        self, panels: NDArray[np.generic], n: int, k: int, bias: NDArray[np.float32] | None = None
    ) -> None:
        """`panels`: [elements_of(n, k, its dtype)]; `bias`: [n]."""
        assert len(panels) == elements_of(n, k, panels.dtype)
        self.panels, self.n, self.k, self.bias = panels, n, k, bias

    def rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Those rows, [len(ids), k]. Slow: each lies all over its panel."""
        places, step = np.asarray(ids, np.intp), 2 if self.panels.itemsize == 2 else 1
        of_panel = self.panels.reshape(-1, elements_of(PANEL, self.k, self.panels.dtype))
        panels = of_panel[:, : self.k * PANEL].reshape(-1, self.k // step, PANEL, step)
        found = panels[places // PANEL, :, places % PANEL].reshape(len(places), self.k)
        if self.panels.itemsize == 2:
            return (found.astype(np.uint32) << 16).view(np.float32)
        if self.panels.itemsize == 1:
            scales = of_panel[:, self.k * PANEL :].copy().view(np.float32)
            of_rows: NDArray[np.float32] = scales[places // PANEL, places % PANEL][:, None]
            return found.astype(np.float32) * of_rows
        return found.astype(np.float32, copy=False)


def elements_of(n: int, k: int, dtype: DTypeLike) -> int:
    """Of a matrix in panels with all that belongs to them; the last panel is whole, its missing
    rows are zeros."""
    scales = _SCALES if np.dtype(dtype) == np.int8 else 0
    return -(-n // PANEL) * (PANEL * k + scales)


def quantized(rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Of rows [n, k] the nearest int8 of -127 to 127, and what each row's are to be multiplied
    with, [n]: what lies furthest from 0 is met exactly."""
    scales = np.abs(rows).max(axis=1, initial=0) / np.float32(127)
    steps = np.where(scales > 0, scales, np.float32(1))
    return np.rint(rows / steps[:, None]).astype(np.int8), scales
