"""A runner without a model: its cache remembers which tokens each slot was computed for."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kernels.sampling import Top
from services.worker.engine import ModelInfo
from services.worker.engine.plan import Collected, StepPlan

EOS = 0
VOCAB = 12
WRONG = 11
"""Sampled by whoever reads a slot that does not hold his own tokens."""

Content = tuple[int, ...]
"""Of a slot: all tokens up to the one that it is of. What attention over a sequence sums up."""


def next_token(tokens: Content) -> int:
    """A "model": depends on all tokens; ends a sequence now and then. Never WRONG."""
    return hash(tokens) % 9


def answer(prompt: list[int], max_tokens: int, context: int) -> list[int]:
    """What a request is answered, whatever else runs."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tuple(tokens)))
        made = len(tokens) - len(prompt)
        if tokens[-1] == EOS or made == max_tokens or len(tokens) == context:
            return tokens[-made:]


def state(tokens: Content) -> tuple[int, int]:
    """What is pooled of its last token."""
    return 1 + next_token(tokens), -5 if WRONG in tokens else len(tokens)


def numbers(prompt: list[int], kind: str) -> list[float]:
    """What a request for numbers gets, whatever else runs."""
    first = len(prompt) if kind == "last" else 1
    states = [state(tuple(prompt[:end])) for end in range(first, len(prompt) + 1)]
    found = np.sum(states, axis=0)
    return (found / np.linalg.norm(found)).tolist()


@dataclass(eq=False)
class Launched:
    plan: StepPlan
    before: "Launched | None"
    sampled: list[int] | None = None
    """Once it has run."""
    contents: list[Content] = field(default_factory=list)
    """Of each of the step's tokens, then."""
    error: Exception | None = None


