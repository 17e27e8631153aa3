"""A step as plain arrays: what the runner computes, with nothing of the scheduler's state in it."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import SAMPLING
from services.worker.engine.messages import RequestError
from services.worker.engine.scheduler import Chunk

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
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
        results = [Result([]) for _ in self.lengths]
        for sequence, token in zip(self.sampled.tolist(), sampled_ids, strict=True):
            results[sequence] = Result([token]) if token >= 0 else NOT_FINITE
        return results


NOT_FINITE = Result([], RequestError("internal", "The model's logits are not finite"))


def sampling_rows(chunks: Seq[Chunk]) -> dict[str, int]:
    """Which of the R rows of their step is whose, by the sequence's id."""
    sampling = (chunk.sequence.id for chunk in chunks if chunk.samples)
    return {name: row for row, name in enumerate(sampling)}


def plan_step(chunks: Seq[Chunk], block_size: int, before: Mapping[str, int]) -> StepPlan:
    """Lays out what was scheduled. `chunks`: not empty, those of one token first; `before`: the
    `sampling_rows` of the step that runs, where one does."""
    counts = np.array([chunk.count for chunk in chunks], np.int32)
    lengths = np.array([chunk.end for chunk in chunks], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    tables = np.zeros((len(chunks), -(-int(lengths.max()) // block_size)), np.int32)
    token_ids: list[int] = []
    awaited: list[tuple[int, int]] = []
    for row, chunk in enumerate(chunks):
        sequence = chunk.sequence
        blocks = sequence.table[: tables.shape[1]]
        tables[row, : len(blocks)] = blocks
        token_ids += sequence.tokens[chunk.start : chunk.end]
        if chunk.end > len(sequence.tokens):
            awaited.append((len(token_ids), before[sequence.id]))
            token_ids.append(0)
    sampled = [row for row, chunk in enumerate(chunks) if chunk.samples]
    samplings = np.array(
        [
            (s.temperature, s.top_k, s.top_p, s.seed, chunks[row].end)
            for row in sampled
            for s in (chunks[row].sequence.request.sampling,)
        ],
        SAMPLING,
    )
    return StepPlan(
        token_ids=np.array(token_ids, np.int32),
        awaited=np.array(awaited, np.int32).reshape(-1, 2),
        positions=np.arange(len(token_ids), dtype=np.int32) + np.repeat(lengths - ends, counts),
        starts=np.concatenate((ends[:1] * 0, ends)),
        lengths=lengths,
        block_tables=tables,
        num_decodes=int((counts == 1).sum()),
        sampled=np.array(sampled, np.int32),
        samplings=samplings,
    )
