"""A step as plain arrays: what the runner computes, with nothing of the scheduler's state in it."""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import NO_EDITS, NONE_LEFT, SAMPLING, Top
from kernels.sampling import NOT_FINITE as UNSOUND
from services.worker.engine.chunks import Chunk
from services.worker.engine.logits import Row, gathered
from services.worker.engine.outputs import LEAST_LOGPROB, Logprobs, RequestError

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(slots=True)
class Result:
    """What a step gave for one sequence."""

    tokens: list[int]
    """That it sampled, in order; none if its prompt goes on."""
    error: RequestError | None = None
    """Why it cannot go on."""
    logprobs: list[Logprobs] = field(default_factory=list)
    """Of those tokens, if asked for."""
    scores: list[Logprobs] = field(default_factory=list)
    """Of prompt tokens, in order, from that behind the chunk's first on, if asked for."""
    states: Floats | None = None
    """[hidden]: the sum of its chunk's pooled tokens' states, if any is."""


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
    """[R]: sequences that sample, or score a token of their prompt. Of one with guesses there is a
    row after its last token that is known, and one after each guess."""
    rows: Ints
    """[R]: the tokens of the step after which they do"""
    samplings: NDArray[np.void]
    """[R] of SAMPLING"""
    edits: NDArray[np.void] = field(default_factory=lambda: NO_EDITS)
    """[E] of EDIT: those of all rows"""
    constrained: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """[M]: of the R rows those of which a grammar says what they may sample. Where there are any,
    the step waits for that before it samples (`Runner.sample`)."""
    pooled: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """[P]: sequences of which states are pooled"""
    pooled_rows: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """[N]: of which tokens, one sequence's after the other's; none of them is in `rows`"""
    pool_starts: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """[P + 1]: where each sequence's begin there, and the end"""

    def slots(self, block_size: int) -> Ints:
        """[T]: block * block_size + offset, where the tokens' keys and values go."""
        sequences = np.repeat(np.arange(len(self.lengths)), np.diff(self.starts))
        blocks = self.block_tables[sequences, self.positions // block_size]
        found: Ints = blocks * block_size + self.positions % block_size
        return found

    def results(self, sampled_ids: Seq[int], top: Top, sums: Floats | None = None) -> list[Result]:
        """Of all sequences, from what the R rows sampled; below 0: why a row has no token.
        sums: [P, hidden], of pooled states."""
        results = self._of_tokens(sampled_ids, top)
        if sums is not None:
            for sequence, states in zip(self.pooled.tolist(), sums, strict=True):
                sound = bool(np.isfinite(states).all())
                results[sequence] = Result([], states=states) if sound else NOT_FINITE
        return results

    def _of_tokens(self, sampled_ids: Seq[int], top: Top) -> list[Result]:
        sampled = self.sampled.tolist()
        if not top.width and sampled == [*range(len(self.lengths))]:
            return [
                Result([token]) if token >= 0 else self._failure(row, token)
                for row, token in enumerate(sampled_ids)
            ]
        results = [Result([]) for _ in self.lengths]
        wanted, given = self.samplings["logprobs"].tolist(), self.samplings["given"].tolist()
        # What a grammar or a ban hides may be no number, and the others are measured by it.
        unsound = np.isnan(top.logprobs[:, 0]).tolist() if top.width else []
        ends = self.token_ids[self.rows].tolist()
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
                result.scores.extend(told)
            else:
                result.tokens.append(token)
                result.logprobs.extend(told)
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


def sampling_rows(chunks: Seq[Chunk]) -> dict[str, int]:
    """Which of the R rows of their step is whose, by the sequence's id."""
    ends = accumulate(chunk.rows for chunk in chunks)
    return {
        chunk.sequence.id: end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples
    }


def plan_step(chunks: Seq[Chunk], block_size: int, before: Mapping[str, int]) -> StepPlan:
    """Lays out what was scheduled. `chunks`: not empty, those of one token first; `before`: the
    `sampling_rows` of the step that runs, where one does."""
    token_ids: list[int] = []
    positions: list[int] = []
    awaited: list[tuple[int, int]] = []
    starts = [0]
    lengths: list[int] = []
    sampled: list[int] = []
    rows: list[int] = []
    held: list[int] = []
    pooled: list[int] = []
    pooled_rows: list[int] = []
    pool_starts = [0]
    edits: list[Row] = []
    for row, chunk in enumerate(chunks):
        sequence, known = chunk.sequence, chunk.known
        token_ids += sequence.tokens[chunk.start : known]
        if known > len(sequence.tokens):
            awaited.append((len(token_ids), before[sequence.id]))
            token_ids.append(0)
        token_ids += chunk.drafts
        positions += range(chunk.start, chunk.end)
        starts.append(len(positions))
        lengths.append(chunk.end)
        count = chunk.rows
        sampled += [row] * count
        rows += range(len(positions) - count, len(positions))
        edits += [(sequence.edits, chunk.drafts[:guessed]) for guessed in range(count)]
        if sequence.matcher and chunk.samples:
            held += range(len(rows) - 1 - len(chunk.drafts), len(rows))
        if count := chunk.pooled:
            pooled.append(row)
            pooled_rows += range(len(positions) - count, len(positions))
            pool_starts.append(len(pooled_rows))
    samplings = _samplings(chunks, sampled, [positions[token] + 1 for token in rows])
    return StepPlan(
        token_ids=np.array(token_ids, np.int32),
        awaited=np.array(awaited, np.int32).reshape(-1, 2),
        positions=np.array(positions, np.int32),
        starts=np.array(starts, np.int32),
        lengths=np.array(lengths, np.int32),
        block_tables=padded_tables([chunk.sequence.blocks for chunk in chunks]),
        num_decodes=sum(chunk.count == 1 for chunk in chunks),
        sampled=np.array(sampled, np.int32),
        rows=np.array(rows, np.int32),
        samplings=samplings,
        edits=gathered(edits, samplings),
        constrained=np.array(held, np.int32),
        pooled=np.array(pooled, np.int32),
        pooled_rows=np.array(pooled_rows, np.int32),
        pool_starts=np.array(pool_starts, np.int32),
    )


def padded_tables(tables: Seq["array[int]"]) -> Ints:
    """[tables, longest], padded with block 0."""
    size = max(map(len, tables)) * tables[0].itemsize
    rows = bytearray().join([bytes(table).ljust(size, b"\0") for table in tables])
    return np.frombuffer(rows, np.int32).reshape(len(tables), -1)


def _samplings(chunks: Seq[Chunk], sampled: Seq[int], positions: Seq[int]) -> NDArray[np.void]:
    """A row for each of `sampled`, of the token at its position."""
    rows = bytearray().join([chunks[row].sequence.sampling_row for row in sampled])
    samplings = np.frombuffer(rows, SAMPLING)
    samplings["position"] = positions
    if any(chunk.scores for chunk in chunks):
        _score(chunks, samplings)
    return samplings


def _score(chunks: Seq[Chunk], samplings: NDArray[np.void]) -> None:
    """Makes the rows before the one that samples, if it does, ones of the tokens behind them."""
    row = 0
    for chunk in chunks:
        wanted = chunk.sequence.request.sampling.prompt_logprobs
        if chunk.scores and wanted is not None:
            behind = chunk.sequence.tokens[chunk.start + 1 : chunk.end + (not chunk.samples)]
            samplings["given"][row : row + len(behind)] = np.add(behind, 1)
            samplings["logprobs"][row : row + len(behind)] = 1 + wanted
        row += chunk.rows
