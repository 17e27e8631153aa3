"""A step as plain arrays: what the runner computes, with nothing of the scheduler's state in it."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import SAMPLING
from services.worker.engine.chunks import Chunk
from services.worker.engine.messages import RequestError

Ints = NDArray[np.int32]


@dataclass(slots=True)
class Result:
    """What a step gave for one sequence."""

    tokens: list[int]
    """That it sampled, in order; none if its prompt goes on."""
    error: RequestError | None = None
    """Why it cannot go on."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What came of a step."""

    results: list[Result]
    """One for each sequence."""
    seconds: float
    """That its device took, from where the step before had ended, if it lay behind one."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """T tokens of S sequences, laid one sequence after the other; those of one token come first."""

    token_ids: Ints
    """[T]"""
    awaited: Ints
    """[A, 2]: places in `token_ids` that are not known yet, each with the row, of the R of the step
    launched before, that samples it. The runner fills them in."""
    positions: Ints
    """[T]: of the tokens in their sequences"""
    starts: Ints
    """[S + 1]: where each sequence's tokens begin, and the end"""
    lengths: Ints
    """[S]: tokens in the cache, these included"""
    block_tables: Ints
    """[S, longest]; padded with blocks that exist"""
    num_decodes: int
    """Leading sequences with exactly one token"""
    sampled: Ints
    """[R]: sequences that sample; after their last token here"""
    samplings: NDArray[np.void]
    """[R] of SAMPLING"""
    constrained: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """[M]: of the R rows those of which a grammar says what they may sample. Where there are any,
    the step waits for that before it samples (`Runner.sample`)."""

    @property
    def rows(self) -> Ints:
        """[R]: tokens of the step after which one is sampled."""
        found: Ints = self.starts[1:][self.sampled] - 1
        return found

    def slots(self, block_size: int) -> Ints:
        """[T]: block * block_size + offset, where the tokens' keys and values go."""
        sequences = np.repeat(np.arange(len(self.lengths)), np.diff(self.starts))
        blocks = self.block_tables[sequences, self.positions // block_size]
        found: Ints = blocks * block_size + self.positions % block_size
        return found

    def results(self, sampled_ids: Seq[int]) -> list[Result]:
        """Of all sequences, from what the R rows sampled; -1: the row's logits are not finite."""
        made = [Result([token]) if token >= 0 else NOT_FINITE for token in sampled_ids]
        if len(made) == len(self.lengths):
            return made
        results = [Result([])] * len(self.lengths)
        for sequence, result in zip(self.sampled.tolist(), made, strict=True):
            results[sequence] = result
        return results


NOT_FINITE = Result([], RequestError("internal", "The model's logits are not finite"))


def sampling_rows(chunks: Seq[Chunk]) -> dict[str, int]:
    """Which of the R rows of their step is whose, by the sequence's id."""
    sampling = (chunk.sequence.id for chunk in chunks if chunk.samples)
    return {name: row for row, name in enumerate(sampling)}


def constrained(chunks: Seq[Chunk]) -> list[tuple[int, Chunk]]:
    """Those of a step's R rows that a grammar constrains, with their numbers."""
    sampling = (chunk for chunk in chunks if chunk.samples)
    return [(row, chunk) for row, chunk in enumerate(sampling) if chunk.sequence.matcher]


def plan_step(chunks: Seq[Chunk], block_size: int, before: Mapping[str, int]) -> StepPlan:
    """Lays out what was scheduled. `chunks`: not empty, those of one token first; `before`: the
    `sampling_rows` of the step that runs, where one does."""
    token_ids: list[int] = []
    positions: list[int] = []
    awaited: list[tuple[int, int]] = []
    starts = [0]
    lengths: list[int] = []
    sampled: list[int] = []
    for row, chunk in enumerate(chunks):
        sequence, start, end = chunk.sequence, chunk.start, chunk.end
        token_ids += sequence.tokens[start:end]
        if end > len(sequence.tokens):
            awaited.append((len(token_ids), before[sequence.id]))
            token_ids.append(0)
        positions += range(start, end)
        starts.append(len(positions))
        lengths.append(end)
        if chunk.samples:
            sampled.append(row)
    return StepPlan(
        token_ids=np.array(token_ids, np.int32),
        awaited=np.array(awaited, np.int32).reshape(-1, 2),
        positions=np.array(positions, np.int32),
        starts=np.array(starts, np.int32),
        lengths=np.array(lengths, np.int32),
        block_tables=_tables(chunks),
        num_decodes=sum(chunk.count == 1 for chunk in chunks),
        sampled=np.array(sampled, np.int32),
        samplings=_samplings([chunks[row] for row in sampled]),
        constrained=np.array([row for row, _ in constrained(chunks)], np.int32),
    )


def _tables(chunks: Seq[Chunk]) -> Ints:
    """All their tables, padded with block 0."""
    tables = [chunk.sequence.blocks for chunk in chunks]
    size = max(map(len, tables)) * tables[0].itemsize
    rows = bytearray().join([bytes(table).ljust(size, b"\0") for table in tables])
    return np.frombuffer(rows, np.int32).reshape(len(tables), -1)


def _samplings(chunks: Seq[Chunk]) -> NDArray[np.void]:
    rows = bytearray().join([chunk.sequence.sampling_row for chunk in chunks])
    samplings = np.frombuffer(rows, SAMPLING)
    samplings["position"] = [chunk.end for chunk in chunks]
    return samplings
