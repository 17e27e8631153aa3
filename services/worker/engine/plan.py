"""A step as plain arrays: what the runner computes, with nothing of the scheduler's state in it.

They are the standard library's. The kernels leave the planning thread nothing in the caches, so
that what planning costs is which code and objects it touches, more than how often: and the first
step into each part of numpy costs as much as dozens of steps in Python. Who computes with a plan's
arrays makes them numpy's, which shares their memory (`np.asarray`, `block_tables`, `samplings`).
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import NO_EDITS, NONE_LEFT, Top, rows_of
from kernels.sampling import NOT_FINITE as UNSOUND
from services.worker.engine.outputs import LEAST_LOGPROB, Logprobs, RequestError

Ints: TypeAlias = "array[int]"
"""int32: of type "i"."""
Floats = NDArray[np.float32]
_COUNT = array("i", range(2**12))


def _none() -> Ints:
    return array("i")


@dataclass(slots=True)
class Result:
    """What a step gave for one sequence."""

    tokens: list[int]
    """That it sampled, in order; none if its prompt goes on."""
    error: RequestError | None = None
    """Why it cannot go on."""
    logprobs: Seq[Logprobs] = ()
    """Of those tokens, if asked for."""
    scores: Seq[Logprobs] = ()
    """Of prompt tokens, in order, from that behind the chunk's first on, if asked for."""
    states: Floats | None = None
    """[hidden]: the sum of its chunk's pooled tokens' states, if any is."""


@dataclass(slots=True)
class Collected:
    """What came of a step."""

    results: list[Result]
    """One for each sequence."""
    seconds: float
    """That its device took, from where the step before had ended, if it lay behind one."""


@dataclass(slots=True, eq=False)
class StepPlan:
    """T tokens of S sequences, laid one sequence after the other; those of one token come first.
    Nobody changes it."""

    token_ids: Ints
    """[T]"""
    positions: Ints
    """[T]: of the tokens in their sequences"""
    starts: Ints
    """[S + 1]: where each sequence's tokens begin, and the end"""
    lengths: Ints
    """[S]: tokens in the cache, these included"""
    tables: Ints
    """[groups, S, longest]: KV blocks, row by row; padded with blocks that exist, as are places of
    blocks that a window has passed"""
    num_decodes: int
    """Leading sequences with exactly one token"""
    sampled: Ints
    """[R]: sequences that sample, or score a token of their prompt. Of one with guesses there is a
    row after its last token that is known, and one after each guess."""
    rows: Ints
    """[R]: the tokens of the step after which they do"""
    sampling_words: Ints
    """[R] of SAMPLING (`samplings`)"""
    awaited: Ints = field(default_factory=_none)
    """[A, 2]: places in `token_ids` that are not known yet, each with the row, of the R of the step
    launched before, that samples it. The runner fills them in."""
    edits: NDArray[np.void] = field(default_factory=lambda: NO_EDITS)
    """[E] of EDIT: those of all rows"""
    constrained: Ints = field(default_factory=_none)
    """[M]: of the R rows those of which a grammar says what they may sample. Where there are any,
    the step waits for that before it samples (`Runner.sample`)."""
    pooled: Ints = field(default_factory=_none)
    """[P]: sequences of which states are pooled"""
    pooled_rows: Ints = field(default_factory=_none)
    """[N]: of which tokens, one sequence's after the other's; none of them is in `rows`"""
    pool_starts: Ints = field(default_factory=lambda: array("i", (0,)))
    """[P + 1]: where each sequence's begin there, and the end"""
    groups: int = 1
    """Of the model's layers, by KV block (kv/groups.py)"""

    adapters: Ints = field(default_factory=_none)
    """[T]: the place of each token's adapter, -1: none; empty where no sequence has one"""

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """[groups, S, longest]"""
        return np.asarray(self.tables).reshape(self.groups, len(self.lengths), -1)

    @property
    def samplings(self) -> NDArray[np.void]:
        """[R] of SAMPLING"""
        return rows_of(self.sampling_words)

    def slots(self, block_size: int) -> NDArray[np.int32]:
        """[groups, T]: block * block_size + offset, where the tokens' keys and values go."""
        sequences = np.repeat(np.arange(len(self.lengths)), np.diff(self.starts))
        positions = np.asarray(self.positions)
        blocks = self.block_tables[:, sequences, positions // block_size]
        found: NDArray[np.int32] = blocks * block_size + positions % block_size
        return found

    def results(self, sampled_ids: Seq[int], top: Top, sums: Floats | None = None) -> list[Result]:
        """Of all sequences, from what the R rows sampled; below 0: why a row has no token.
        sums: [P, hidden], of pooled states."""
        results = self._of_tokens(sampled_ids, top)
        if self.pooled and sums is not None:
            for sequence, states in zip(self.pooled.tolist(), sums, strict=True):
                sound = bool(np.isfinite(states).all())
                results[sequence] = Result([], states=states) if sound else NOT_FINITE
        return results

    def _of_tokens(self, sampled_ids: Seq[int], top: Top) -> list[Result]:
        if not top.width and self.sampled == _COUNT[: len(self.lengths)]:
            return [
                Result([token]) if token >= 0 else self._failure(row, token)
                for row, token in enumerate(sampled_ids)
            ]
        results = [Result([]) for _ in self.lengths]
        sampled, samplings = self.sampled.tolist(), self.samplings
        wanted, given = samplings["logprobs"].tolist(), samplings["given"].tolist()
        # What a grammar or a ban hides may be no number, and the others are measured by it.
        unsound = np.isnan(top.logprobs[:, 0]).tolist() if top.width else []
        ends = [self.token_ids[row] for row in self.rows]
        done: set[int] = set()  # sequences that a wrong guess, or an error, has ended
        for row, (sequence, token) in enumerate(zip(sampled, sampled_ids, strict=True)):
            result = results[sequence]
            if sequence in done or (result.tokens and result.tokens[-1] != ends[row]):
                done.add(sequence)
                continue
            if token >= 0 and wanted[row] and unsound[row]:
                token = UNSOUND
            if token < 0:
                done.add(sequence)
                if not result.tokens:
                    results[sequence] = self._failure(row, token)
                continue
            told = [_logprobs(top, row, wanted[row])] if wanted[row] else []
            if given[row]:
                result.scores = [*result.scores, *told]
            else:
                result.tokens.append(token)
                result.logprobs = [*result.logprobs, *told]
        return results

    def _failure(self, row: int, why: int) -> Result:
        """Nobody but the row's own request may have left nothing of its logits."""
        if why == NONE_LEFT and row in self.constrained:
            return _NONE_ALLOWED
        if why == NONE_LEFT and self.samplings["num_edits"][row]:
            return _ALL_BANNED
        return NOT_FINITE


def _logprobs(top: Top, row: int, wanted: int) -> Logprobs:
    ids = [id for id in top.ids[row, 1:wanted].tolist() if id >= 0]
    values = np.maximum(top.logprobs[row, : len(ids) + 1], LEAST_LOGPROB)
    logprob, *best = values.tolist()
    return Logprobs(logprob, tuple(ids), tuple(best))


NOT_FINITE = Result([], RequestError("internal", "The model's numbers are not finite"))


def _refused(param: str, words: str) -> Result:
    return Result([], RequestError("invalid_request", words, param))


_ALL_BANNED = _refused("bad_words", "bad_words and min_tokens leave no token that may be sampled")
_NONE_ALLOWED = _refused(
    "constraint", "of the tokens that the constraint allows, bad_words and min_tokens leave none"
)
