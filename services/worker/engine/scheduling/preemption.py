"""Whose blocks are taken when a sequence needs one and none is free.

Of the least important priority present, the one that wastes least, by

    waste = computed tokens in blocks that nobody else holds,

which are what has to be computed again; the latest arrival among equals. It must free at least one
block.
"""

from collections.abc import Iterable

from services.worker.engine.kv.block_pool import BlockPool
from services.worker.engine.sequence import Sequence


def choose_victim(running: Iterable[Sequence], needy: Sequence, pool: BlockPool) -> Sequence:
    """Of those that run; it may be the needy one itself."""
    possible = [other for other in running if other is needy or _is_alone(other, pool)]
    return min(
        possible,
        key=lambda other: (-other.request.priority, _waste(other, pool), -other.arrival),
    )


def _waste(sequence: Sequence, pool: BlockPool) -> int:
    size = pool.block_size
    return sum(
        min(size, max(0, sequence.num_computed - index * size))
        for held, gone in zip(sequence.held, sequence.passed, strict=True)
        for index, block in enumerate(held, gone)
        if pool.ref_count(block) == 1
    )


def _is_alone(sequence: Sequence, pool: BlockPool) -> bool:
    """In the tables of a block of its own."""
    return any(pool.ref_count(block) == 1 for held in sequence.held for block in held)