@dataclass
class MemoryRunner:
    """Steps run in the order of launches, each at its launch or as late as when it is collected."""

    info: ModelInfo
    late: Callable[[], bool]
    """Whether the step launched now runs late."""
    trouble: Callable[[StepPlan, list[Content]], bool]
    """Whether a step fails, by its plan and what its sequences' tokens are."""
    more: Callable[[], int] = lambda: 0
    """How many tokens a row samples beside its first."""
    slots: dict[int, Content] = field(default_factory=dict)
    queue: list[Launched] = field(default_factory=list)
    """Launched and not collected."""
    last: Launched | None = None

    @property
    def cache(self) -> "MemoryRunner":
        return self

    def launch(self, plan: StepPlan) -> Launched:
        launched = Launched(plan, self.last)
        self.last = launched
        self.queue.append(launched)
        if not self.late():
            self._run(launched)
        return launched

    def adapt(self, place: int, adapter: object) -> None:
        raise AssertionError("it has no adapters")

    def collect(self, ticket: Launched) -> Collected:
        assert ticket is self.queue[0], "steps are collected in their order"
        self._run(ticket)
        del self.queue[0]
        ticket.before = None
        if ticket.error:
            raise ticket.error
        assert ticket.sampled is not None
        plan = ticket.plan
        starts = pairwise(plan.pool_starts.tolist())
        sums = [
            np.sum([state(ticket.contents[row]) for row in plan.pooled_rows[a:b]], axis=0)
            for a, b in starts
        ]
        pooled = np.array(sums, np.float32).reshape(len(plan.pooled), 2)
        results = plan.results(ticket.sampled, Top.of(plan.samplings), pooled)
        for row in ticket.plan.sampled.tolist():
            tokens = results[row].tokens
            for _ in range(0 if tokens == [WRONG] else self.more()):
                content = ticket.contents[int(ticket.plan.starts[row + 1]) - 1]
                tokens.append(next_token((*content, *tokens)))
        return Collected(results, 1e-3)

    def used(self) -> set[int]:
        """Blocks that steps which run read or write."""
        size = self.info.block_size
        return {
            int(block)
            for launched in self.queue
            for group, tables in zip(self.info.kv_groups, launched.plan.block_tables, strict=True)
            for row, (table, length) in enumerate(zip(tables, launched.plan.lengths, strict=True))
            for block in table[
                group.first_seen(int(launched.plan.positions[launched.plan.starts[row]]), size) : -(
                    -length // size
                )
            ]
        }

    def _run(self, launched: Launched) -> None:
        if launched.sampled is not None:
            return
        for earlier in self.queue[: self.queue.index(launched)]:
            self._run(earlier)
        plan, before = launched.plan, launched.before
        ids = plan.token_ids.tolist()
        for place, row in zip(plan.awaited[::2], plan.awaited[1::2], strict=True):
            assert before
            assert before.sampled is not None
            ids[place] = before.sampled[row]
        launched.contents = contents = [
            content
            for row in range(len(plan.lengths))
            for content in self._compute(
                ids, plan, row, int(plan.starts[row]), int(plan.starts[row + 1])
            )
        ]
        launched.sampled = [
            WRONG if WRONG in contents[token] else next_token(contents[token])
            for token in plan.rows
        ]
        if self.trouble(plan, contents):
            launched.sampled = [WRONG] * len(plan.sampled)
            launched.error = RuntimeError("device trouble")
            for row in range(len(plan.lengths)):
                for place in range(int(plan.starts[row]), int(plan.starts[row + 1])):
                    position = int(plan.positions[place])
                    for table in plan.block_tables[:, row]:
                        self.slots[self._slot(table, position)] = (WRONG,) * (position + 1)

    def _compute(
        self, ids: list[int], plan: StepPlan, row: int, start: int, end: int
    ) -> list[Content]:
        """Writes the slots of a sequence's tokens; gives their contents."""
        tables = plan.block_tables[:, row]
        contents: list[Content] = []
        for place in range(start, end):
            position = int(plan.positions[place])
            seen = {
                self._held(table, position, group.window)
                for table, group in zip(tables, self.info.kv_groups, strict=True)
            }
            before = seen.pop() if len(seen) == 1 else (WRONG,) * position
            contents.append((*before, ids[place]))
            for table in tables:
                self.slots[self._slot(table, position)] = contents[-1]
        return contents

    def _held(self, table: "object", length: int, window: int) -> Content:
        """The first `length` tokens, as all slots agree that the one behind them looks at; else
        (WRONG,) * length."""
        first = max(0, length + 1 - window) if window else 0
        held = [self.slots.get(self._slot(table, place), ()) for place in range(first, length)]
        whole = held[-1] if held else ()
        fits = all(whole[: place + 1] == one for place, one in enumerate(held, first))
        if fits and len(whole) == length:
            return whole
        return (WRONG,) * length

    def _slot(self, table: "object", position: int) -> int:
        size = self.info.block_size
        return int(table[position // size]) * size + position % size  # type: ignore[index]

    # The cache: a block's bytes are numbers of its slots' contents.

    def __post_init__(self) -> None:
        self._contents: list[Content] = [()]

    def read(self, blocks: list[int]) -> memoryview:
        size = self.info.block_size
        held = [self.slots.get(block * size + i, ()) for block in blocks for i in range(size)]
        return memoryview(b"".join(self.encode(content) for content in held))

    def write(self, blocks: list[int], data: bytes | bytearray | memoryview) -> None:
        size = self.info.block_size
        assert not self.used() & set(blocks), "a step that runs uses what is written"
        numbers = struct.unpack(f"{len(blocks) * size}q", data)
        for place, number in enumerate(numbers):
            self.slots[blocks[place // size] * size + place % size] = self._contents[number]

    def encode(self, content: Content) -> bytes:
        self._contents.append(content)
        return struct.pack("q", len(self._contents) - 1)

    def decode(self, data: object) -> list[Content]:
        view = memoryview(data)  # type: ignore[arg-type]
        return [self._contents[number] for (number,) in struct.iter_unpack("q", view)]
