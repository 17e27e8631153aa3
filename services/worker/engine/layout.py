"""Lays out as plain arrays what was scheduled."""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter

from kernels.sampling import SAMPLING_WORDS, word_of
from services.worker.engine.logits import Row, gathered
from services.worker.engine.plan import Ints, StepPlan
from services.worker.engine.scheduling.chunks import Chunk

_POSITION, _GIVEN, _LOGPROBS = (word_of(name) for name in ("position", "given", "logprobs"))
_IS_SPECIAL = attrgetter("is_special")


def sampling_rows(chunks: Seq[Chunk]) -> dict[str, int]:
    """Which of the R rows of their step is whose, by the sequence's id."""
    ends = accumulate(chunk.rows for chunk in chunks)
    return {
        chunk.sequence.id: end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples
    }


def plan_step(chunks: Seq[Chunk], before: Mapping[str, int]) -> StepPlan:
    """Lays out what was scheduled. `chunks`: not empty, those of one token first; `before`: the
    `sampling_rows` of the step that runs, where one does."""
    token_ids, positions, awaited = array("i"), array("i"), array("i")
    singles = 0
    for chunk in chunks:  # most steps are nothing else
        if not chunk.is_single:
            break
        start, tokens = chunk.start, chunk.sequence.tokens
        if start < len(tokens):
            token_ids.append(tokens[start])
        else:
            awaited.extend((singles, before[chunk.sequence.id]))
            token_ids.append(0)
        positions.append(start)
        singles += 1
    starts = array("i", range(singles + 1))
    sampled = starts[:-1]
    rows = sampled[:]
    for row, chunk in enumerate(chunks[singles:], singles):
        sequence = chunk.sequence
        token_ids.extend(sequence.tokens[chunk.start : chunk.known])
        if chunk.known > len(sequence.tokens):
            awaited.extend((len(token_ids), before[sequence.id]))
            token_ids.append(0)
        token_ids.extend(chunk.drafts)
        positions.extend(range(chunk.start, chunk.end))
        starts.append(len(positions))
        sampled.extend([row] * chunk.rows)
        rows.extend(range(len(positions) - chunk.rows, len(positions)))
    sequences = [chunk.sequence for chunk in chunks]
    tables = [sequence.blocks for sequence in sequences]
    groups = len(sequences[0].passed)
    for number in range(groups - 1):
        tables += [sequence.more[number] for sequence in sequences]
    plan = StepPlan(
        token_ids=token_ids,
        positions=positions,
        starts=starts,
        lengths=array("i", [chunk.end for chunk in chunks]),
        tables=padded_tables(tables),
        num_decodes=singles + sum([chunk.count == 1 for chunk in chunks[singles:]]),
        sampled=sampled,
        rows=rows,
        sampling_words=_sampling_words(
            [sequences[row].sampling_row for row in sampled],
            [positions[token] + 1 for token in rows],
        ),
        awaited=awaited,
        groups=groups,
    )
    if any(map(_IS_SPECIAL, sequences)):
        _lay_specials(plan, chunks)
    return plan


def _lay_specials(plan: StepPlan, chunks: Seq[Chunk]) -> None:
    """What few ask for: edits of logits, grammars, the prompt's logprobs, states, adapters."""
    edits: list[Row] = []
    for row, chunk in enumerate(chunks):
        sequence, end = chunk.sequence, plan.starts[row + 1]
        edits += [(sequence.edits, chunk.drafts[:guessed]) for guessed in range(chunk.rows)]
        if sequence.matcher and chunk.samples:
            plan.constrained.extend(range(len(edits) - 1 - len(chunk.drafts), len(edits)))
        if count := chunk.pooled:
            plan.pooled.append(row)
            plan.pooled_rows.extend(range(end - count, end))
            plan.pool_starts.append(len(plan.pooled_rows))
    if any(chunk.sequence.place >= 0 for chunk in chunks):
        for chunk in chunks:
            plan.adapters.extend([chunk.sequence.place] * chunk.count)
    if any(chunk.scores for chunk in chunks):
        _score(chunks, plan.sampling_words)
    plan.edits = gathered(edits, plan.samplings)


def one_further(plan: StepPlan) -> StepPlan:
    """What follows on a step of one token of each, which it samples, for the same sequences."""
    count = len(plan.lengths)
    words = plan.sampling_words[:]
    words[_POSITION::SAMPLING_WORDS] = _more(words[_POSITION::SAMPLING_WORDS])
    return replace(
        plan,
        token_ids=array("i", bytes(4 * count)),
        awaited=array("i", [row for row in range(count) for _ in range(2)]),
        positions=_more(plan.positions),
        lengths=_more(plan.lengths),
        sampling_words=words,
    )


def _more(values: Ints) -> Ints:
    return array("i", [value + 1 for value in values])


def padded_tables(tables: Seq[Ints]) -> Ints:
    """[tables, longest], padded with block 0."""
    size = max(map(len, tables)) * tables[0].itemsize
    return array("i", b"".join([bytes(table).ljust(size, b"\0") for table in tables]))


def _sampling_words(rows: Seq[bytes], positions: Seq[int]) -> Ints:
    """Rows of SAMPLING, each of the token at its position."""
    words = array("i", b"".join(rows))
    words[_POSITION::SAMPLING_WORDS] = array("i", positions)
    return words


def _score(chunks: Seq[Chunk], words: Ints) -> None:
    """Makes the rows before the one that samples, if it does, ones of the tokens behind them."""
    row = 0
    for chunk in chunks:
        wanted = chunk.sequence.request.sampling.prompt_logprobs
        if chunk.scores and wanted is not None:
            behind = chunk.sequence.tokens[chunk.start + 1 : chunk.end + (not chunk.samples)]
            for place, token in enumerate(behind, row):
                words[place * SAMPLING_WORDS + _GIVEN] = token + 1
                words[place * SAMPLING_WORDS + _LOGPROBS] = 1 + wanted
        row += chunk.rows
