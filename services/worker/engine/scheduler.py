"""Decides what the next step computes. Pure Python; touches no tensor.

Order of a step, under a budget of `max_batched_tokens`:

1. Decodes: for each running sequence whose prompt is computed the token that it sampled last, and
   guesses behind it, where they pay (speculation.py). A prompt's last token is no decode.
2. Prompts, begun or new, in chunks; new ones while there are places (`max_running`) and blocks.

A step with decodes in it also has a budget of time, so that they do not wait for long: it aims at
`target_itl_s`, or else at twice what it would take if all who compute here now were decoding, each
with as much behind it as those who do. Prompts get what the cost model says is left of that, and
always a fifth of the step, and a token. Without decodes only tokens count. Where the cost model
does not know any more what decodes take alone, a step is without prompts, but no two in a row.

Prompts go by (priority, due, arrival). A prompt is due when, since it came, an equal share of what
was computed here would have been twice as many tokens as it has itself to compute; a share of a
place, where there are more prompts than places. So it goes before the rest of a longer one that is
being computed, and before many that came at once, and yet none waits for ever: who comes when it is
due, is due later. (Prompts one after the other, in the order in which equal shares would end them,
end no later than by equal shares: E. Friedman, S. Henderson, "Fairness and efficiency in web server
protocols", 2003.)
A step with such a prompt of somebody who waits is without those that nobody waits for, from
priority `PATIENT` on: neither their decodes nor their prompts make it longer. They stand aside for
`_MOST_ASIDE` steps in a row at most.
In the queue nobody overtakes whoever is first by that order; preempted sequences keep their place
in it.

Admission takes the blocks of the whole prompt at once, less what the prefix cache holds, and leaves
one free block for every sequence that holds a place, so that admitting does not at once force a
preemption. At least one token of a sequence is always computed, for its logits. A sequence whose
next block is being computed by a running one waits for it: what many have in common is computed
once.

Preemption. A decode that needs a block when none is free takes those of a victim among the running
sequences, itself included (preemption.py). Sequences that wait for the other side of a split are
never victims: what they hold was computed elsewhere, or has not been handed over yet. Guesses never
preempt: they get blocks that are free when all others have theirs, and give back those that they
did not fill when their step has run.

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
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

from services.worker.engine.block_pool import BlockPool
from services.worker.engine.chunks import Chunk, Step, shape_of
from services.worker.engine.config import SCORED_ROWS
from services.worker.engine.cost_model import CostModel, StepShape
from services.worker.engine.outputs import FinishReason
from services.worker.engine.preemption import choose_victim
from services.worker.engine.prompt_room import PromptRoom, is_worth_a_look, time_for_prompts
from services.worker.engine.sequence import Sequence, Status
from services.worker.engine.speculation import Speculation
from services.worker.engine.tables import Tables
from services.worker.engine.waiting import Waiting

_DUE_AFTER = 2
"""Tokens of an equal share since a prompt came, for each that it has to compute: then it is due.
Two, since about half of a step's work may be decodes."""
_ORDER = attrgetter("order")
PATIENT = 3
"""The low lane: nobody waits for what has this priority, or a larger one."""
_MOST_ASIDE = 16


