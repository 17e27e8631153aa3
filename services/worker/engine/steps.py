"""Runs steps on a runner, and finds whose fault it is when one fails."""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from services.worker.engine.grammar.filler import Filler, Job
from services.worker.engine.grammar.library import Words
from services.worker.engine.grammar.matcher import ConstraintError, Late, Matcher
from services.worker.engine.layout import plan_step, sampling_rows
from services.worker.engine.outputs import RequestError
from services.worker.engine.plan import NOT_FINITE, Collected, Result
from services.worker.engine.runners.runner import Runner, RunnerLost, Ticket
from services.worker.engine.scheduling.chunks import Chunk
from services.worker.engine.scheduling.cost_model import StepShape
from services.worker.engine.sequence import Status

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""In a row, in which every request failed; then it is the engine that is broken."""


LATE = Result([])
"""There was no time for the sequence's grammar: its chunk is to be computed again."""


class EngineBroken(Exception):
    """Whatever the engine runs fails, and will go on to: it must be replaced."""

    def __init__(self, message: str, killed: bool = False) -> None:
        """`killed`: see EngineDied."""
        super().__init__(message)
        self.killed = killed


@dataclass(slots=True)
class Running:
    """A step between its launch and its end. A step's time begins when it is planned, or when the
    one before ends if that is later: the times of steps do not overlap."""

    chunks: list[Chunk]
    shape: StepShape = field(default_factory=StepShape)
    started_ns: int = 0
    ticket: Ticket | None = None
    """While it may be computed."""
    failed: Exception | None = None
    """It could not be launched, or not go on and sample."""
    computed_s: float | None = None
    """That the device took; None, if it computed nothing, or failed for anybody."""
    constrained: int = 0
    """Rows that a grammar constrains."""
    instead: dict[int, Result] = field(default_factory=dict)
    """By the place of chunks: what is told of them in place of what they sample, as their
    grammars cannot go on, or not now."""
    in_vain: bool = False
    """The step that it was launched behind failed."""


