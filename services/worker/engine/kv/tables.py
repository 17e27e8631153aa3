"""How sequences come by their blocks: from the prefix cache, from the pool, and back.

Of a group with a window (kv/groups.py) a sequence holds the blocks that its next tokens look at,
and those that are being filled: at most as many as `KvGroup.most_held` says, from admission on, so
that a prompt in pieces takes anew what it has just given back. What the window has passed stays in
the prefix cache until it is evicted. A prefix is found where all groups have what a token behind it
looks at: of a window the last blocks.

Where there is a tier below the device (kv_tiers/), a prefix also goes on there: who finds more of
his in both gets blocks for it, and waits until they are filled; unless computing it is expected to
be sooner.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import NamedTuple

from services.worker.engine.kv.block_pool import BlockPool, IntegrityError
from services.worker.engine.kv.coming import Coming
from services.worker.engine.kv.groups import WHOLE, KvGroup, keeping_all
from services.worker.engine.kv.tiers.disk import DiskTier
from services.worker.engine.kv.tiers.folder import Name
from services.worker.engine.kv.tiers.loading import Wanted
from services.worker.engine.scheduling.cost_model import CostModel
from services.worker.engine.sequence import Sequence

Holds = Callable[[bytes, int], bool]
"""Whether a KV group's block of a hash is there."""


class Found(NamedTuple):
    """Of a prefix, what is there or on its way."""

    cached: int
    """Leading blocks on the device."""
    reach: int
    """With those that are to be loaded."""
    declined: int
    """That could be loaded, and are rather computed."""
    by: Sequence | None
    """Who computes or loads the next one, and is to be waited for."""


