"""What a step's output tells: it gathers what happens from one step's end to the next."""

from collections.abc import Sequence as Seq

from services.worker.engine.kv.transfer import KvTransfer
from services.worker.engine.outputs import (
    FinishReason,
    KvReserved,
    Load,
    Logprobs,
    PrefillChunk,
    RequestError,
    RequestOutput,
    StepOutput,
    Timeline,
)
from services.worker.engine.plan import Result
from services.worker.engine.runners.runner import Runner
from services.worker.engine.scheduling.chunks import Chunk, Step
from services.worker.engine.scheduling.scheduler import Scheduler
from services.worker.engine.sequence import Sequence


class Report:
    """It also ends the sequences whose end it tells."""

    def __init__(
        self, scheduler: Scheduler, transfer: KvTransfer, runner: Runner, load: Load
    ) -> None:
        self._scheduler, self._transfer, self._runner = scheduler, transfer, runner
        self._now = StepOutput(0, 0, 0, load, 0)

    @property
    def is_empty(self) -> bool:
        """No request is told anything as yet."""
        return not self._now.outputs

    def take(self) -> StepOutput:
        """All since the last time; who takes it fills in the step's own figures."""
        output, self._now = self._now, StepOutput(0, 0, 0, self._now.load, 0)
        return output

    def schedule(self, step: Step, started_ns: int) -> None:
        """A step was decided."""
        for sequence in step.admitted:
            sequence.scheduled_ns = sequence.scheduled_ns or started_ns
        for sequence in step.reserved:
            self._now.kv_reserved.append(KvReserved(sequence.id, sequence.num_received))
        for sequence in step.preempted:
            self._now.preempted.append(sequence.id)

    def complete(self, chunk: Chunk, result: Result, started_ns: int, ended_ns: int) -> None:
        """A chunk came back, of a sequence that has not ended."""
        sequence, tokens, now = chunk.sequence, result.tokens, self._now
        if not chunk.is_decode:
            now.prefill_tokens += chunk.count
        if result.error is not None:
            self._scheduler.drop(chunk)
            self.fail(sequence, result.error)
            return
        if chunk.scores and sequence.scores is not None:
            sequence.scores[chunk.start :] = result.scores
        if result.states is not None and sequence.pool is not None:
            sequence.pool.add(result.states)
        drafted = accepted = 0
        if chunk.drafts:
            drafted, accepted = len(chunk.drafts), max(0, len(tokens) - 1)
            now.draft_tokens += drafted
            now.accepted_tokens += accepted
        reason = self._scheduler.complete(chunk, tokens)
        if chunk.is_decode:
            now.decode_tokens += len(tokens)
        else:
            sequence.chunks.append(PrefillChunk(started_ns, ended_ns, chunk.count))
            if sequence.request.export_kv is not None and not self._export(sequence):
                return
        if reason is not None:
            output = self._last(sequence, tokens, reason, result.logprobs)
            self._scheduler.finish(sequence)
        elif tokens:
            output = self._output(sequence, tokens, result.logprobs)
        else:
            return
        if drafted:
            output.draft_tokens, output.accepted_tokens = drafted, accepted
        now.outputs.append(output)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence of the scheduler's, with no tokens but those that were told."""
        output = self._last(sequence, [], reason)
        self._scheduler.finish(sequence)
        self._now.outputs.append(output)

    def fail(self, sequence: Sequence, error: RequestError) -> None:
        """Likewise, if its KV may be bad."""
        output = self._last(sequence, [], FinishReason.ERROR)
        output.error = error
        self._scheduler.abort(sequence)
        self._now.outputs.append(output)

    def leave(
        self, sequence: Sequence, reason: FinishReason, error: RequestError | None = None
    ) -> None:
        """One ended that the scheduler never had."""
        output = self._last(sequence, [], reason)
        output.error = error
        self._now.outputs.append(output)

    def refuse(self, request_id: str, error: RequestError) -> None:
        self._now.outputs.append(RequestOutput(request_id, [], FinishReason.ERROR, error))

    def _export(self, sequence: Sequence) -> bool:
        """What is complete of its KV. False: there was no room for it, so the sequence ended."""
        try:
            self._now.kv_exports.extend(self._transfer.exports(sequence))
        except OSError as error:
            self.fail(sequence, RequestError("kv_transfer", f"shared memory: {error}"))
            return False
        return True

    def _last(
        self,
        sequence: Sequence,
        new_tokens: list[int],
        reason: FinishReason,
        logprobs: Seq[Logprobs] = (),
    ) -> RequestOutput:
        output = self._output(sequence, new_tokens, logprobs)
        output.finish_reason, output.usage = reason, sequence.usage()
        if sequence.pool is not None and reason is FinishReason.STOP:
            output.pooled = sequence.pool.numbers(self._runner)
        return output

    def _output(
        self, sequence: Sequence, new_tokens: list[int], logprobs: Seq[Logprobs] = ()
    ) -> RequestOutput:
        output = RequestOutput(sequence.id, new_tokens, None, None, sequence.num_cached)
        if logprobs:
            output.logprobs = list(logprobs[: len(new_tokens)])
        if new_tokens and sequence.scores is not None:
            output.prompt_logprobs, sequence.scores = sequence.scores, None
        if not sequence.reported:
            sequence.reported = True
            output.timeline = Timeline(
                sequence.queued_ns, sequence.scheduled_ns, tuple(sequence.chunks)
            )
        return output
