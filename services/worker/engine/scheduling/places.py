"""Who waits, and who holds one of the places and blocks with it.

Admission takes the blocks of the whole prompt at once (of a KV group with a window as many as it
ever holds), less what the prefix cache has, and leaves one free block of each group for every
sequence that holds a place, so that admitting does not at once force a preemption. At least one
token of a sequence is always computed, for its logits. A sequence whose next block is being
computed by a running one waits for it: what many have in common is computed once.
Nor do more different adapters hold places than a step may have (adapters/); whose is one more
waits, as for a block, and nobody overtakes it.

One that is to have blocks from below the device waits for them in its place (`Loading`). When they
are there it runs; if some could not be had, it goes back to the queue with what was. Who needs one
of them, too, is set aside until then: the device is free, and whoever is behind may go ahead.

Preemption. A decode that needs a block when none is free takes those of a victim among the running
sequences, itself included (preemption.py). Sequences that wait for KV are never victims: what they
hold was computed elsewhere, or has not been handed over yet, or they are about to run.
"""

from bisect import insort
from collections import Counter
from operator import attrgetter

from services.worker.engine.kv.tables import Tables
from services.worker.engine.scheduling.chunks import Step
from services.worker.engine.scheduling.preemption import choose_victim
from services.worker.engine.scheduling.waiting import Waiting
from services.worker.engine.sequence import Sequence, Status

ORDER = attrgetter("order")


class Places:
    """`most` of them."""

    def __init__(self, tables: Tables, most: int, most_adapters: int) -> None:
        self.most, self._most_adapters = most, most_adapters
        self._adapted: Counter[int] = Counter()
        """Sequences with a place, by their adapter's; those without one are not counted."""
        self.tables = tables
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        """In order."""
        self.num_reserved = 0
        """That wait for another engine."""
        self.loading: list[Sequence] = []
        """That wait for blocks from below, in the order in which they were admitted."""
        self._pool = tables.pool

    @property
    def num_taken(self) -> int:
        return len(self.running) + self.num_reserved + len(self.loading)

    @property
    def all_can_grow(self) -> bool:
        """Whether there is a block for every token that the next step may compute."""
        growing = sum(
            sum(self.tables.lacking(sequence))
            for sequence in self.running
            if sequence.length > sequence.room and sequence.num_remaining
        )
        return growing <= self._pool.num_free

    def admit(self, sequence: Sequence, step: Step) -> bool:
        """Gives the first of the waiting a place and blocks for all its tokens, if there are
        enough, or sets it aside. False: nobody goes ahead of it."""
        if self.num_taken >= self.most:
            return False
        another = sequence.place >= 0 and not self._adapted[sequence.place]
        if another and len(+self._adapted) >= self._most_adapters:
            return False
        found = self.tables.find(sequence)
        if found.by and found.by.loading:
            self.waiting.set_aside()
            return True
        if found.by or not self.tables.fill(sequence, found, headroom=self.num_taken):
            return False
        self.waiting.pop()
        if sequence.place >= 0:
            self._adapted[sequence.place] += 1
        num_cached = found.reach * self._pool.block_size
        step.admitted.append(sequence)
        if sequence.remote:
            self._note_cached(sequence, num_cached)
            sequence.status = Status.AWAITING_KV
            self.num_reserved += 1
            step.reserved.append(sequence)
        elif sequence.loading:
            sequence.status = Status.AWAITING_KV
            sequence.loading.tokens = num_cached
            self.loading.append(sequence)
        else:
            self._begin(sequence, num_cached)
        return True

    def grow(self, sequence: Sequence, step: Step) -> bool:
        """Makes room for the sequence's last tokens. False: it was preempted."""
        lacking = self.tables.lacking(sequence)
        while sum(lacking) > self._pool.num_free and sequence.status is Status.RUNNING:
            self.preempt(choose_victim(self.running, sequence, self._pool), step)
        if sequence.status is not Status.RUNNING:
            return False
        self.tables.grow(sequence, lacking)
        return True

    def preempt(self, sequence: Sequence, step: Step) -> None:
        self.running.remove(sequence)
        self._queue_again(sequence)
        step.preempted.append(sequence)

    def start(self, sequence: Sequence) -> None:
        """One that was reserved runs."""
        self.num_reserved -= 1
        self._run(sequence)

    def end_loading(self, sequence: Sequence) -> None:
        """One runs for which all was loaded; else it is queued again."""
        assert sequence.loading is not None
        self._load_no_more(sequence)
        if sequence.loading.is_whole:
            self._begin(sequence, sequence.loading.tokens)
            self.tables.publish(sequence)
        else:
            self.tables.keep_loaded(sequence)
            self._queue_again(sequence)
        sequence.loading = None

    def leave(self, sequence: Sequence) -> None:
        """One that is at its end waits or runs no more; it keeps its blocks."""
        match sequence.status:
            case Status.RUNNING:
                self.running.remove(sequence)
                self._give_up(sequence)
            case Status.AWAITING_KV:
                if sequence.loading:
                    self._load_no_more(sequence)
                else:
                    self.num_reserved -= 1
                self._give_up(sequence)
            case Status.WAITING:
                self.waiting.leave(sequence)
        sequence.status = Status.FINISHED
        self.tables.leave(sequence)

    def _load_no_more(self, sequence: Sequence) -> None:
        """Who was set aside because of it finds what came, or somebody else to wait for."""
        self.loading.remove(sequence)
        self.waiting.bring_back()

    def _give_up(self, sequence: Sequence) -> None:
        if sequence.place >= 0:
            self._adapted[sequence.place] -= 1

    def _begin(self, sequence: Sequence, num_cached: int) -> None:
        """It runs, behind so many tokens that need not be computed."""
        self._note_cached(sequence, num_cached)
        sequence.num_computed = sequence.num_launched = num_cached
        self._run(sequence)

    def _note_cached(self, sequence: Sequence, num_cached: int) -> None:
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached = num_cached

    def _queue_again(self, sequence: Sequence) -> None:
        self._give_up(sequence)
        self.tables.leave(sequence)
        self.tables.release(sequence)
        sequence.status = Status.WAITING
        sequence.queued_tokens = self.tables.to_compute(sequence)
        self.waiting.push(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=ORDER)
