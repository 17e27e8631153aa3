"""Who waits, and who holds one of the places and blocks with it.

Admission takes the blocks of the whole prompt at once, less what the prefix cache holds, and leaves
one free block for every sequence that holds a place, so that admitting does not at once force a
preemption. At least one token of a sequence is always computed, for its logits. A sequence whose
next block is being computed by a running one waits for it: what many have in common is computed
once.

Preemption. A decode that needs a block when none is free takes those of a victim among the running
sequences, itself included (preemption.py). Sequences that wait for the other side of a split are
never victims: what they hold was computed elsewhere, or has not been handed over yet.
"""

from bisect import insort
from operator import attrgetter

from services.worker.engine.block_pool import BlockPool
from services.worker.engine.chunks import Step
from services.worker.engine.preemption import choose_victim
from services.worker.engine.sequence import Sequence, Status
from services.worker.engine.tables import Tables
from services.worker.engine.waiting import Waiting

ORDER = attrgetter("order")


class Places:
    """`most` of them."""

    def __init__(self, pool: BlockPool, prefix_caching: bool, most: int) -> None:
        self.most = most
        self.tables = Tables(pool, prefix_caching)
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        """In order."""
        self.num_reserved = 0
        self._pool = pool

    @property
    def num_taken(self) -> int:
        return len(self.running) + self.num_reserved

    @property
    def all_can_grow(self) -> bool:
        """Whether there is a block for every token that the next step may compute."""
        growing = sum(
            sequence.blocks_needed - len(sequence.blocks)
            for sequence in self.running
            if sequence.length > sequence.room and sequence.num_remaining
        )
        return growing <= self._pool.num_free

    def admit(self, sequence: Sequence, step: Step) -> bool:
        """Gives the first of the waiting a place and blocks for all its tokens, if there are
        enough."""
        if self.num_taken >= self.most:
            return False
        if not self.tables.fill(sequence, headroom=self.num_taken):
            return False
        self.waiting.pop()
        num_cached = sequence.num_published * self._pool.block_size
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached = num_cached
        step.admitted.append(sequence)
        if sequence.remote:
            sequence.status = Status.RESERVED
            self.num_reserved += 1
            step.reserved.append(sequence)
        else:
            sequence.num_computed = sequence.num_launched = num_cached
            self._run(sequence)
        return True

    def grow(self, sequence: Sequence, step: Step) -> bool:
        """Makes room for the sequence's last tokens. False: it was preempted."""
        while sequence.length > sequence.room and sequence.status is Status.RUNNING:
            if self._pool.num_free:
                sequence.hold(self._pool.allocate(1))
            else:
                self.preempt(choose_victim(self.running, sequence, self._pool), step)
        return sequence.status is Status.RUNNING

    def preempt(self, sequence: Sequence, step: Step) -> None:
        self.running.remove(sequence)
        self.tables.leave(sequence)
        self.tables.release(sequence)
        sequence.status = Status.WAITING
        sequence.queued_tokens = self.tables.to_compute(sequence)
        self.waiting.push(sequence)
        step.preempted.append(sequence)

    def start(self, sequence: Sequence) -> None:
        """One that was reserved runs."""
        self.num_reserved -= 1
        self._run(sequence)

    def leave(self, sequence: Sequence) -> None:
        """One that is at its end waits or runs no more; it keeps its blocks."""
        match sequence.status:
            case Status.RUNNING:
                self.running.remove(sequence)
            case Status.RESERVED:
                self.num_reserved -= 1
            case Status.WAITING:
                self.waiting.leave(sequence)
        sequence.status = Status.FINISHED
        self.tables.leave(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=ORDER)
