"""Decides what the next step computes. Pure Python; touches no tensor.

Order of a step, under a budget of `max_batched_tokens`:

1. Decodes: one token for each running sequence that has only that left.
2. Prompts already begun, in chunks as large as the budget allows.
3. New sequences, while there are places (`max_running`), blocks and budget.

Within each, sequences go by (priority, arrival). The queue's head is never overtaken, so nobody
starves behind smaller requests; preempted sequences keep their place in that order.

Admission takes the blocks of the whole prompt at once, less what the prefix cache holds, and leaves
one free block for every sequence that holds a place, so that admitting does not at once force a
preemption. At least one token of a sequence is always computed, for its logits. A sequence whose
next block is being computed by a running one waits for it: what many have in common is computed
once.

Preemption. A decode that needs a block when none is free takes those of a victim among the running
sequences, itself included: of the least important priority present, the one that wastes least, by

    waste = computed tokens in blocks that nobody else holds,

which are what has to be computed again; the latest arrival among equals. It must free at least
one block. Sequences that wait for the other side of a split are never victims: what they hold
was computed elsewhere, or has not been handed over yet.

Order of effects
- `schedule` changes block tables and statuses. `num_computed`, tokens and visible hashes change in
  `complete` only, chunk by chunk: whatever chunk failed to run is simply not completed. The caller
  then aborts its sequence, or leaves it and the next `schedule` gives the same chunk again.
- Between `schedule` and the last `complete` of its step, nothing else may be called but `abort`.
- A finished sequence's blocks are freed by `finish`, and by nothing else.
"""

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.worker.engine.block_pool import BlockPool, IntegrityError
from services.worker.engine.messages import FinishReason
from services.worker.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """It ends with the sequence's last token, so that the next one can be sampled."""

    @classmethod
    def of(cls, sequence: Sequence, count: int) -> "Chunk":
        """The next `count` tokens of those not computed yet."""
        start = sequence.num_computed
        return cls(sequence, start, count, start + count == len(sequence.tokens))

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_decode(self) -> bool:
        return self.start >= self.sequence.num_prompt and self.count == 1


