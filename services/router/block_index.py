"""Which worker holds which KV blocks: exact, because the workers themselves say so.

A block's holders are a bit mask, one bit per worker view, so that the match of a prompt's hash
chain is some operations per block, whoever holds it. Memory is bounded by what the workers hold: a
block without a holder has no entry. Nothing here takes long on the event loop: forgetting a whole
worker is one step for its readers, and its entries are swept away later in slices.

Blocks on a worker's disk are told of apart (decision 0074): it has them, but later.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False)
class Holder:
    """One worker in the index; made by `BlockIndex.add`."""

    bit: int
    blocks: set[bytes] = field(default_factory=set)
    below: set[bytes] = field(default_factory=set)
    """On its disk; some of them may be on the device as well."""


class Reach(NamedTuple):
    """Leading blocks of a chain that a worker has, if it loads some of them."""

    blocks: int
    loads: int


class BlockIndex:
    """Block hash → holders, as a mask of their bits."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._below: dict[bytes, int] = {}
        """The same, of blocks on disk."""
        self._free_bits: list[int] = []
        self._bits = 0
        self._gone: list[Holder] = []  # their bits are ignored by readers, and not reused yet
        self._live = 0  # mask of all bits that count

    def add(self) -> Holder:
        """A new holder of nothing."""
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._bits
            self._bits += 1
        self._live |= bit
        return Holder(bit)

    def remove(self, holder: Holder) -> None:
        """The holder counts no more, from now on; `sweep` then frees what it took."""
        self._live &= ~holder.bit
        self._gone.append(holder)

    def store(self, holder: Holder, hashes: Iterable[bytes], below: bool = False) -> None:
        """The holder has these blocks from now on; `below`: on disk."""
        masks, bit = self._below if below else self._masks, holder.bit
        blocks = holder.below if below else holder.blocks
        for block in hashes:
            masks[block] = masks.get(block, 0) | bit
            blocks.add(block)

    def evict(self, holder: Holder, hashes: Iterable[bytes], below: bool = False) -> None:
        """The holder has these blocks there no longer."""
        masks = self._below if below else self._masks
        blocks = holder.below if below else holder.blocks
        for block in hashes:
            if block in blocks:
                blocks.discard(block)
                _clear(masks, block, holder.bit)

    def sweep(self, limit: int) -> bool:
        """Frees at most `limit` entries of removed holders; returns whether more are left."""
        while self._gone and limit > 0:
            holder = self._gone[-1]
            for masks, blocks in ((self._masks, holder.blocks), (self._below, holder.below)):
                while blocks and limit > 0:
                    _clear(masks, blocks.pop(), holder.bit)
                    limit -= 1
            if not (holder.blocks or holder.below):
                self._gone.pop()
                self._free_bits.append(holder.bit)
        return bool(self._gone)

    def holds(self, block: bytes) -> bool:
        """Whether anybody does."""
        return bool(self._live & (self._masks.get(block, 0) | self._below.get(block, 0)))

    def match(self, chain: Iterable[bytes]) -> dict[int, int]:
        """How many leading blocks of the chain each holder has: bit → blocks, only those > 0.

        Reads the chain no further than some holder follows, so it may be computed on the way.
        """
        found: dict[int, int] = {}
        following, length = self._live, 0
        for block in chain:
            still = following & self._masks.get(block, 0)
            _note(found, following & ~still, length)
            following = still
            if not following:
                return found
            length += 1
        _note(found, following, length)
        return found

    def match_below(self, chain: Iterable[bytes]) -> dict[int, Reach]:
        """The same of those holders that have more with what is on their disks."""
        runs: dict[int, int] = {}
        loads = _Tally()
        following, length = self._live if self._below else 0, 0
        for block in chain:
            there, below = self._masks.get(block, 0), self._below.get(block, 0)
            still = following & (there | below)
            _note(runs, following & ~still, length)
            following = still
            if not following:
                break
            length += 1
            loads.add(following & ~there)
        _note(runs, following, length)
        return {bit: Reach(runs[bit], loads.of(bit)) for bit in _bits(loads.any)}


class _Tally:
    """In how many of some masks each bit is, all bits counted at once: a number in binary for each,
    whose digits of one place are a mask."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self.any = 0
        """Bits that are in one at least."""

    def add(self, mask: int) -> None:
        self.any |= mask
        for place, digits in enumerate(self._places):
            if not mask:
                return
            self._places[place], mask = digits ^ mask, digits & mask
        if mask:
            self._places.append(mask)

    def of(self, bit: int) -> int:
        return sum(1 << place for place, digits in enumerate(self._places) if digits & bit)


def _clear(masks: dict[bytes, int], block: bytes, bit: int) -> None:
    rest = masks[block] & ~bit
    if rest:
        masks[block] = rest
    else:
        del masks[block]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _note(found: dict[int, int], mask: int, length: int) -> None:
    if length:
        for bit in _bits(mask):
            found[bit] = length