class Steps:
    """One that runs and, at most, one behind it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._filler = Filler()
        self._failed = 0

    def close(self, running: Running | None) -> None:
        """`running`: which nobody will collect."""
        if running is not None:
            self._abandon(running)
        self._filler.close()

    def launch(self, running: Running, before: Running | None = None) -> None:
        """Has the chunks computed together, behind `before`, whose tokens they may go on after."""
        rows = sampling_rows(before.chunks) if before else {}
        try:
            if chunks := running.chunks:
                plan = plan_step(chunks, rows)
                running.constrained = len(plan.constrained)
                running.ticket = self._runner.launch(plan)
        except Exception as error:
            running.failed = error

    def constrain(self, running: Running) -> None:
        """Tells a step that waits for it what its constrained rows may sample. To call once all
        tokens before those are known: while the step computes."""
        if running.failed or not running.constrained:
            return
        try:
            self._runner.sample(running.ticket, self._allowed(running))
        except Exception as error:
            running.failed = error

    def _allowed(self, running: Running) -> Words:
        """Of its constrained rows: [M, ceil(vocab / 32)]"""
        size = running.constrained, -(-self._runner.info.vocab_size // 32)
        allowed = np.full(size, -1, np.int32)
        jobs: list[Job] = []
        places: list[tuple[int, Words]] = []
        end = 0
        for place, chunk in enumerate(running.chunks):
            matcher = chunk.sequence.matcher
            if not chunk.samples or matcher is None:
                continue
            words = allowed[end : end + 1 + len(chunk.drafts)]
            end += len(words)
            if not _counts(chunk):
                continue
            if matcher.words is not None and not chunk.drafts:
                words[0] = matcher.words
                continue
            jobs.append(Job(matcher, partial(matcher.fill_along, words, chunk.drafts)))
            places.append((place, words))
        errors = self._filler.run(jobs) if jobs else []
        for (place, words), error in zip(places, errors, strict=True):
            if error is not None:
                words[:] = -1
                running.instead[place] = _instead(error)
        return allowed

    def _follow(self, chunks: Seq[Chunk], results: Seq[Result]) -> None:
        """Has the grammars take in what was sampled; nothing comes behind what ends one. What goes
        wrong is told when the next token is to be sampled."""
        jobs: list[Job] = []
        taken: list[tuple[Matcher, Result]] = []
        for chunk, result in zip(chunks, results, strict=True):
            matcher = chunk.sequence.matcher
            if matcher and result.tokens and _counts(chunk):
                matcher.give(result.tokens)
                jobs.append(Job(matcher, matcher.follow))
                taken.append((matcher, result))
        if not jobs:
            return
        self._filler.run(jobs)
        for matcher, result in taken:
            if matcher.ended:
                del result.tokens[max(0, len(result.tokens) - matcher.num_given) :]

    def collect(self, running: Running, behind: Running | None = None) -> list[Result]:
        """Waits for the step's end; one result for each chunk. `behind`: what was launched since,
        which is in vain if the step fails. Raises EngineBroken."""
        results = self._results(running, behind)
        if running.constrained or running.failed:
            self._follow(running.chunks, results)
        failed = [result for result in results if result.error is not None]
        if failed:
            running.computed_s = None
        if failed or self._failed:
            self._raise_if_broken(
                [
                    result
                    for chunk, result in zip(running.chunks, results, strict=True)
                    if chunk.sequence.status is not Status.FINISHED
                ]
            )
        return results

    def _results(self, running: Running, behind: Running | None = None) -> list[Result]:
        chunks = running.chunks
        if not chunks:
            return []
        try:
            collected = self._end(running)
            running.computed_s = collected.seconds
            for place, result in running.instead.items():
                collected.results[place] = result
            return collected.results
        except RunnerLost as error:
            raise EngineBroken(str(error), error.killed) from error
        except Exception as error:
            if behind:
                self._abandon(behind)
            if len(chunks) > 1:
                log.exception("a step of %d sequences failed; running them singly", len(chunks))
                return [self._alone(chunk) for chunk in chunks]
            log.exception("request %s failed", chunks[0].sequence.id)
            message = f"The model failed: {type(error).__name__}"
            return [Result([], RequestError("internal", message))]

    def _alone(self, chunk: Chunk) -> Result:
        if chunk.sequence.status is Status.FINISHED or chunk.known > len(chunk.sequence.tokens):
            return Result([])  # nobody waits for it, or what it lies behind did not come
        running = Running([chunk])
        self.launch(running)
        self.constrain(running)
        return self._results(running)[0]

    def _abandon(self, running: Running) -> None:
        """What failed before it is to be run again, or nobody waits for it."""
        running.in_vain = True
        if running.ticket is not None:
            try:
                self._end(running)
            except Exception:
                log.info("a step that is in vain failed, too", exc_info=True)

    def _end(self, running: Running) -> Collected:
        """Waits until the step writes no more, whatever went wrong since its launch: here all
        tickets come back. Raises what went wrong."""
        ticket, running.ticket = running.ticket, None
        collected = None
        try:
            if ticket is not None:
                collected = self._runner.collect(ticket)
        except Exception as error:
            running.failed = running.failed or error
        if running.failed or collected is None:
            raise running.failed or AssertionError("a step was never launched")
        return collected

    def _raise_if_broken(self, results: Seq[Result]) -> None:
        """A request that fails ends alone, but some errors of a device stay until its process ends.
        An engine that went on would fail its requests faster than others answer theirs, and so
        look idle and draw more. A failed request runs no more, so steps in a row are of different
        ones; those of the last step end with the engine and can go on elsewhere. `results`: of
        requests that go on; one that ended meanwhile ran or not, and says nothing. Nor does one
        that was computed, of which logits that are not finite came, or none that may be sampled.
        """
        errors = [result.error for result in results if result.error]
        if results and len(errors) < len(results):
            self._failed = 0
        elif any(
            r is not NOT_FINITE and r.error.code != "invalid_request" for r in results if r.error
        ):
            self._failed += 1
        if self._failed == MAX_FAILED_STEPS:
            raise EngineBroken(f"every request of the last {MAX_FAILED_STEPS} steps failed")


def _counts(chunk: Chunk) -> bool:
    """What it samples is the sequence's next token: that has not ended, nor was the chunk launched
    behind a token that did not come."""
    sequence = chunk.sequence
    return sequence.status is not Status.FINISHED and chunk.known == len(sequence.tokens)


def _instead(error: Exception) -> Result:
    if isinstance(error, Late):
        return LATE
    if isinstance(error, ConstraintError):
        return Result([], RequestError("invalid_request", str(error), "constraint"))
    log.error("a mask was not filled", exc_info=error)
    return Result([], RequestError("internal", f"The grammar failed: {type(error).__name__}"))
