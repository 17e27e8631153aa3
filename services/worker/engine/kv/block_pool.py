"""Who holds which KV block, and which block holds which prefix.

The pool knows block numbers only; the tensor behind them is the runner's (`kv/cache.py`).

A block is in one of three states:

    held     in `ref_count` block tables (more than one: a shared prefix)
    cached   in no table, but its content is kept under its name until the block is needed
    empty    in no table, and nothing worth keeping

A name is a hash of all tokens up to the block's last, and the KV group whose layers the block holds
(kv/groups.py). A model of one group has one block for a hash. Events and `snapshot` tell of group 0
alone, whose layers see furthest.

Contracts
- One owner. Only the scheduler calls `acquire`, `allocate`, `publish` and `free`, and it frees each
  block exactly once for each table that holds it.
- A hash is visible (found by `match`) from `publish` on, which the scheduler calls after the step
  that wrote the block's last slot has run. So what `match` finds is always complete.
- A step that failed published nothing: the blocks stay in their tables, the next step writes the
  same slots again, and no event has to be taken back.
- First publisher wins. The same content computed twice at once stays unnamed in the second block,
  which becomes empty when freed.
- `allocate` takes empty blocks first, then the least recently freed cached block, whose hash it
  withdraws (an `evicted` event) before handing the block out. `free` takes a table's blocks from
  its end, so that of one prefix the tail is evicted before the head it depends on. Blocks that
  nobody is likely to ask for again are evicted before all others. Groups share one order.
- What `allocate` evicts is told by `take_evicted`, to be copied out before a step writes over it;
  but for blocks that are not worth that.
- Events are in the order in which `match` would have noticed. Replaying a suffix of them on a later
  `snapshot` gives that snapshot again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.worker.engine.outputs import KvEvents


class Evicted(NamedTuple):
    """A block that holds something else from the next step on."""

    block_hash: bytes
    group: int
    block: int


class IntegrityError(Exception):
    """The pool contradicts itself or the block tables: a bug, never an overload."""


class BlockPool:
    """`num_blocks` blocks, numbered from 0, of `block_size` tokens each and of `num_groups`."""

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._group_of = [0] * num_blocks
        """Of those that have a hash."""
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        """By group and hash."""
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, bool] = OrderedDict()
        """Least recently freed first; whether it is worth being copied out when it is evicted."""
        self._events: list[KvEvents] = []
        self._evicted: list[Evicted] = []

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached content included."""
        return len(self._empty) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def match(self, hashes: Iterable[bytes], group: int = 0) -> list[int]:
        """Blocks of the longest leading run of `hashes` that is in the cache. Takes nothing: they
        are the caller's only after `acquire`, before anything else is allocated."""
        blocks, block_of = [], self._block_of[group]
        for block_hash in hashes:
            block = block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def holds(self, block_hash: bytes, group: int) -> bool:
        """Whether `match` would find it."""
        return block_hash in self._block_of[group]

    def find(self, block_hash: bytes, group: int) -> int | None:
        """The block that `match` would find."""
        return self._block_of[group].get(block_hash)

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are in no table: by so much `acquire` would lessen `num_free`."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Adds one holder to each of `blocks`, as found by `match`."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each and unspecified content: all or none.

        Raises ValueError when fewer are free; the scheduler asks `num_free` first.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blocks = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def publish(self, block: int, block_hash: bytes, group: int = 0) -> None:
        """Names the content of a held block, which is complete and changes no more."""
        block_of = self._block_of[group]
        if self._hash_of[block] is not None or block_hash in block_of:
            return
        self._hash_of[block] = block_hash
        block_of[block_hash] = block
        self._group_of[block] = group
        if not group:
            self._record(True, block_hash)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Takes the names off those of `blocks` that have a single holder: their content proved
        bad. The holder frees them as usual."""
        for block in blocks:
            if self._ref_counts[block] == 1 and self._hash_of[block] is not None:
                self._unname(block)

    def forget(self, hashes: Iterable[bytes], group: int = 0) -> None:
        """Takes these names off the group's blocks that nobody holds: the same of what was given
        back since."""
        for block_hash in hashes:
            block = self._block_of[group].get(block_hash)
            if block is not None and not self._ref_counts[block]:
                del self._cached[block]
                self._unname(block)
                self._empty.append(block)

    def free(self, blocks: Sequence[int], lasting: int | None = None) -> None:
        """Ends one holder's hold on each block of its table, given in the table's order. `lasting`:
        only so many of the first are likely to be asked for again; None: all."""
        for block in reversed(blocks):
            if self._ref_counts[block] < 1:
                raise IntegrityError(f"block {block} is freed but nobody holds it")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._hash_of[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = True
        if lasting is not None:
            for block in blocks[lasting:]:
                if block in self._cached:
                    self._cached[block] = False
                    self._cached.move_to_end(block, last=False)

    def forgo(self, blocks: Iterable[int]) -> None:
        """Those of them that nobody holds are not worth being copied out when they are evicted."""
        for block in blocks:
            if block in self._cached:
                self._cached[block] = False

    def snapshot(self) -> list[bytes]:
        """All visible hashes of group 0."""
        return list(self._block_of[0])

    def take_events(self) -> list[KvEvents]:
        """What changed in `snapshot` since the last call."""
        events, self._events = self._events, []
        return events

    def take_evicted(self) -> list[Evicted]:
        """What was evicted since the last call, and is worth being copied out."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises IntegrityError unless the pool agrees with itself and with all block tables."""
        counts = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a block table holds a block twice: {table}")
            for block in table:
                counts[block] += 1
        if counts != self._ref_counts:
            wrong = [b for b in range(self.num_blocks) if counts[b] != self._ref_counts[b]]
            raise IntegrityError(f"blocks with a wrong reference count: {wrong}")
        free = [*self._empty, *self._cached]
        if sorted(free) != [b for b in range(self.num_blocks) if counts[b] == 0]:
            raise IntegrityError("the free blocks are not exactly those that nobody holds")
        named: list[dict[bytes, int]] = [{} for _ in self._block_of]
        for block, block_hash in enumerate(self._hash_of):
            if block_hash is not None:
                named[self._group_of[block]][block_hash] = block
        if named != self._block_of:
            raise IntegrityError("hashes and blocks do not name each other")
        if any(self._hash_of[b] is not None for b in self._empty):
            raise IntegrityError("an empty block has a hash")
        if any(self._hash_of[b] is None for b in self._cached):
            raise IntegrityError("a cached block has no hash")

    def _evict(self) -> int:
        block, lasts = self._cached.popitem(last=False)
        block_hash = self._hash_of[block]
        if lasts and block_hash is not None:
            self._evicted.append(Evicted(block_hash, self._group_of[block], block))
        self._unname(block)
        return block

    def _unname(self, block: int) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        group, self._hash_of[block] = self._group_of[block], None
        del self._block_of[group][block_hash]
        if not group:
            self._record(False, block_hash)

    def _record(self, stored: bool, block_hash: bytes) -> None:
        if not self._events or self._events[-1].stored != stored:
            self._events.append(KvEvents(stored, []))
        self._events[-1].hashes.append(block_hash)
