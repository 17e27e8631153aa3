"""Weights as the kernels read them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PANEL = 16
"""Rows of a matrix that lie together, and tokens of a KV block that do."""


class Matrix:
    """Weights [n, k] in panels (native/tile.h): of float32, or uint16 that are bfloat16's bits."""

    def __init__(
        self, panels: NDArray[np.generic], n: int, k: int, bias: NDArray[np.float32] | None = None
    ) -> None:
        """`panels`: [elements_of(n, k)]; `bias`: [n]."""
        assert len(panels) == elements_of(n, k)
        self.panels, self.n, self.k, self.bias = panels, n, k, bias

    def rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Those rows, [len(ids), k]. Slow: each lies all over its panel."""
        places, step = np.asarray(ids), 1 if self.panels.itemsize == 4 else 2
        panels = self.panels.reshape(-1, self.k // step, PANEL, step)
        found = panels[places // PANEL, :, places % PANEL].reshape(len(places), self.k)
        if step == 1:
            return found.astype(np.float32, copy=False)
        return (found.astype(np.uint32) << 16).view(np.float32)


def elements_of(n: int, k: int) -> int:
    """Of a matrix in panels; the last panel is whole, its missing rows are zeros."""
    return -(-n // PANEL) * PANEL * k