class Tables:
    """The pool's one owner: fills the block tables, and names what is complete in them."""

    def __init__(
        self,
        pool: BlockPool,
        prefix_caching: bool,
        groups: Seq[KvGroup] = WHOLE,
        at_once: int = 0,
        keeps_all: bool = False,
        cost: CostModel | None = None,
        tier: DiskTier | None = None,
    ) -> None:
        """`at_once`: tokens of a sequence that were launched and have not come back, at most.
        `keeps_all`: the first table's blocks are a draft model's, too, which looks at all. `cost`:
        of computing, which is weighed against loading from `tier`."""
        self.pool, self.tier, self._cost = pool, tier, cost or CostModel()
        self.num_groups = len(groups)
        self.prefix_caching = prefix_caching
        self._furthest = groups[0]
        self._groups = keeping_all(groups) if keeps_all else groups
        self._windows = [number for number, group in enumerate(self._groups) if group.window]
        self._is_plain = len(groups) == 1 and not self._windows
        """As most models are: what each step asks for must not cost them what the others need."""
        self._most = [group.most_held(at_once, pool.block_size) for group in self._groups]
        self._coming = Coming()

    def to_compute(self, sequence: Sequence) -> int:
        """Tokens of one that holds nothing that are to be computed here, and are not cached now,
        nor below: what is there is fetched nearer."""
        if sequence.remote:
            return 0
        cached = self._cached(sequence)
        reach, _ = self._reach(sequence, cached)
        if self.tier and reach > cached:
            self.tier.ahead(self._below(sequence, reach))
        return len(sequence.tokens) - reach * self.pool.block_size

    def find(self, sequence: Sequence) -> Found:
        """What there is of a prefix for one that holds nothing."""
        cached = self._cached(sequence)
        reach, declined = self._reach(sequence, cached)
        by = self._by(sequence, cached) or self._by(sequence, reach)
        return Found(cached, reach, declined, by)

    def fill(self, sequence: Sequence, found: Found, headroom: int) -> bool:
        """Gives it blocks for all its tokens, or as many as it may hold of them, what was just
        found among them; if `headroom` others stay free for each group. It has then `loading`
        blocks, if some are below the device. False: there are not as many, and it has got none."""
        pool, size, cached, reach = self.pool, self.pool.block_size, found.cached, found.reach
        # Of a prompt that another engine computes come the blocks that its first decode looks at.
        behind = sequence.num_prompt if sequence.remote else reach * size
        hashes, firsts = sequence.hash_blocks(reach), self._firsts(behind)
        shared = [
            [pool.find(one, number) for one in hashes[first:]]
            for number, first in enumerate(firsts)
        ]
        wanted = [
            int(min(sequence.blocks_needed, first + most)) - max(first, reach)
            for first, most in zip(firsts, self._most, strict=True)
        ]
        held = [block for blocks in shared for block in blocks if block is not None]
        missing = sum(map(len, shared)) - len(held)
        needed = sum(wanted) + missing + headroom * len(self._groups)
        if needed > pool.num_free - pool.num_unheld(held):
            return False
        if found.declined and self.tier:
            self.tier.decline(found.declined)
        pool.acquire(held)
        tables: list[list[int]] = []
        loads: list[Wanted] = []
        for number, (first, blocks) in enumerate(zip(firsts, shared, strict=True)):
            table = [0] * first
            for block_hash, block in zip(hashes[first:], blocks, strict=True):
                if block is None:
                    (block,) = pool.allocate(1)
                    loads.append(Wanted((block_hash, number), block))
                table.append(block)
            tables.append(table + pool.allocate(wanted[number]))
        sequence.hold(*tables)
        sequence.passed, sequence.begins = firsts, firsts[:]
        # What no group looks at behind a prompt does not come with it.
        known = max(reach, self._furthest.first_seen(behind, size))
        sequence.num_published = sequence.num_received = known
        if loads and self.tier:
            sequence.loading = self.tier.load(loads)
            sequence.num_published = cached
        if self.prefix_caching and not sequence.remote:
            full = len(sequence.tokens) // size
            self._coming.add(sequence.hash_blocks(full)[cached:], sequence)
        return True

    def lacking(self, sequence: Sequence) -> list[int]:
        """Blocks that it needs to go on, of each group; no more than it may hold."""
        needed = sequence.blocks_needed
        if self._is_plain:
            return [needed - len(sequence.blocks)]
        return [
            max(0, int(min(needed, gone + most)) - len(table))
            for table, gone, most in zip(sequence.tables, sequence.passed, self._most, strict=True)
        ]

    def grow(self, sequence: Sequence, counts: list[int]) -> None:
        """Gives it so many of each group; there are as many."""
        sequence.hold(*map(self.pool.allocate, counts))

    def stretch(self, sequence: Sequence, count: int) -> int:
        """Room behind its tokens for `count` guesses, or as many as there are free blocks for."""
        each = len(self._groups)
        while sequence.length + count > sequence.room and self.pool.num_free >= each:
            sequence.hold(*([block] for block in self.pool.allocate(each)))
        return min(count, sequence.room - sequence.length)

    def trim(self, sequence: Sequence) -> None:
        """Takes back what only guesses needed."""
        self.pool.free(sequence.let_go())

    def publish(self, sequence: Sequence) -> None:
        """Makes its newly completed blocks findable."""
        complete = sequence.num_computed // self.pool.block_size
        if complete == sequence.num_published or not self.prefix_caching:
            return
        hashes = sequence.hash_blocks(complete)
        for group, gone in enumerate(sequence.passed):
            table = sequence.more[group - 1] if group else sequence.blocks
            for index in range(max(gone, sequence.num_published), complete):
                self.pool.publish(table[index], hashes[index], group)
        self._coming.take(hashes[sequence.num_published :], sequence)
        sequence.num_published = complete

    def pass_by(self, sequence: Sequence) -> None:
        """Takes back the blocks that no token looks at any more. Steps that run look at none of
        them: they are of tokens behind those that are computed."""
        for number in self._windows:
            first = self._groups[number].first_seen(sequence.num_computed, self.pool.block_size)
            if first > (gone := sequence.passed[number]):
                blocks = sequence.pass_by(number, first)
                self.pool.free(blocks)
                if self.tier:
                    ends = self._ends(sequence, number)
                    self.pool.forgo(
                        block for index, block in enumerate(blocks, gone) if index not in ends
                    )

    def _ends(self, sequence: Sequence, number: int) -> set[int]:
        """Of a window's blocks those that are looked at where the prompt ends, or what was found of
        it: there another request may go on."""
        size, group = self.pool.block_size, self._groups[number]
        found, prompt = sequence.num_cached, sequence.num_prompt
        return {
            *range(group.first_seen(found, size), found // size),
            *range(group.first_seen((prompt - 1) // size * size, size), prompt // size),
        }

    def keep_loaded(self, sequence: Sequence) -> None:
        """Not all of what it waited for has come: what has is findable, for it or others."""
        assert sequence.loading is not None
        for (block_hash, group), block in sequence.loading.came:
            self.pool.publish(block, block_hash, group)

    def withdraw(self, sequence: Sequence) -> None:
        """Nobody shall find its blocks, here or below, nor those that windows have passed, but what
        others hold, too."""
        ranges = zip(sequence.begins, sequence.passed, strict=True)
        for number, (begin, gone) in enumerate(ranges):
            self.pool.withdraw(sequence.tables[number][gone:])
            self.pool.forget(sequence.hashes[begin:gone], number)
            if self.tier:
                named = sequence.hashes[begin : sequence.num_published]
                holds = self.pool.holds
                self.tier.forget([(one, number) for one in named if not holds(one, number)])

    def leave(self, sequence: Sequence) -> None:
        """It computes, or loads, no more of what others may wait for."""
        if sequence.loading and self.tier:
            self.tier.give_up(sequence.loading)
        self._coming.take(sequence.hashes, sequence)

    def release(self, sequence: Sequence) -> None:
        """Takes all its blocks back. Who asks for no tokens does not go on after its prompt, so
        what it computed is worth less than what it found."""
        found = None if sequence.pool is None else sequence.num_received
        for held, gone in zip(sequence.held, sequence.passed, strict=True):
            self.pool.free(held, None if found is None else max(0, found - gone))
        sequence.give_back()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises IntegrityError if a block is lost or held twice by all that hold any."""
        held = [held for sequence in sequences for held in sequence.held]
        self.pool.check(held)
        if not any(held) and self._coming:
            raise IntegrityError("blocks are awaited that nobody computes")

    def _usable(self, sequence: Sequence) -> int:
        """Full blocks that may come from the cache. A remote prompt is not computed here, so all of
        it may; else its last token is, for its logits, or all are, whose logprobs or states are
        wanted."""
        pool = sequence.pool
        if sequence.scores is not None or (pool is not None and pool.of_all):
            return 0
        return (len(sequence.tokens) - (not sequence.remote)) // self.pool.block_size

    def _cached(self, sequence: Sequence) -> int:
        """Leading blocks behind which it may go on: all groups have what is looked at there."""
        if not self.prefix_caching:
            return 0
        hashes = sequence.hash_blocks(self._usable(sequence))
        count = len(hashes)
        for number, group in enumerate(self._groups):
            if not group.window:
                count = len(self.pool.match(hashes[:count], number))
        return self._fitting(hashes, count, self.pool.holds)

    def _reach(self, sequence: Sequence, cached: int) -> tuple[int, int]:
        """The same with what is to be loaded; and how many blocks could be, and are rather not.
        `cached`: of the device alone."""
        reach = self._further(sequence, cached)
        if reach == cached or self._pays(cached, reach, loads := len(self._below(sequence, reach))):
            return reach, 0
        return cached, loads

    def _pays(self, cached: int, reach: int, loads: int) -> bool:
        """Whether blocks [cached, reach) are there sooner if so many are loaded than if all are
        computed. A token costs the more to compute the more lie before it, and always the same to
        load: if it pays for some of the first, it does for all."""
        assert self.tier is not None
        size = self.pool.block_size
        computing_s = self._cost.chunk_s(cached * size, (reach - cached) * size)
        return self.tier.pace.expected_s(loads) <= computing_s

    def _below(self, sequence: Sequence, reach: int) -> list[Name]:
        """What is to be loaded for a beginning of so many blocks."""
        return [
            (block_hash, number)
            for number, first in enumerate(self._firsts(reach * self.pool.block_size))
            for block_hash in sequence.hash_blocks(reach)[first:]
            if not self.pool.holds(block_hash, number)
        ]

    def _further(self, sequence: Sequence, cached: int) -> int:
        """The same with what lies below the device; a prompt that another engine computes comes
        from there. `cached`: of the device alone."""
        if self.tier is None or not self.prefix_caching or sequence.remote or not sequence.loads:
            return cached
        hashes = sequence.hash_blocks(self._usable(sequence))
        count = len(hashes)
        for number, group in enumerate(self._groups):
            if not group.window:
                count = self._leading(hashes[:count], number)
        return self._fitting(hashes, count, self._is_somewhere)

    def _leading(self, hashes: list[bytes], number: int) -> int:
        return sum(takewhile(bool, (self._is_somewhere(one, number) for one in hashes)))

    def _is_somewhere(self, block_hash: bytes, group: int) -> bool:
        assert self.tier is not None
        return self.pool.holds(block_hash, group) or self.tier.holds(block_hash, group)

    def _firsts(self, behind: int) -> list[int]:
        """Of each group the first block that the token at `behind` looks at."""
        return [group.first_seen(behind, self.pool.block_size) for group in self._groups]

    def _fitting(self, hashes: list[bytes], count: int, holds: Holds) -> int:
        """The first `count` blocks without those at the end behind which a window lacks some."""
        before = -1
        while self._windows and count != before:  # what one lacks, the others are not asked for
            before = count
            for number in self._windows:
                count = self._ending(hashes, count, number, holds)
        return count

    def _ending(self, hashes: list[bytes], count: int, number: int, holds: Holds) -> int:
        """The most of the first `count` blocks, of whose last ones the group has all that a token
        behind them looks at."""
        group, size = self._groups[number], self.pool.block_size
        at = count
        while count:
            first = group.first_seen(count * size, size)
            while at > first and holds(hashes[at - 1], number):
                at -= 1
            if at <= first:
                return count
            count = at = at - 1
        return 0

    def _by(self, sequence: Sequence, index: int) -> Sequence | None:
        """Who computes or loads block `index`, if it is of use."""
        if not self.prefix_caching or index >= self._usable(sequence):
            return None
        return self._coming.by(sequence.hash_blocks(index + 1)[index])
