"""Decides what the next step computes. Pure Python; touches no tensor.

Order of a step, under a budget of `max_batched_tokens`:

1. Decodes: one token for each running sequence that has only that left.
2. Prompts, begun or new, in chunks; new ones while there are places (`max_running`) and blocks.

A step with decodes in it also has a budget of time, so that they do not wait for long: it aims at
`target_itl_s`, or else at twice what it would take if all who compute here now were decoding, each
with as much behind it as those who do. Prompts get what the cost model says is left of that, and
always a fifth of the step, and a token. Without decodes only tokens count. Where the cost model
does not know any more what decodes take alone, a step is without prompts, but no two in a row.

Prompts go by (priority, due, arrival). A prompt is due when, since it came, twice as many tokens
have been computed here as it has itself to compute. So it goes before the rest of a longer one that
is being computed, and yet none waits for ever: who comes when it is due, is due later.
In the queue nobody overtakes whoever is first by that order; preempted sequences keep their place
in it.

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
- `schedule` changes block tables and statuses, and says of each chunk that it gives that it was
  launched. The chunk comes back once, in order: by `complete`, which alone changes `num_computed`,
  tokens and visible hashes, or by `drop` if it failed to run, or what ran before it did. What was
  dropped is given again by the next `schedule`, unless the caller aborts the sequence.
- `schedule` may be called while one step runs: a sequence goes on after the token that the step
  will sample. Should that prove to be its last, its chunk was for nothing: `complete` keeps nothing
  of it. A step for which somebody must be preempted is not scheduled while another runs.
- A finished sequence's blocks are freed by `finish` or, as long as a step that runs writes to them,
  when its last chunk comes back; and by nothing else. So whatever is free, a step that runs neither
  reads nor writes.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from services.worker.engine.block_pool import BlockPool, IntegrityError
from services.worker.engine.coming import Coming
from services.worker.engine.cost_model import CostModel, StepShape, looked_back
from services.worker.engine.messages import FinishReason
from services.worker.engine.prompt_room import PromptRoom, is_worth_a_look, time_for_prompts
from services.worker.engine.sequence import Sequence, Status
from services.worker.engine.waiting import Waiting

_DUE_AFTER = 2
"""Tokens computed here since a prompt came, for each that it has to compute itself: then it is due.
Two, since about half of a step's work may be decodes."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """It ended with the sequence's last token when it was made: the next one is sampled."""

    @classmethod
    def of(cls, sequence: Sequence, count: int) -> "Chunk":
        """The next `count` tokens of those not launched yet."""
        start = sequence.num_launched
        return cls(sequence, start, count, start + count == sequence.length)

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
    shape: StepShape = field(default_factory=StepShape)


class Scheduler:
    """Owns all unfinished sequences and, through the pool, all blocks."""

    def __init__(
        self,
        pool: BlockPool,
        cost: CostModel,
        max_batched_tokens: int,
        max_running: int,
        prefix_caching: bool = True,
        target_itl_s: float | None = None,
    ) -> None:
        self.pool = pool
        self.cost = cost
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.prefix_caching = prefix_caching
        self.target_itl_s = target_itl_s
        self._prompt_share = 1.0
        """As of the last step."""
        self._looks = False
        """The last step is to show what decodes take alone."""
        self.sequences: dict[str, Sequence] = {}
        """All unfinished ones, by id."""
        self._waiting = Waiting()
        self._running: list[Sequence] = []
        """In order."""
        self._num_reserved = 0
        self._computed = 0
        """Tokens of all steps so far."""
        self._in_flight = 0
        """Chunks that have not come back."""
        self._leaving: list[Sequence] = []
        """Finished, with chunks that have not come back: they still hold their blocks."""
        self._coming = Coming()

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
        begun = (s.num_remaining for s in self._running)
        return self._waiting.num_tokens + sum(count for count in begun if count > 1)

    @property
    def prompt_share(self) -> float:
        """Of the time, what prompts get beside those that decode."""
        return self._prompt_share if self._running else 1.0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, and settles its place in the order."""
        sequence.queued_tokens = self._tokens_to_compute(sequence)
        due = self._computed + _DUE_AFTER * sequence.queued_tokens
        sequence.order = (sequence.request.priority, due, sequence.arrival)
        self.sequences[sequence.id] = sequence
        self._waiting.push(sequence)

    def schedule(self) -> Step:
        """The next step, to be launched at once. While another runs there may be none, although
        there will be one when that has been collected."""
        step = Step()
        if self._in_flight and not self._all_can_grow():
            return step
        decodes = self._decodes(step)
        context = sum(chunk.start + 1 for chunk in decodes)
        decoding = StepShape(decodes=len(decodes), decode_context=context)
        tokens = self.max_batched_tokens - len(decodes)
        present = min(self.num_pending, self.max_running)
        seconds, self._prompt_share = time_for_prompts(
            self.cost, decoding, present, tokens, self.target_itl_s
        )
        self._looks = not self._looks and is_worth_a_look(self.cost, decoding)
        room = PromptRoom(self.cost, tokens, 0.0 if self._looks else seconds)
        prompts = [
            Chunk.of(sequence, room.take(sequence.num_launched, sequence.num_remaining))
            for sequence in self._prompts(step, room)
        ]
        tokens = sum(chunk.count for chunk in prompts)
        self._computed += tokens + len(decodes)
        step.chunks = sorted(decodes + prompts, key=lambda chunk: chunk.count > 1)
        step.shape = replace(
            decoding,
            prompt_tokens=tokens,
            prompt_context=sum(looked_back(chunk.start, chunk.count) for chunk in prompts),
        )
        for chunk in step.chunks:
            chunk.sequence.launch(chunk.end, chunk.samples)
        self._in_flight += len(step.chunks)
        return step

    def complete(self, chunk: Chunk, tokens: list[int]) -> FinishReason | None:
        """Records that `chunk` ran, and what it sampled: tokens after the chunk's last one. Those
        beyond the sequence's end are taken off the list, and all of them if the sequence has ended
        or gone on meanwhile.

        Returns why the sequence is at its end, if it is; the caller then reads what it needs and
        calls `finish`.
        """
        sequence = chunk.sequence
        if self._came_back(sequence):
            tokens.clear()
            return None
        sequence.num_computed = chunk.end
        sequence.num_launched = max(sequence.num_launched, chunk.end)
        self._publish(sequence)
        if chunk.end != len(sequence.tokens):
            tokens.clear()
        for index, token in enumerate(tokens):
            if reason := sequence.append(token):
                del tokens[index + 1 :]
                return reason
        return FinishReason.PREFILL_DONE if tokens and sequence.request.prefill_only else None

    def drop(self, chunk: Chunk) -> None:
        """Takes back a chunk that did not run, or that ran after one that did not."""
        if not self._came_back(chunk.sequence):
            chunk.sequence.forget()

    def start_decode(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Makes a reserved sequence, whose prompt has arrived, a running one; `token` is its first.
        Returns as `complete` does."""
        sequence.remote = False
        sequence.num_computed = sequence.num_launched = sequence.num_prompt
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
            case Status.WAITING:
                self._waiting.leave(sequence)
        sequence.status = Status.FINISHED
        del self.sequences[sequence.id]
        self._coming.take(sequence.hashes, sequence)
        if sequence.in_flight:
            self._leaving.append(sequence)
        else:
            self._release(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Like `finish`, for a sequence whose KV may be bad: nobody shall find it."""
        self.pool.withdraw(sequence.blocks)
        self.finish(sequence)

    def check(self) -> None:
        """Raises IntegrityError if a block is lost or held twice."""
        self.pool.check(s.blocks for s in (*self.sequences.values(), *self._leaving))
        if not self.sequences and self._coming:
            raise IntegrityError("blocks are awaited that nobody computes")

    def _decodes(self, step: Step) -> list[Chunk]:
        """One token of each running sequence that has only that left."""
        chunks: dict[str, Chunk] = {}
        for sequence in tuple(self._running):
            # One earlier in the list may have preempted this one.
            runs = sequence.status is Status.RUNNING and sequence.num_remaining
            if runs and self._grow(sequence, step) and sequence.num_remaining == 1:
                chunks[sequence.id] = Chunk.of(sequence, 1)
        for victim in step.preempted:
            chunks.pop(victim.id, None)
        return list(chunks.values())

    def _prompts(self, step: Step, room: PromptRoom) -> Iterator[Sequence]:
        """Sequences with a prompt to compute, in order, while there is room; new ones are admitted
        as they come up. Whose prompt another engine computes needs no room in this step."""
        begun = deque(sequence for sequence in self._running if sequence.num_remaining > 1)
        # Blocks that a preemption just freed are for those that go on running.
        admits = not step.preempted
        while True:
            head = self._waiting.head if admits else None
            first = head and not (begun and begun[0].order < head.order)
            if head and (head.remote or (first and room.left)):
                admits = self._admit(head)
                if admits and head.remote:
                    step.reserved.append(head)
                elif admits:
                    yield head
            elif begun and room.left:
                yield begun.popleft()
            else:
                return

    def _tokens_to_compute(self, sequence: Sequence) -> int:
        """Of a sequence that waits: those not in the prefix cache now."""
        if sequence.remote:
            return 0
        cached = self._match(sequence, (len(sequence.tokens) - 1) // self.pool.block_size)
        return len(sequence.tokens) - len(cached) * self.pool.block_size

    def _admit(self, sequence: Sequence) -> bool:
        """Gives the first of the waiting a place and blocks for all its tokens, if there are
        enough."""
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
        self._waiting.pop()
        self.pool.acquire(cached)
        sequence.hold(cached + self.pool.allocate(new))
        sequence.num_published = sequence.num_received = len(cached)
        num_cached = len(cached) * self.pool.block_size
        if sequence.remote:
            sequence.status = Status.RESERVED
            self._num_reserved += 1
        else:
            sequence.status = Status.RUNNING
            sequence.num_computed = sequence.num_launched = num_cached
            if self.prefix_caching:
                full = len(sequence.tokens) // self.pool.block_size
                self._coming.add(sequence.hash_blocks(full)[len(cached) :], sequence)
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

    def _grow(self, sequence: Sequence, step: Step) -> bool:
        """Makes room for the sequence's last tokens. False: it was preempted itself."""
        while len(sequence.blocks) < sequence.blocks_needed:
            while self.pool.num_free == 0:
                victim = min(self._victims(sequence), key=self._waste_of)
                self._preempt(victim, step)
                if victim is sequence:
                    return False
            sequence.hold(self.pool.allocate(1))
        return True

    def _victims(self, sequence: Sequence) -> Iterator[Sequence]:
        for other in self._running:
            if other is sequence or any(self.pool.ref_count(b) == 1 for b in other.blocks):
                yield other

    def _waste_of(self, sequence: Sequence) -> tuple[int, int, int]:
        size = self.pool.block_size
        waste = sum(
            min(size, max(0, sequence.num_computed - index * size))
            for index, block in enumerate(sequence.blocks)
            if self.pool.ref_count(block) == 1
        )
        return -sequence.request.priority, waste, -sequence.arrival

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        self._running.remove(sequence)
        self._coming.take(sequence.hashes, sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.queued_tokens = self._tokens_to_compute(sequence)
        self._waiting.push(sequence)
        step.preempted.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_published = 0
        sequence.forget()

    def _came_back(self, sequence: Sequence) -> bool:
        """Counts one of its chunks. Whether the sequence ended meanwhile; its blocks are free with
        the last of them."""
        self._in_flight -= 1
        sequence.in_flight -= 1
        if sequence.status is not Status.FINISHED:
            return False
        if not sequence.in_flight:
            self._leaving.remove(sequence)
            self._release(sequence)
        return True

    def _all_can_grow(self) -> bool:
        """Whether there is a block for every token that the next step may compute."""
        growing = sum(
            max(0, sequence.blocks_needed - len(sequence.blocks))
            for sequence in self._running
            if sequence.num_remaining
        )
        return growing <= self.pool.num_free

    def _publish(self, sequence: Sequence) -> None:
        """Makes the sequence's newly completed blocks findable."""
        complete = sequence.num_computed // self.pool.block_size
        if not self.prefix_caching or complete == sequence.num_published:
            return
        hashes = sequence.hash_blocks(complete)
        for index in range(sequence.num_published, complete):
            self.pool.publish(sequence.blocks[index], hashes[index])
        self._coming.take(hashes[sequence.num_published :], sequence)
        sequence.num_published = complete
