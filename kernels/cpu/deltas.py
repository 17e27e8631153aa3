"""What adapters of low rank add to linears, where the kernels find it (native/adapters.h)."""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import structures as c
from kernels.cpu.matrix import Matrix

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Part:
    """Of a linear some columns, to which x A^T B^T is added."""

    down: Floats
    """A: [ranks, k]"""
    up: Floats
    """B, transposed: [ranks, columns]. Of no ranks: nothing is added."""


class Deltas:
    """Tables with so many places, one for each adapter that is there at once. A place that no step
    reads may be written while one runs."""

    def __init__(self, matrices: Iterable[Matrix], places: int, most_ranks: int) -> None:
        """`most_ranks`: of an adapter's parts of one matrix together."""
        self.most_ranks = most_ranks
        self._tables = {matrix: (c.Delta * places)() for matrix in matrices}
        self._ranks = [0] * places
        self._kept: list[list[Floats]] = [[] for _ in range(places)]

    def table(self, matrix: Matrix) -> "ctypes.Array[c.Delta] | None":
        """Which the matrix's linear reads; None: no adapter changes it."""
        return self._tables.get(matrix)

    def put(self, place: int, deltas: Mapping[Matrix, Sequence[Part]]) -> None:
        """Of one matrix all parts, in the order of its columns."""
        self.clear(place)
        for matrix, parts in deltas.items():
            ranks = [len(part.up) for part in parts]
            assert sum(part.up.shape[1] for part in parts) == matrix.n
            assert len(parts) <= c.DELTA_PARTS
            assert sum(ranks) <= self.most_ranks
            down = np.concatenate([part.down for part in parts]).astype(np.float32)
            up = np.concatenate([part.up.reshape(-1) for part in parts]).astype(np.float32)
            self._kept[place] += [down, up]
            self._ranks[place] = max(self._ranks[place], sum(ranks))
            found = self._tables[matrix][place]
            found.down, found.up, found.ranks = down.ctypes.data, up.ctypes.data, sum(ranks)
            for index, part in enumerate(parts):
                found.columns[index], found.part_ranks[index] = part.up.shape[1], ranks[index]

    def clear(self, place: int) -> None:
        """It adds nothing any more, and takes no memory. For when no step reads it."""
        for table in self._tables.values():
            table[place] = c.Delta()
        self._kept[place], self._ranks[place] = [], 0

    def ranks(self, places: Iterable[int]) -> int:
        """Of these, for one matrix at most."""
        return max((self._ranks[place] for place in places), default=0)
