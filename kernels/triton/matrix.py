"""Weights of few bits in the order that a GPU reads, as the formats of kernels/cpu/matrix.py.

Sixteen rows lie together, of each 32 bytes in turn, so a tile of a product is whole pieces of 512
bytes, however narrow its step. Of 4 bits the 32 bytes are of 64 columns, which have two groups: the
first one's numbers are the lower nibbles, the second one's the upper ones. Of a word's four bytes
the second and the third have changed places (but for w8a8, whose bytes are multiplied as they are):
so a mask takes two neighbours out of it at once, each in a half of its own.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.matrix import E4M3, E4M3_GROUP, GROUP, NARROW, Held

PANEL, CHUNK = 16, 32
"""Rows that lie together, and bytes of each that do."""
_CHANGED = [0, 2, 1, 3]


@dataclass(frozen=True, eq=False)
class NarrowMatrix:
    """[n, k]"""

    held: Held
    n: int
    k: int
    dtype: torch.dtype
    """Of rows that meet it, and of its own where it is an embedding"""
    numbers: Tensor
    """uint8 [ceil(n / PANEL), ceil(bytes of a row / CHUNK), PANEL, CHUNK]: int8, e4m3's bits, or
    two numbers of 4 bits, each 8 more than it is where it has no zero; what is filled up is 0"""
    scales: Tensor
    """float32 [n]; by groups float16 [k / GROUP, n], by blocks float32 [k / E4M3_GROUP, n]"""
    zeros: Tensor | None
    """uint8 [k / GROUP, n], of "int4_zeros" """

    @staticmethod
    def empty(
        held: Held, n: int, k: int, dtype: torch.dtype, device: "torch.device | str"
    ) -> "NarrowMatrix":
        """For `put` to fill. Raises ValueError where k does not fit the format."""
        bits, group = NARROW[held].bits, group_of(held)
        if k % max(group, 1) or (bits == 4 and k % (2 * GROUP)):
            raise ValueError(f"{k} columns do not fit {held}")
        whole = -(-n // PANEL), -(-k * bits // 8 // CHUNK), PANEL, CHUNK
        of_scales = torch.float16 if group == GROUP else torch.float32
        return NarrowMatrix(
            held,
            n,
            k,
            dtype,
            torch.zeros(whole, dtype=torch.uint8, device=device),
            torch.empty((k // group, n) if group else n, dtype=of_scales, device=device),
            torch.empty(k // group, n, dtype=torch.uint8, device=device)
            if held == "int4_zeros"
            else None,
        )

    def put(
        self,
        first: int,
        numbers: NDArray[Any],
        scales: NDArray[Any],
        zeros: NDArray[np.uint8] | None = None,
    ) -> None:
        """Rows from `first` on, a multiple of PANEL: what `Library.pack` is given."""
        rows, (_, steps, *_) = len(numbers), self.numbers.shape
        if NARROW[self.held].bits == 4:
            pairs = numbers.reshape(rows, -1, 2, GROUP)
            numbers = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(rows, -1)
        laid = np.zeros((-(-rows // PANEL) * PANEL, steps * CHUNK), np.uint8)
        laid[:rows, : numbers.shape[1]] = numbers.view(np.uint8)
        if self.held != "w8a8":
            laid = laid.reshape(-1, 4)[:, _CHANGED]
        pieces = laid.reshape(-1, PANEL, steps, CHUNK).swapaxes(1, 2)
        to = self.numbers[first // PANEL :][: len(pieces)]
        to.copy_(torch.from_numpy(np.ascontiguousarray(pieces)))
        last = first + rows
        self.scales[..., first:last] = torch.from_numpy(np.ascontiguousarray(scales.T))
        if self.zeros is not None:
            assert zeros is not None
            self.zeros[:, first:last] = torch.from_numpy(np.ascontiguousarray(zeros.T))

    @property
    def nbytes(self) -> int:
        parts = [self.numbers, self.scales, self.zeros]
        return sum(part.nbytes for part in parts if part is not None)

    def rows(self, ids: Tensor | None = None) -> Tensor:
        """float32 [len(ids), k]; None: of all. What kernels take the matrix for."""
        if ids is None:
            ids = torch.arange(self.n, device=self.numbers.device)
        lie = self.numbers[ids // PANEL, :, ids % PANEL].flatten(1)
        if self.held != "w8a8":
            lie = lie.unflatten(1, (-1, 4))[..., _CHANGED].flatten(1)
        group = group_of(self.held)
        scales = self.scales[..., ids].t().float()
        if NARROW[self.held].bits == 8:
            fp8 = self.held in ("fp8", "fp8_blocks")
            found = (_e4m3(lie) if fp8 else lie.view(torch.int8).float())[:, : self.k]
        else:
            pairs = lie.view(len(ids), -1, CHUNK)
            found = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1).float()
            zeros = 8.0 if self.zeros is None else self.zeros[:, ids].t().float()
            if isinstance(zeros, Tensor):
                zeros = zeros.repeat_interleave(GROUP, dim=1)
            found = found - zeros
        return found * (scales.repeat_interleave(group, dim=1) if group else scales[:, None])


def group_of(held: Held) -> int:
    """Columns that have a scale; 0: all of a row."""
    if held in ("int4", "int4_zeros", "int8_groups"):
        return GROUP
    return E4M3_GROUP if held == "fp8_blocks" else 0


def _e4m3(bits: Tensor) -> Tensor:
    """NaN is a number, as kernels have it: scales are NaN there."""
    table = torch.from_numpy(np.where(np.isnan(E4M3), 480 * np.sign(127.5 - np.arange(256)), E4M3))
    return table.float().to(bits.device)[bits.long()]
