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
A step with such a prompt of somebody who waits is without those that nobody waits for
(low_lane.py): neither their decodes nor their prompts make it longer.
In the queue nobody overtakes whoever is first by that order, but one who waits for what another
loads (places.py); preempted sequences keep their place in it.

Guesses never preempt (places.py says who does): they get blocks that are free when all others have
theirs, and give back those that they did not fill when their step has run.

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

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from services.worker.engine.config import SCORED_ROWS
from services.worker.engine.kv.block_pool import BlockPool
from services.worker.engine.kv.groups import WHOLE, KvGroup
from services.worker.engine.kv.tables import Tables
from services.worker.engine.kv.tiers.disk import DiskTier
from services.worker.engine.outputs import FinishReason
from services.worker.engine.scheduling.chunks import Chunk, Step, shape_of
from services.worker.engine.scheduling.cost_model import CostModel, StepShape
from services.worker.engine.scheduling.low_lane import LowLane, is_patient
from services.worker.engine.scheduling.places import ORDER, Places
from services.worker.engine.scheduling.prompt_room import (
    PromptRoom,
    is_worth_a_look,
    time_for_prompts,
)
from services.worker.engine.sequence import Sequence, Status
from services.worker.engine.speculation.speculation import Speculation

_DUE_AFTER = 2
"""Tokens of an equal share since a prompt came, for each that it has to compute: then it is due.
Two, since about half of a step's work may be decodes."""


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
        max_step_adapters: int = 1,
        groups: Seq[KvGroup] = WHOLE,
        keeps_all: bool = False,
        overlaps: bool = False,
        tier: DiskTier | None = None,
    ) -> None:
        """`keeps_all`, `tier`: see `Tables`; `overlaps`: `schedule` is called while a step runs."""
        self.pool = pool
        self.cost = cost
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.target_itl_s = target_itl_s
        self.speculation = speculation
        at_once = max_batched_tokens * (1 + overlaps)
        self.tables = Tables(pool, prefix_caching, groups, at_once, keeps_all, cost, tier)
        self.places = Places(self.tables, max_running, max_step_adapters)
        self.sequences: dict[str, Sequence] = {}
        """All unfinished ones, by id."""
        self._low = LowLane()
        self._in_flight = 0
        """Chunks that have not come back."""
        self._leaving: list[Sequence] = []
        """Finished, with chunks that have not come back: they still hold their blocks."""
        self._share = 0.0
        """Tokens that a prompt would have got so far, had all that were there got the same."""
        self._prompt_share = 1.0
        """As of the last step."""
        self._looks = False
        """The last step is to show what decodes take alone."""

    @property
    def present(self) -> list[Sequence]:
        """All that steps may still compute, or that one computes which runs."""
        return [*self.sequences.values(), *self._leaving]

    @property
    def num_running(self) -> int:
        """Sequences that hold a place."""
        return self.places.num_taken

    @property
    def num_waiting(self) -> int:
        return len(self.sequences) - self.num_running

    @property
    def num_pending(self) -> int:
        """Sequences that wait for nobody but this engine."""
        return len(self.sequences) - self.places.num_reserved

    @property
    def queued_prefill_tokens(self) -> int:
        begun = [
            one.length - one.num_launched
            for one in self.places.running
            if one.num_launched < max(one.num_prompt, one.length - 1)  # it is not decoding
        ]
        return self.places.waiting.num_tokens + sum(begun)

    @property
    def prompt_share(self) -> float:
        """Of the time, what prompts get beside those that decode."""
        return self._prompt_share if self.places.running else 1.0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, and settles its place in the order."""
        sequence.queued_tokens = self.tables.to_compute(sequence)
        due = self._share + _DUE_AFTER * sequence.queued_tokens
        sequence.order = (sequence.request.priority, due, sequence.arrival)
        self.sequences[sequence.id] = sequence
        self.places.waiting.push(sequence)

    def schedule(self) -> Step:
        """The next step, to be launched at once. While another runs there may be none, although
        there will be one when that has been collected."""
        step = Step()
        if self._in_flight and not self.places.all_can_grow:
            return step
        decodes, begun = self._stand_aside(*self._go_on(step), step)
        prompts_there = bool(begun or self.places.waiting.head)
        decoding = StepShape(0, 0, len(decodes), sum([one.length for one in decodes]))
        wanted = self._wanted(decodes, decoding, prompts_there)
        if wanted:
            decoding = decoding._replace(drafts=sum(wanted.values()))
        room = self._room(decoding, prompts_there)
        prompts = [*self._chunks(self._prompts(begun, step, room), room)] if prompts_there else []
        step.chunks = self._decodes(decodes, wanted, room.seconds) + prompts
        step.shape = decoding
        if prompts or wanted:
            step.chunks.sort(key=lambda chunk: chunk.count > 1)
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
        sequence, known = chunk.sequence, chunk.known
        before = len(sequence.tokens)
        if self._came_back(sequence) or known > before:
            tokens.clear()
            return None
        if known < before:
            tokens.clear()
        computed = known + self._right(chunk, tokens) if chunk.drafts else known
        reason = sequence.extend(tokens)
        sequence.num_computed = computed = min(computed, len(sequence.tokens))
        if computed > sequence.num_launched:
            sequence.num_launched = computed
        if chunk.count > 1 or not (chunk.is_decode and computed % self.pool.block_size):
            self.tables.publish(sequence)
            self.tables.pass_by(sequence)
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
        self.places.start(sequence)
        if sequence.matcher:
            sequence.matcher.give([token])
        return sequence.extend([token])

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in whatever state it is and frees its blocks."""
        self.places.leave(sequence)
        del self.sequences[sequence.id]
        if sequence.in_flight:
            self._leaving.append(sequence)
        else:
            self.tables.release(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Like `finish`, for a sequence whose KV may be bad: nobody shall find it."""
        self.tables.withdraw(sequence)
        self.finish(sequence)

    def check(self) -> None:
        """Raises IntegrityError if a block is lost or held twice."""
        self.tables.check(self.present)

    def _go_on(self, step: Step) -> tuple[list[Sequence], deque[Sequence]]:
        """Of those that run: who decodes a token in this step, and whose prompt goes on. Each gets
        the blocks for it."""
        decodes: list[Sequence] = []
        begun: deque[Sequence] = deque()
        for sequence in tuple(self.places.running):
            if not sequence.num_remaining:
                continue
            if sequence.length <= sequence.room or self.places.grow(sequence, step):
                (decodes if sequence.is_decoding else begun).append(sequence)
        if step.preempted:  # by one that came later in the list
            decodes = [one for one in decodes if one.status is Status.RUNNING]
            begun = deque(one for one in begun if one.status is Status.RUNNING)
        return decodes, begun

    def _stand_aside(
        self, decodes: list[Sequence], begun: deque[Sequence], step: Step
    ) -> tuple[list[Sequence], deque[Sequence]]:
        """The same without what nobody waits for, if a prompt of somebody who does is there."""
        running = self.places.running
        if not running or not is_patient(running[-1]):  # the least important comes last
            self._low.aside = 0
            return decodes, begun
        head = self.places.waiting.head
        if head and not (step.preempted or head.remote or is_patient(head)):  # noqa: SIM102
            if self.places.admit(head, step) and head.status is Status.RUNNING:
                begun = deque(sorted((*begun, head), key=ORDER))
        return self._low.part(decodes, begun)

    def _wanted(
        self, decodes: list[Sequence], decoding: StepShape, prompts: bool
    ) -> dict[str, int]:
        """How many guesses each of them should have, by its id. They leave half of the tokens to
        prompts."""
        if self.speculation is None or not decodes:
            return {}
        room = (self.max_batched_tokens - len(decodes)) // 2
        return self.speculation.wanted(decodes, decoding, room, prompts)

    def _decodes(
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
        return [Chunk.decode(one, guesses.get(one.id, ())) for one in decodes]

    def _room(self, decoding: StepShape, prompts: bool) -> PromptRoom:
        """What is left for prompts beside these decodes; `prompts`: there are some."""
        tokens = self.max_batched_tokens - decoding.decodes - decoding.drafts
        present = min(self.num_pending, self.max_running)
        seconds, self._prompt_share = time_for_prompts(
            self.cost, decoding, present, tokens, self.target_itl_s
        )
        self._looks = prompts and not self._looks and is_worth_a_look(self.cost, decoding)
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
            head = self.places.waiting.head if admits else None
            if head and self._low.aside and is_patient(head):
                head = None
            first = head and not (begun and begun[0].order < head.order)
            if head and (head.remote or (first and room.left)):
                admits = self.places.admit(head, step)
                if admits and head.status is Status.RUNNING:
                    yield head
            elif begun and room.left:
                yield begun.popleft()
            else:
                return

    def _right(self, chunk: Chunk, tokens: list[int]) -> int:
        """How many of its guesses were right, which those who guess learn."""
        right = max(0, len(tokens) - 1)
        if self.speculation:
            self.speculation.learn(chunk.sequence, len(chunk.drafts), right)
        return right

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