class Scheduler:
    """Owns all unfinished sequences and, through their tables, all blocks."""

    def __init__(
        self,
        pool: BlockPool,
        cost: CostModel,
        max_batched_tokens: int,
        max_running: int,
        prefix_caching: bool = True,
        target_itl_s: float | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.pool = pool
        self.cost = cost
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.target_itl_s = target_itl_s
        self.speculation = speculation
        self.tables = Tables(pool, prefix_caching)
        self.sequences: dict[str, Sequence] = {}
        """All unfinished ones, by id."""
        self._waiting = Waiting()
        self._running: list[Sequence] = []
        """In order."""
        self._num_reserved = 0
        self._in_flight = 0
        """Chunks that have not come back."""
        self._leaving: list[Sequence] = []
        """Finished, with chunks that have not come back: they still hold their blocks."""
        self._share = 0.0
        """Tokens that a prompt would have got so far, had all that were there got the same."""
        self._prompt_share = 1.0
        """As of the last step."""
        self._aside = 0
        """Steps in a row that were without what nobody waits for."""
        self._looks = False
        """The last step is to show what decodes take alone."""

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
        begun = (one.length - one.num_launched for one in self._running if not one.is_decoding)
        return self._waiting.num_tokens + sum(begun)

    @property
    def prompt_share(self) -> float:
        """Of the time, what prompts get beside those that decode."""
        return self._prompt_share if self._running else 1.0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, and settles its place in the order."""
        sequence.queued_tokens = self.tables.to_compute(sequence)
        due = self._share + _DUE_AFTER * sequence.queued_tokens
        sequence.order = (sequence.request.priority, due, sequence.arrival)
        self.sequences[sequence.id] = sequence
        self._waiting.push(sequence)

    def schedule(self) -> Step:
        """The next step, to be launched at once. While another runs there may be none, although
        there will be one when that has been collected."""
        step = Step()
        if self._in_flight and not self._all_can_grow():
            return step
        decodes, begun = self._stand_aside(*self._go_on(step), step)
        context = sum(sequence.length for sequence in decodes)
        decoding = StepShape(decodes=len(decodes), decode_context=context)
        wanted = self._wanted(decodes, decoding, bool(begun or self._waiting.head))
        decoding = replace(decoding, drafts=sum(wanted.values()))
        room = self._room(decoding)
        prompts = list(self._chunks(self._prompts(begun, step, room), room))
        ahead = self._guess(decodes, wanted, room.seconds)
        step.chunks = sorted(ahead + prompts, key=lambda chunk: chunk.count > 1)
        step.shape = shape_of(step.chunks)
        for chunk in step.chunks:
            chunk.sequence.launch(chunk.known, chunk.samples)
        self._in_flight += len(step.chunks)
        sharing = max(1, min(self.num_pending - step.shape.decodes, self.max_running))
        self._share += (step.shape.prompt_tokens + step.shape.decodes) / sharing
        return step

    def complete(self, chunk: Chunk, tokens: list[int]) -> FinishReason | None:
        """Records that `chunk` ran, and what it sampled: tokens after the chunk's last one. Those
        beyond the sequence's end are taken off the list, and all of them if the sequence has ended
        or gone on meanwhile, or if the chunk was launched behind a token that did not come.

        Returns why the sequence is at its end, if it is; the caller then reads what it needs and
        calls `finish`.
        """
        sequence = chunk.sequence
        behind_what_did_not_come = chunk.known > len(sequence.tokens)
        if self._came_back(sequence) or behind_what_did_not_come:
            tokens.clear()
            return None
        if chunk.known != len(sequence.tokens):
            tokens.clear()
        right = max(0, len(tokens) - 1) if chunk.drafts else 0
        if chunk.drafts and self.speculation:
            self.speculation.learn(sequence, len(chunk.drafts), right)
        reason = sequence.extend(tokens)
        sequence.num_computed = min(chunk.known + right, len(sequence.tokens))
        sequence.num_launched = max(sequence.num_launched, sequence.num_computed)
        self.tables.publish(sequence)
        if chunk.drafts:
            self.tables.trim(sequence)
        if sequence.pool is not None and chunk.end == sequence.length:
            return FinishReason.STOP
        return reason

    def drop(self, chunk: Chunk) -> None:
        """Takes back a chunk that did not run, or that ran after one that did not."""
        if not self._came_back(chunk.sequence):
            chunk.sequence.forget()
            if chunk.drafts:
                self.tables.trim(chunk.sequence)

    def start_decode(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Makes a reserved sequence, whose prompt has arrived, a running one; `token` is its first.
        Returns as `complete` does."""
        sequence.remote = False
        sequence.num_computed = sequence.num_launched = sequence.num_prompt
        self.tables.publish(sequence)
        self._num_reserved -= 1
        self._run(sequence)
        if sequence.matcher:
            sequence.matcher.give([token])
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
        self.tables.leave(sequence)
        if sequence.in_flight:
            self._leaving.append(sequence)
        else:
            self.tables.release(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Like `finish`, for a sequence whose KV may be bad: nobody shall find it."""
        self.pool.withdraw(sequence.blocks)
        self.finish(sequence)

    def check(self) -> None:
        """Raises IntegrityError if a block is lost or held twice."""
        self.tables.check([*self.sequences.values(), *self._leaving])

    def _go_on(self, step: Step) -> tuple[list[Sequence], deque[Sequence]]:
        """Of those that run: who decodes a token in this step, and whose prompt goes on. Each gets
        the blocks for it."""
        decodes: list[Sequence] = []
        begun: deque[Sequence] = deque()
        for sequence in tuple(self._running):
            if sequence.num_remaining and self._grow(sequence, step):
                (decodes if sequence.is_decoding else begun).append(sequence)
        if step.preempted:  # by one that came later in the list
            decodes = [one for one in decodes if one.status is Status.RUNNING]
            begun = deque(one for one in begun if one.status is Status.RUNNING)
        return decodes, begun

    def _stand_aside(
        self, decodes: list[Sequence], begun: deque[Sequence], step: Step
    ) -> tuple[list[Sequence], deque[Sequence]]:
        """The same without what nobody waits for, if a prompt of somebody who does is there."""
        if not any(map(_is_patient, (*decodes, *begun))):
            self._aside = 0
            return decodes, begun
        head = self._waiting.head
        if head and not (step.preempted or head.remote or _is_patient(head)):  # noqa: SIM102
            if self._admit(head, step):
                begun = deque(sorted((*begun, head), key=_ORDER))
        if self._aside == _MOST_ASIDE or all(map(_is_patient, begun)):
            self._aside = 0
            return decodes, begun
        self._aside += 1
        urgent = deque(one for one in begun if not _is_patient(one))
        return [one for one in decodes if not _is_patient(one)], urgent

    def _grow(self, sequence: Sequence, step: Step) -> bool:
        """Makes room for the sequence's last tokens. False: it was preempted."""
        while sequence.length > sequence.room and sequence.status is Status.RUNNING:
            if self.pool.num_free:
                sequence.hold(self.pool.allocate(1))
            else:
                self._preempt(choose_victim(self._running, sequence, self.pool), step)
        return sequence.status is Status.RUNNING

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        self._running.remove(sequence)
        self.tables.leave(sequence)
        self.tables.release(sequence)
        sequence.status = Status.WAITING
        sequence.queued_tokens = self.tables.to_compute(sequence)
        self._waiting.push(sequence)
        step.preempted.append(sequence)

    def _wanted(
        self, decodes: list[Sequence], decoding: StepShape, prompts: bool
    ) -> dict[str, int]:
        """How many guesses each of them should have, by its id. They leave half of the tokens to
        prompts."""
        if self.speculation is None or not decodes:
            return {}
        room = (self.max_batched_tokens - len(decodes)) // 2
        return self.speculation.wanted(decodes, decoding, room, prompts)

    def _guess(
        self, decodes: list[Sequence], wanted: dict[str, int], seconds: float
    ) -> list[Chunk]:
        """Their next tokens, with guesses behind, in blocks that nobody else has taken. `seconds`:
        that prompts have left of the step, in which a draft model may catch up with some."""
        guesses: dict[str, tuple[int, ...]] = {}
        if self.speculation and wanted:
            asked = [one for one in decodes if one.id in wanted]
            counts = [self.tables.stretch(one, wanted[one.id]) for one in asked]
            guesses = self.speculation.propose(list(zip(asked, counts, strict=True)), seconds)
            for sequence in asked:
                if not guesses[sequence.id]:
                    self.tables.trim(sequence)
        return [Chunk.of(one, 1, guesses.get(one.id, ())) for one in decodes]

    def _room(self, decoding: StepShape) -> PromptRoom:
        """What is left for prompts beside these decodes."""
        tokens = self.max_batched_tokens - decoding.decodes - decoding.drafts
        present = min(self.num_pending, self.max_running)
        seconds, self._prompt_share = time_for_prompts(
            self.cost, decoding, present, tokens, self.target_itl_s
        )
        self._looks = not self._looks and is_worth_a_look(self.cost, decoding)
        return PromptRoom(self.cost, tokens, 0.0 if self._looks else seconds)

    def _chunks(self, prompts: Iterable[Sequence], room: PromptRoom) -> Iterator[Chunk]:
        """Their next ones. Of those whose logprobs are wanted only as much as there are rows of
        logits for, besides one for each sequence."""
        rows = SCORED_ROWS
        for sequence in prompts:
            most = sequence.num_remaining
            if sequence.scores is not None:
                most = min(most, rows + 1)
            chunk = Chunk.of(sequence, room.take(sequence.num_launched, most))
            if chunk.scores:
                rows -= chunk.count - 1
            yield chunk

    def _prompts(self, begun: deque[Sequence], step: Step, room: PromptRoom) -> Iterator[Sequence]:
        """Sequences with a prompt to compute, in order, while there is room; new ones are admitted
        as they come up. Whose prompt another engine computes needs no room in this step."""
        # Blocks that a preemption just freed are for those that go on running.
        admits = not step.preempted
        while True:
            head = self._waiting.head if admits else None
            if head and self._aside and _is_patient(head):
                head = None
            first = head and not (begun and begun[0].order < head.order)
            if head and (head.remote or (first and room.left)):
                admits = self._admit(head, step)
                if admits and not head.remote:
                    yield head
            elif begun and room.left:
                yield begun.popleft()
            else:
                return

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        """Gives the first of the waiting a place and blocks for all its tokens, if there are
        enough."""
        if self.num_running >= self.max_running:
            return False
        if not self.tables.fill(sequence, headroom=self.num_running):
            return False
        self._waiting.pop()
        num_cached = sequence.num_published * self.pool.block_size
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached = num_cached
        step.admitted.append(sequence)
        if sequence.remote:
            sequence.status = Status.RESERVED
            self._num_reserved += 1
            step.reserved.append(sequence)
        else:
            sequence.num_computed = sequence.num_launched = num_cached
            self._run(sequence)
        return True

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=_ORDER)

    def _all_can_grow(self) -> bool:
        """Whether there is a block for every token that the next step may compute."""
        growing = sum(
            sequence.blocks_needed - len(sequence.blocks)
            for sequence in self._running
            if sequence.length > sequence.room and sequence.num_remaining
        )
        return growing <= self.pool.num_free

    def _came_back(self, sequence: Sequence) -> bool:
        """Counts one of its chunks. Whether the sequence ended meanwhile; its blocks are free with
        the last of them."""
        self._in_flight -= 1
        sequence.in_flight -= 1
        if sequence.status is not Status.FINISHED:
            return False
        if not sequence.in_flight:
            self._leaving.remove(sequence)
            self.tables.release(sequence)
        return True


def _is_patient(sequence: Sequence) -> bool:
    return sequence.request.priority >= PATIENT
