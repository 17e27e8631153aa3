"""A step as plain arrays: what the runner computes, with nothing of the scheduler's state in it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import SAMPLING
from services.worker.engine.messages import RequestError
from services.worker.engine.scheduler import Chunk

Ints = NDArray[np.int32]
Outcome = list[int] | RequestError
"""Of a sequence in a step: the tokens that it sampled, none if its prompt goes on; or why it could
not go on."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """T tokens of S sequences, laid one sequence after the other; those of one token come first."""

    token_ids: Ints
    """[T]"""
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

    def outcomes(self, sampled_ids: Seq[int]) -> list[Outcome]:
        """Of all sequences, from what the R rows sampled; -1: the row's logits are not finite."""
        outcomes: list[Outcome] = [[] for _ in self.lengths]
        for sequence, token in zip(self.sampled.tolist(), sampled_ids, strict=True):
            outcomes[sequence] = [token] if token >= 0 else NOT_FINITE
        return outcomes


NOT_FINITE = RequestError("internal", "The model's logits are not finite")


def plan_step(chunks: Seq[Chunk], block_size: int) -> StepPlan:
    """Lays out what was scheduled. `chunks`: not empty, those of one token first."""
    counts = [chunk.count for chunk in chunks]
    lengths = np.array([chunk.start + chunk.count for chunk in chunks], np.int32)
    width = -(-int(lengths.max()) // block_size)
    tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        blocks = chunk.sequence.blocks[:width]
        tables[row, : len(blocks)] = blocks
        tables[row, len(blocks) :] = blocks[-1]
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
    sampled = [row for row, chunk in enumerate(chunks) if chunk.samples]
    samplings = np.array(
        [
            (s.temperature, s.top_k, s.top_p, s.seed, len(chunks[row].sequence.tokens))
            for row in sampled
            for s in (chunks[row].sequence.request.sampling,)
        ],
        SAMPLING,
    )
    return StepPlan(
        token_ids=np.array(token_ids, np.int32),
        positions=np.concatenate(
            [np.arange(c.start, c.start + c.count, dtype=np.int32) for c in chunks]
        ),
        starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        lengths=lengths,
        block_tables=tables,
        num_decodes=counts.count(1),
        sampled=np.array(sampled, np.int32),
        samplings=samplings,
    )
