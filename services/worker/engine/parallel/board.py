"""Memory that the ranks of a host share: what is told to all of them is written once, and each one
shows here that it lives."""

import mmap
import os
from typing import NamedTuple

import numpy as np

from services.worker.engine.config import MOST_RANKS
from services.worker.engine.process import wire

SLOTS = 16
_LINE = 64
_HEAD = MOST_RANKS * _LINE
"""Bytes: of a counter for each rank, in its own cache line."""
_FIRST_SLOT = 2**16


class Place(NamedTuple):
    """Of a message."""

    at: int
    size: int
    """In bytes."""


class Board:
    """The memory is a file without a name, which lives as long as somebody has it open. The next
    SLOTS - 1 messages leave one as it is: until then all ranks must have read it."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: of one that is there."""
        self.fd = os.memfd_create("penstock-ranks") if fd is None else fd
        self._slots = [(_HEAD + slot * _FIRST_SLOT, _FIRST_SLOT) for slot in range(SLOTS)]
        self._written = 0
        if fd is None:
            os.ftruncate(self.fd, _HEAD + SLOTS * _FIRST_SLOT)
        self._map()

    def beat(self, rank: int) -> None:
        self._beats[rank * _LINE // 8] += 1

    def beats(self, rank: int) -> int:
        return int(self._beats[rank * _LINE // 8])

    def write(self, message: object) -> Place:
        pieces = wire.encode(message)
        size = sum(len(piece) for piece in pieces)
        slot = self._written % SLOTS
        at, room = self._slots[slot]
        if size > room:  # behind the others, which somebody may be reading
            at, room = len(self._memory), 2 * size
            os.ftruncate(self.fd, at + room)
            self._map()
            self._slots[slot] = at, room
        end = at
        for piece in pieces:
            self._memory[end : end + len(piece)] = piece
            end += len(piece)
        self._written += 1
        return Place(at, size)

    def read(self, place: Place) -> object:
        at, size = place
        if at + size > len(self._memory):
            self._map()
        count = wire.COUNT.size
        data = bytearray(self._memory[at : at + size])
        (parts,) = wire.COUNT.unpack(data[:count])
        sizes = wire.decode_sizes(bytes(data[count : count + 8 * parts]))
        found, begin = [], count + 8 * parts
        for part in sizes:
            found.append(data[begin : begin + part])
            begin += part
        return wire.decode(found)

    def close(self) -> None:
        os.close(self.fd)

    def _map(self) -> None:
        """All of it, as it is now."""
        self._memory = mmap.mmap(self.fd, 0)
        self._beats = np.frombuffer(self._memory, np.int64, _HEAD // 8)
