"""A checkpoint's tensors as numpy arrays, read row by row as they are asked for. No torch."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.matrix import BYTES_STEP, GROUP, NIBBLES_STEP, ZEROS_STEP, Held
from services.worker.engine.models.config import UnsupportedModel

Shape = tuple[int, ...]
Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]
Rows = Callable[[int, int], NDArray[Any]]
"""Of a matrix its rows [first, last)."""
Rounding = Callable[[Floats], tuple[NDArray[Any], ...]]
"""Of rows [n, k] numbers of few bits and what belongs to them: see `Library.pack`."""

TYPES: dict[str, Any] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1",
    "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1",
}  # fmt: skip
"""Of numpy, by those of safetensors; of BF16 and F8_E4M3 the bits, since numpy has no such."""
FLOATS = ("F64", "F32", "F16", "BF16")


class Stored(ABC):
    """A tensor of the model. Reading raises UnsupportedModel where its file has become shorter."""

    shape: Shape
    kind: str
    """How it lies in its file, in words."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def held(self) -> tuple[Held, ...]:
        """The engine's own formats that have its values to the bit, those of fewer bits first."""
        return ()

    @property
    def is_quantized(self) -> bool:
        """It is of fewer bits than what is computed with."""
        return False

    @property
    def fits_bfloat16(self) -> bool:
        """It is bfloat16, or quantized and widened to that."""
        return self.is_quantized

    def rounded(self, how: Rounding, first: int, last: int) -> tuple[NDArray[Any], ...]:
        """Rows [first, last) in fewer bits than they have, and their scales."""
        return how(self.float32(first, last))

    @abstractmethod
    def float32(self, first: int = 0, last: int | None = None) -> Floats:
        """Rows [first, last); exact, but for float64."""

    def bfloat16(self, first: int = 0, last: int | None = None) -> Bits:
        """Rows [first, last): the bits of the nearest values, of two the even one."""
        return nearest_bfloat16(self.float32(first, last))

    def values(self, first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Rows [first, last), as narrow as they are stored: uint16 are bfloat16's bits."""
        return self.float32(first, last)

    def columns(
        self, first: int, last: int, top: int = 0, bottom: int | None = None
    ) -> NDArray[Any]:
        """Of a matrix, columns [first, last) of its rows [top, bottom), likewise. Of one of few
        bits other columns are read, too, some rows at a time."""
        rows = range(self.shape[0])[top:bottom]
        strips = [rows[at : at + _LOOKED_AT] for at in range(0, len(rows), _LOOKED_AT)]
        return np.concatenate([self.float32(s.start, s.stop)[:, first:last] for s in strips])

    def narrow(self, first: int, last: int, to: Held) -> tuple[NDArray[Any], ...]:
        """Rows [first, last) in a format that it is `held` in, and their scales and zeros: see
        `Library.pack`."""
        raise NotImplementedError(self.kind)


@dataclass(frozen=True, slots=True)
class Plain(Stored):
    """Numbers one after the other in a file."""

    file: BinaryIO
    offset: int
    shape: Shape
    dtype: str
    """Of TYPES."""

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.dtype

    @property
    def fits_bfloat16(self) -> bool:
        return self.dtype == "BF16"

    def values(self, first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Rows [first, last), as they are stored."""
        shape = (len(range(self.shape[0])[first:last]), *self.shape[1:])
        found = np.empty(shape, TYPES[self.dtype])
        read_into(self.file, found, self.offset + first * prod(shape[1:]) * found.itemsize)
        return found

    @property
    def itemsize(self) -> int:
        found: int = np.dtype(TYPES[self.dtype]).itemsize
        return found

    def columns(
        self, first: int, last: int, top: int = 0, bottom: int | None = None
    ) -> NDArray[Any]:
        """Of a matrix, columns [first, last) of its rows [top, bottom)."""
        rows = range(self.shape[0])[top:bottom]
        found = np.empty((len(rows), last - first), TYPES[self.dtype])
        of_row = self.shape[1] * found.itemsize
        for number, row in zip(rows, found, strict=True):
            read_into(self.file, row, self.offset + number * of_row + first * found.itemsize)
        return found

    def float32(self, first: int = 0, last: int | None = None) -> Floats:
        return as_float32(self.values(first, last))

    def bfloat16(self, first: int = 0, last: int | None = None) -> Bits:
        if self.dtype == "BF16":
            return self.values(first, last)
        return nearest_bfloat16(self.float32(first, last))


@dataclass(frozen=True)
class Quantized(Stored):
    """A matrix [n, k] of whole numbers: (integer - zero) * scale, with a zero and a scale for each
    group of columns of a row."""

    kind: str
    shape: Shape
    bits: int
    """Of an integer, which is from -2^(bits - 1) up."""
    integers: Rows
    """[rows, k]"""
    scales: Rows
    """[rows, groups], floats"""
    zeros: Rows | None = None
    """[rows, groups]; None: all are 0."""
    groups: int = 1
    order: NDArray[np.intp] | None = None
    """Of which group each column is, [k]; None: as many of each, one group behind the other."""
    rounds_rows: bool = False
    """It is made for rows that are int8, too, each with a scale of its own."""

    @property
    def is_quantized(self) -> bool:
        return True

    def float32(self, first: int = 0, last: int | None = None) -> Floats:
        first, last, _ = slice(first, last).indices(self.shape[0])
        found = self.integers(first, last).astype(np.float32)
        if self.zeros is not None:
            found -= self._of_columns(self.zeros(first, last).astype(np.float32))
        found *= self._of_columns(self.scales(first, last).astype(np.float32))
        return found

    def narrow(self, first: int, last: int, to: Held) -> tuple[NDArray[Any], ...]:
        integers, scales = self.integers(first, last), self.scales(first, last)
        if to in ("int8", "w8a8"):
            return integers.astype(np.int8), scales[:, 0].astype(np.float32)
        again = self.shape[1] // GROUP // self.groups
        halves = np.repeat(scales.astype(np.float16), again, axis=1)
        zeros = np.zeros(scales.shape, np.int16)
        if self.zeros is not None:
            zeros = self.zeros(first, last).astype(np.int16)
        if to == "int8_groups":
            return (integers - self._of_columns(zeros)).astype(np.int8), halves
        nibbles = (integers + 8).astype(np.uint8)
        if to == "int4":
            return nibbles, halves
        return nibbles, halves, np.repeat((zeros + 8).astype(np.uint8), again, axis=1)

    def _of_columns(self, of_groups: NDArray[Any]) -> NDArray[Any]:
        if self.order is not None:
            return of_groups[:, self.order]
        return np.repeat(of_groups, self.shape[1] // self.groups, axis=1)

    @cached_property
    def held(self) -> tuple[Held, ...]:
        k = self.shape[1]
        found: list[Held] = []
        if self.order is not None and self.groups > 1:
            return ()
        in_groups = not k // self.groups % GROUP and self._scales_are_halves()
        if in_groups and self.bits == 4 and self.zeros is None and not k % NIBBLES_STEP:
            found.append("int4")
        if in_groups and self.bits == 4 and not k % ZEROS_STEP:
            found.append("int4_zeros")
        if self.groups == 1 and self.zeros is None and not k % BYTES_STEP:
            found += ["w8a8", "int8"] if self.rounds_rows else ["int8", "w8a8"]
        # A number of seven bits less a zero of seven is one of eight.
        if in_groups and (self.zeros is None or self.bits < 8) and not k % NIBBLES_STEP:
            found.append("int8_groups")
        return tuple(found)

    def _scales_are_halves(self) -> bool:
        if self.scales(0, 1).dtype == np.float16:
            return True
        with np.errstate(over="ignore"):
            for first in range(0, self.shape[0], _LOOKED_AT):
                scales = self.scales(first, min(first + _LOOKED_AT, self.shape[0]))
                halves = scales.astype(np.float16)
                if not (np.isfinite(halves) & (halves.astype(scales.dtype) == scales)).all():
                    return False
        return True


_LOOKED_AT = 1024
"""Rows whose scales are looked at at once."""


@dataclass(frozen=True, slots=True)
class Widened(Stored):
    """A matrix of few bits that is no engine's format."""

    kind: str
    shape: Shape
    rows: Rows
    """[rows, k], float32"""

    @property
    def is_quantized(self) -> bool:
        return True

    def float32(self, first: int = 0, last: int | None = None) -> Floats:
        first, last, _ = slice(first, last).indices(self.shape[0])
        return self.rows(first, last)


def read_into(file: BinaryIO, array: NDArray[Any], at: int) -> None:
    """Fills it with a file's bytes from `at` on."""
    rest = array.reshape(-1).view(np.uint8).data
    while rest:
        count = os.preadv(file.fileno(), [rest], at)
        if not count:
            raise UnsupportedModel(f"{file.name}: was cut short while it was read")
        rest, at = rest[count:], at + count


def as_float32(values: NDArray[Any]) -> Floats:
    """`values` of a tensor."""
    return widened(values) if values.dtype == np.uint16 else values.astype(np.float32, copy=False)


def widened(bits: Bits) -> Floats:
    """Of bfloat16's bits the values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def nearest_bfloat16(wide: Floats) -> Bits:
    bits = wide.view(np.uint32)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), nearest)
