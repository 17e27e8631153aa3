"""Which worker holds which KV blocks: exact, because the workers themselves say so.

A block's holders are a bit mask, one bit per worker view, so that the match of a prompt's hash
chain is one `&` per block. Memory is bounded by what the workers hold: a block without a holder has
no entry. Nothing here takes long on the event loop: forgetting a whole worker is one step for its
readers, and its entries are swept away later in slices.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Holder:
    """One worker in the index; made by `BlockIndex.add`."""

    bit: int
    blocks: set[bytes] = field(default_factory=set)


class BlockIndex:
    """Block hash → holders, as a mask of their bits."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._free_bits: list[int] = []
        self._bits = 0
        self._gone: list[Holder] = []  # their bits are ignored by readers, and not reused yet
        self._live = 0  # mask of all bits that count

    def __len__(self) -> int:
        return len(self._masks)

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

    def store(self, holder: Holder, hashes: Iterable[bytes]) -> None:
        """The holder has these blocks from now on."""
        masks, bit = self._masks, holder.bit
        for block in hashes:
            masks[block] = masks.get(block, 0) | bit
            holder.blocks.add(block)

    def evict(self, holder: Holder, hashes: Iterable[bytes]) -> None:
        """The holder has these blocks no longer."""
        for block in hashes:
            if block in holder.blocks:
                holder.blocks.discard(block)
                self._clear(block, holder.bit)

    def sweep(self, limit: int) -> bool:
        """Frees at most `limit` entries of removed holders; returns whether more are left."""
        while self._gone and limit > 0:
            holder = self._gone[-1]
            while holder.blocks and limit > 0:
                self._clear(holder.blocks.pop(), holder.bit)
                limit -= 1
            if not holder.blocks:
                self._gone.pop()
                self._free_bits.append(holder.bit)
        return bool(self._gone)

    def holds(self, block: bytes) -> bool:
        """Whether anybody does."""
        return bool(self._live & self._masks.get(block, 0))

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

    def _clear(self, block: bytes, bit: int) -> None:
        rest = self._masks[block] & ~bit
        if rest:
            self._masks[block] = rest
        else:
            del self._masks[block]


def _note(found: dict[int, int], mask: int, length: int) -> None:
    while length and mask:
        bit = mask & -mask
        found[bit] = length
        mask ^= bit
