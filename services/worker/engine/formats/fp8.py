"""Matrices of e4m3: FP8 checkpoints of Hugging Face, and compressed-tensors' float-quantized."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.matrix import BYTES_STEP, E4M3, E4M3_GROUP, Held
from services.worker.engine.formats.stored import Floats, Rows, Shape, Stored

_NAN = 0x7F
"""Of either sign; e4m3 has no infinity."""


@dataclass(frozen=True, slots=True)
class Fp8(Stored):
    """A matrix [n, k]: number x scale, with a scale for each `width` columns of a row."""

    shape: Shape
    numbers: Rows
    """[rows, k], their bits"""
    scales: Rows
    """[rows, ceil(k / width)], float32"""
    width: int
    kind: str = "FP8"

    @property
    def is_quantized(self) -> bool:
        return True

    def float32(self, first: int = 0, last: int | None = None) -> Floats:
        first, last, _ = slice(first, last).indices(self.shape[0])
        found: Floats = E4M3[self.numbers(first, last)]
        found *= self._of_columns(self.scales(first, last))
        return found

    @property
    def held(self) -> tuple[Held, ...]:
        k, found = self.shape[1], list[Held]()
        if self.width == k and not k % BYTES_STEP:
            found.append("fp8")
        if not self.width % E4M3_GROUP and not k % E4M3_GROUP:
            found.append("fp8_blocks")
        return tuple(found)

    def narrow(self, first: int, last: int, to: Held) -> tuple[NDArray[Any], ...]:
        """Kernels take NaN for a number, so the scale that is its own is NaN."""
        numbers, scales = self.numbers(first, last), self.scales(first, last)
        group = self.shape[1] if to == "fp8" else E4M3_GROUP
        told = np.repeat(scales, self.width // group, axis=1)[:, : self.shape[1] // group].copy()
        told[(numbers & _NAN == _NAN).reshape(*told.shape, group).any(axis=2)] = np.nan
        return numbers, told[:, 0] if to == "fp8" else told

    def _of_columns(self, scales: Floats) -> Floats:
        return np.repeat(scales, self.width, axis=1)[:, : self.shape[1]]
