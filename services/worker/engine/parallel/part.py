"""A part of a stored tensor: some of its rows, or some columns of all."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.matrix import E4M3_GROUP, GROUP, NARROW, Held
from services.worker.engine.formats.stored import (
    Bits,
    Floats,
    Rounding,
    Stored,
    as_float32,
    nearest_bfloat16,
)


class Part(Stored):
    """Of a matrix of few bits columns are cut at the borders of groups, or what it is held in is
    none of the engine's formats; all columns of it are read. Of others nothing else is read."""

    def __init__(self, stored: Stored, rows: Sequence[range], columns: range | None = None) -> None:
        """`rows`: one part behind the other. `columns`: None, all."""
        self._stored, self._rows_of, self._columns = stored, rows, columns
        widths = stored.shape[1:] if columns is None else (len(columns),)
        self.shape = (sum(map(len, rows)), *widths)
        self.kind = stored.kind

    @property
    def held(self) -> tuple[Held, ...]:
        found = self._stored.held
        if self._columns is None:
            return found
        first, width = self._columns.start, len(self._columns)
        groups: dict[Held, int] = {held: GROUP for held in found if NARROW[held].head}
        if "fp8_blocks" in groups:
            groups["fp8_blocks"] = E4M3_GROUP
        return tuple(
            held
            for held in found
            if not width % NARROW[held].step and not first % groups.get(held, 1)
        )

    @property
    def is_quantized(self) -> bool:
        return self._stored.is_quantized

    @property
    def fits_bfloat16(self) -> bool:
        return self._stored.fits_bfloat16

    def values(self, first: int = 0, last: int | None = None) -> NDArray[Any]:
        stored, columns = self._stored, self._columns
        if columns is None:
            parts = [stored.values(*rows) for rows in self._within(first, last)]
        else:
            ends = columns.start, columns.stop
            parts = [stored.columns(*ends, *rows) for rows in self._within(first, last)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def float32(self, first: int = 0, last: int | None = None) -> Floats:
        return as_float32(self.values(first, last))

    def bfloat16(self, first: int = 0, last: int | None = None) -> Bits:
        values = self.values(first, last)
        return values if values.dtype == np.uint16 else nearest_bfloat16(as_float32(values))

    def narrow(self, first: int, last: int, to: Held) -> tuple[NDArray[Any], ...]:
        return self._each(lambda top, bottom: self._stored.narrow(top, bottom, to), first, last)

    def rounded(self, how: Rounding, first: int, last: int) -> tuple[NDArray[Any], ...]:
        """As all columns are rounded together."""
        return self._each(lambda top, bottom: self._stored.rounded(how, top, bottom), first, last)

    def _each(
        self, read: Callable[[int, int], tuple[NDArray[Any], ...]], first: int, last: int
    ) -> tuple[NDArray[Any], ...]:
        found = [map(self._cut, read(*rows)) for rows in self._within(first, last)]
        return tuple(np.concatenate(alike) for alike in zip(*found, strict=True))

    def _cut(self, of_rows: NDArray[Any]) -> NDArray[Any]:
        """Numbers [rows, k], what groups of them have, or what a row has."""
        if self._columns is None or of_rows.ndim == 1:
            return of_rows
        each = self._stored.shape[1] // of_rows.shape[1]
        return of_rows[:, self._columns.start // each : self._columns.stop // each]

    def _within(self, first: int, last: int | None) -> Iterator[tuple[int, int]]:
        """The whole tensor's rows that its own [first, last) are."""
        own, above = range(self.shape[0])[first:last], 0
        for rows in self._rows_of:
            found = rows[max(0, own.start - above) : max(0, own.stop - above)]
            if found or not own:
                yield found.start, found.stop
            above += len(rows)