@dataclass(slots=True)
class Step:
    """The decision. Chunks of one token come first."""

    chunks: list[Chunk] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)
    """Got room for a prompt that another engine computes."""
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns all unfinished sequences and, through the pool, all blocks."""

    def __init__(
        self,
        pool: BlockPool,
        max_batched_tokens: int,
        max_running: int,
        prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.prefix_caching = prefix_caching
        self.sequences: dict[str, Sequence] = {}
        """All unfinished ones, by id."""
        self._queue: list[tuple[tuple[int, int], Sequence]] = []
        """Heap of the waiting; those finished meanwhile are skipped when they come up."""
        self._running: list[Sequence] = []
        """In order."""
        self._num_reserved = 0
        self._coming: dict[bytes, Sequence] = {}
        """Hashes of full blocks that are to be published, by who computes them."""

    @property
    def num_running(self) -> int:
        """Sequences that hold a place."""
        return len(self._running) + self._num_reserved

    @property
    def num_waiting(self) -> int:
        return len(self.sequences) - self.num_running

    @property
    def num_pending(self) -> int:
        """Sequences that wait for nobody but this engine."""
        return len(self.sequences) - self._num_reserved

    @property
    def queued_prefill_tokens(self) -> int:
        return sum(
            sequence.num_remaining
            for sequence in self.sequences.values()
            if sequence.num_remaining > 1 and not sequence.remote
        )

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence
        heapq.heappush(self._queue, (sequence.order, sequence))

    def schedule(self) -> Step:
        step = Step()
        scheduled: dict[str, Chunk] = {}
        for sequence in tuple(self._running):
            # A decode earlier in the list may have preempted this one.
            decodes = sequence.status is Status.RUNNING and sequence.num_remaining == 1
            if decodes and self._grow(sequence, step):
                scheduled[sequence.id] = Chunk.of(sequence, 1)
        for victim in step.preempted:
            scheduled.pop(victim.id, None)
        budget = self.max_batched_tokens - len(scheduled)

        for sequence in self._running:
            if budget and sequence.num_remaining > 1:
                budget -= self._schedule_prefill(sequence, budget, scheduled)

        # Blocks that a preemption just freed are for those that go on running.
        while not step.preempted and (head := self._head()) and (budget or head.remote):
            if not self._admit(head):
                break
            heapq.heappop(self._queue)
            if head.remote:
                step.reserved.append(head)
            else:
                budget -= self._schedule_prefill(head, budget, scheduled)

        step.chunks = sorted(scheduled.values(), key=lambda chunk: chunk.count > 1)
        return step

    def complete(self, chunk: Chunk, tokens: list[int]) -> FinishReason | None:
        """Records that `chunk` ran, and what it sampled: tokens after the sequence's last one, of
        which those beyond its end are taken off the list.

        Returns why the sequence is at its end, if it is; the caller then reads what it needs and
        calls `finish`.
        """
        sequence = chunk.sequence
        sequence.num_computed = chunk.start + chunk.count
        self._publish(sequence)
        if not tokens:
            return None
        for index, token in enumerate(tokens):
            if reason := sequence.append(token):
                del tokens[index + 1 :]
                break
        if sequence.request.prefill_only and reason is None:
            return FinishReason.PREFILL_DONE
        return reason

    def start_decode(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Makes a reserved sequence, whose prompt has arrived, a running one; `token` is its first.
        Returns as `complete` does."""
        sequence.remote = False
        sequence.num_computed = sequence.num_prompt
        self._publish(sequence)
        self._num_reserved -= 1
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=lambda other: other.order)
        return sequence.append(token)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in whatever state it is and frees its blocks."""
        match sequence.status:
            case Status.RUNNING:
                self._running.remove(sequence)
            case Status.RESERVED:
                self._num_reserved -= 1
        self._release(sequence)
        sequence.status = Status.FINISHED
        del self.sequences[sequence.id]

    def abort(self, sequence: Sequence) -> None:
        """Like `finish`, for a sequence whose KV may be bad: nobody shall find it."""
        self.pool.withdraw(sequence.blocks)
        self.finish(sequence)

    def check(self) -> None:
        """Raises IntegrityError if a block is lost or held twice."""
        self.pool.check(sequence.blocks for sequence in self.sequences.values())
        if not self.sequences and self._coming:
            raise IntegrityError("blocks are awaited that nobody computes")

    def _head(self) -> Sequence | None:
        while self._queue and self._queue[0][1].status is Status.FINISHED:
            heapq.heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def _schedule_prefill(
        self, sequence: Sequence, budget: int, scheduled: dict[str, Chunk]
    ) -> int:
        count = min(sequence.num_remaining, budget)
        scheduled[sequence.id] = Chunk.of(sequence, count)
        return count

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a place and blocks for all its tokens, if there are enough."""
        if self.num_running >= self.max_running:
            return False
        # A remote prompt is not computed here, so all of it may come from the cache.
        usable = len(sequence.tokens) - (0 if sequence.remote else 1)
        cached = self._match(sequence, usable // self.pool.block_size)
        if self._is_coming(sequence, len(cached), usable // self.pool.block_size):
            return False
        new = sequence.blocks_needed - len(cached)
        headroom = self.num_running
        if new + headroom > self.pool.num_free - self.pool.num_unheld(cached):
            return False
        self.pool.acquire(cached)
        sequence.hold(cached + self.pool.allocate(new))
        sequence.num_published = sequence.num_received = len(cached)
        num_cached = len(cached) * self.pool.block_size
        if sequence.remote:
            sequence.status = Status.RESERVED
            self._num_reserved += 1
        else:
            sequence.status = Status.RUNNING
            sequence.num_computed = num_cached
            for block_hash in self._full_hashes(sequence)[len(cached) :]:
                self._coming.setdefault(block_hash, sequence)
            insort(self._running, sequence, key=lambda other: other.order)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached = num_cached
        return True

    def _match(self, sequence: Sequence, max_blocks: int) -> list[int]:
        return self.pool.match(sequence.hash_blocks(max_blocks)) if self.prefix_caching else []

    def _is_coming(self, sequence: Sequence, index: int, end: int) -> bool:
        """Whether block `index` of the sequence, of `end` that it could use, is being computed."""
        if not self.prefix_caching or index >= end:
            return False
        return sequence.hash_blocks(index + 1)[index] in self._coming

    def _full_hashes(self, sequence: Sequence) -> list[bytes]:
        if not self.prefix_caching:
            return []
        return sequence.hash_blocks(len(sequence.tokens) // self.pool.block_size)

    def _grow(self, sequence: Sequence, step: Step) -> bool:
        """Makes room for the sequence's last token. False: it was preempted itself."""
        if len(sequence.blocks) >= sequence.blocks_needed:
            return True
        while self.pool.num_free == 0:
            victim = min(self._victims(sequence), key=self._cost_of_preempting)
            self._preempt(victim, step)
            if victim is sequence:
                return False
        sequence.hold(self.pool.allocate(1))
        return True

    def _victims(self, sequence: Sequence) -> Iterator[Sequence]:
        for other in self._running:
            if other is sequence or any(self.pool.ref_count(b) == 1 for b in other.blocks):
                yield other

    def _cost_of_preempting(self, sequence: Sequence) -> tuple[int, int, int]:
        size = self.pool.block_size
        waste = sum(
            min(size, max(0, sequence.num_computed - index * size))
            for index, block in enumerate(sequence.blocks)
            if self.pool.ref_count(block) == 1
        )
        priority, arrival = sequence.order
        return -priority, waste, -arrival

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        heapq.heappush(self._queue, (sequence.order, sequence))
        step.preempted.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        for block_hash in sequence.hashes:
            self._arrived(block_hash, sequence)
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_published = 0

    def _publish(self, sequence: Sequence) -> None:
        """Makes the sequence's newly completed blocks findable."""
        complete = sequence.num_computed // self.pool.block_size
        if not self.prefix_caching or complete == sequence.num_published:
            return
        hashes = sequence.hash_blocks(complete)
        for index in range(sequence.num_published, complete):
            self.pool.publish(sequence.blocks[index], hashes[index])
            self._arrived(hashes[index], sequence)
        sequence.num_published = complete

    def _arrived(self, block_hash: bytes, sequence: Sequence) -> None:
        """It is published, or will not be."""
        if self._coming.get(block_hash) is sequence:
            del self._coming[block_hash]
