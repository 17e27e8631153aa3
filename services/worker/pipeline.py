"""One request through a worker: compute the prompt, hand the KV over or take it, decode.

Tokens leave by `call.send` from the engine's step, in one frame with those of all other requests.
"""

import asyncio
import json
import logging
from dataclasses import dataclass, replace
from typing import Literal

import grpc
from google.protobuf.message import DecodeError

from protos import common_pb2, worker_pb2
from services.common.block_hash import tenant_salt
from services.common.errors import PenstockError, invalid, unavailable
from services.common.link import LinkCall
from services.common.packed_ids import count, unpack
from services.common.served_models import Checkpoint
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import Telemetry, remote_parent
from services.common.waiting import first_done
from services.worker.adapters import ServedAdapters
from services.worker.engine import (
    Constraint,
    EngineClient,
    FinishReason,
    Pooling,
    Request,
    RequestOutput,
    Sampling,
)
from services.worker.kv_receiver import KvReceiver, Transfer
from services.worker.kv_sender import Channels, KvSender
from services.worker.metrics import Meter
from services.worker.sequences import Running, Sequences
from services.worker.turns import Turns

log = logging.getLogger(__name__)

_INTERNAL = PenstockError(
    grpc.StatusCode.INTERNAL,
    "the worker failed on this request",
    stage="worker",
    reason="internal",
)
_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_LENGTH,
    FinishReason.PREFILL_DONE: common_pb2.FINISH_PREFILL_DONE,
}
_POOLINGS: dict[common_pb2.Pooling.Kind, Literal["last", "mean", "logits"]] = {
    common_pb2.Pooling.LAST: "last",
    common_pb2.Pooling.MEAN: "mean",
    common_pb2.Pooling.LOGITS: "logits",
}
_MODES = {value: name.lower() for name, value in worker_pb2.WorkRequest.Mode.items()}


@dataclass(frozen=True)
class Stage:
    """What a request needs of its worker."""

    checkpoint: Checkpoint
    kv_format: str
    """Of which checkpoint the engine's KV blocks are, and how they lie."""
    adapters: ServedAdapters
    engine: EngineClient
    sequences: Sequences
    turns: Turns
    receiver: KvReceiver
    channels: Channels
    telemetry: Telemetry
    meter: Meter
    share_memory_on: str  # host_id of decode workers that get KV through shared memory; "": of none


async def serve(stage: Stage, call: LinkCall) -> None:
    """Runs one WorkRequest to its end; the call carries its tokens, or the error."""
    status = _INTERNAL.to_status()  # until it is known better: no way out may look like success
    try:
        with stage.telemetry.span("worker", remote_parent(call.traceparent)) as span:
            try:
                work = _parse(call.payload)
                span.set_attribute("mode", _MODES[work.mode])
                _check_model(stage, work)
                await _MODES_OF_WORK[work.mode](stage, work, call, span)
                status = common_pb2.Status()
            except PenstockError as error:
                span.set_attribute("error", error.reason or error.code.name.lower())
                status = error.to_status()
            except Exception:
                span.set_attribute("error", _INTERNAL.reason)
                log.exception("a request of %s failed in its worker", call.peer)
    finally:  # a cancelled request tells its record too
        call.end(status, stage.telemetry.record(span))


def _check_model(stage: Stage, work: worker_pb2.WorkRequest) -> None:
    """Raises INVALID_ARGUMENT for another model, UNAVAILABLE for another checkpoint of this one:
    its tokens mean something else here, and its KV blocks may come from elsewhere."""
    own = stage.checkpoint
    if work.model != own.model:
        raise invalid(f"this worker serves {own.model!r}", "model", stage="worker")
    if work.checkpoint != own.digest and work.checkpoint not in stage.adapters.digests:
        raise unavailable(
            f"this worker serves the checkpoint {own.digest} of {own.model!r}",
            stage="worker",
            reason="other_checkpoint",
        )


def _parse(payload: bytes) -> worker_pb2.WorkRequest:
    """Raises INVALID_ARGUMENT. What the engine checks itself is not looked at."""
    try:
        work = worker_pb2.WorkRequest.FromString(payload)
    except DecodeError:
        raise invalid("not a WorkRequest", "", stage="worker") from None
    try:
        count(work.prompt_token_ids)
    except ValueError as wrong:
        raise invalid(f"prompt_token_ids: {wrong}", "prompt_token_ids", stage="worker") from None
    if work.mode not in _MODES:
        raise invalid(f"the mode {work.mode} is not known", "mode", stage="worker")
    return work


async def _unsplit(stage: Stage, work: worker_pb2.WorkRequest, call: LinkCall, span: Span) -> None:
    request = _engine_request(stage, work)
    async with stage.turns.take(work.alone_tokens) as gave:

        def forward(output: RequestOutput) -> None:
            _send(call, output)
            gave(len(output.new_token_ids))

        running = stage.sequences.add(request, forward)
        try:
            await running.finished
        finally:
            stage.sequences.release(request.request_id)
            _trace(stage, span, running)


async def _prefill(stage: Stage, work: worker_pb2.WorkRequest, call: LinkCall, span: Span) -> None:
    async with stage.channels.sender(work.push_to.address) as sender:
        with stage.telemetry.span("reserve kv", span):
            cached_blocks = await sender.reserve(
                work.transfer_id, count(work.prompt_token_ids), stage.kv_format
            )
        await _compute_and_push(stage, work, call, span, sender, cached_blocks)


async def _compute_and_push(
    stage: Stage,
    work: worker_pb2.WorkRequest,
    call: LinkCall,
    span: Span,
    sender: KvSender,
    cached_blocks: int,
) -> None:
    shared = bool(stage.share_memory_on) and work.push_to.host_id == stage.share_memory_on
    request = _engine_request(
        stage,
        work,
        prefill_only=True,
        export_kv="shared" if shared else "inline",
        export_from_block=cached_blocks,
    )

    def forward(output: RequestOutput) -> None:
        done = output.finish_reason is FinishReason.PREFILL_DONE
        if done:  # announced only once the decode worker has taken over
            sender.commit(output.new_token_ids[-1])
        _send(call, replace(output, finish_reason=None) if done else output)

    running = stage.sequences.add(request, forward, on_blocks=sender.put)
    push = asyncio.create_task(sender.push())
    try:
        with stage.telemetry.span("push kv", span, shared_memory=shared) as push_span:
            await first_done(running.finished, push)
            if push.done():
                push.result()  # before the prompt is done a push can only have failed
            output = await running.finished
            if output.finish_reason is FinishReason.PREFILL_DONE:
                await push
                push_span.set_attribute("bytes", sender.bytes_sent)
                stage.meter.kv_sent(sender.bytes_sent, shared)
                told = replace(output, new_token_ids=[], logprobs=None, prompt_logprobs=None)
                _send(call, told)
    finally:
        stage.sequences.release(request.request_id)  # before anything is waited for
        _trace(stage, span, running)
        push.cancel()
        await asyncio.gather(push, return_exceptions=True)


async def _decode(stage: Stage, work: worker_pb2.WorkRequest, call: LinkCall, span: Span) -> None:
    request = _engine_request(stage, work, remote_prefill=True)

    def forward(output: RequestOutput) -> None:
        _send(call, output)

    with stage.receiver.expect(work.transfer_id, request.request_id) as transfer:
        running = stage.sequences.add(request, forward)
        try:
            await _finished_unless_broken(running, transfer)
        finally:
            stage.sequences.release(request.request_id)
            _trace(stage, span, running)


_MODES_OF_WORK = {
    worker_pb2.WorkRequest.UNSPLIT: _unsplit,
    worker_pb2.WorkRequest.PREFILL: _prefill,
    worker_pb2.WorkRequest.DECODE: _decode,
}


async def _finished_unless_broken(running: Running, transfer: Transfer) -> None:
    await first_done(running.finished, transfer.broken)
    if transfer.broken.done():
        transfer.broken.result()
    await running.finished


def _engine_request(stage: Stage, work: worker_pb2.WorkRequest, **split: object) -> Request:
    sampling = Sampling(
        max_tokens=work.sampling.max_tokens,
        temperature=work.sampling.temperature,
        top_k=work.sampling.top_k,
        top_p=work.sampling.top_p,
        seed=work.sampling.seed,
        ignore_eos=work.sampling.ignore_eos,
        stop_token_ids=tuple(work.sampling.stop_token_ids),
        min_p=work.sampling.min_p,
        repetition_penalty=work.sampling.repetition_penalty or 1.0,
        frequency_penalty=work.sampling.frequency_penalty,
        presence_penalty=work.sampling.presence_penalty,
        logit_bias=tuple((one.id, one.bias) for one in work.sampling.logit_bias),
        bad_words=tuple(tuple(word.ids) for word in work.sampling.bad_words),
        min_tokens=work.sampling.min_tokens,
        logprobs=_if_set(work.sampling, "logprobs"),
        prompt_logprobs=_if_set(work.sampling, "prompt_logprobs"),
        constraint=_constraint(work.sampling),
    )
    return Request(
        request_id=stage.sequences.next_id(),
        prompt_token_ids=unpack(work.prompt_token_ids).tolist(),
        sampling=sampling,
        salt=tenant_salt(work.caller.tenant),
        priority=work.caller.priority,
        generated_prefix=work.generated_prefix,
        pooling=_pooling(work.pooling) if work.HasField("pooling") else None,
        adapter=work.checkpoint if work.checkpoint != stage.checkpoint.digest else "",
        **split,  # type: ignore[arg-type]
    )


def _pooling(wanted: common_pb2.Pooling) -> Pooling:
    if wanted.kind not in _POOLINGS:
        raise invalid(f"the kind {wanted.kind} is not known", "pooling", stage="worker")
    return Pooling(_POOLINGS[wanted.kind], wanted.dimensions, tuple(wanted.logits_of))


def _constraint(sampling: common_pb2.Sampling) -> Constraint | None:
    if not sampling.HasField("constraint"):
        return None
    wanted = sampling.constraint
    match wanted.WhichOneof("kind"):
        case "json_object":
            return Constraint("json_object")
        case "json_schema":
            return Constraint("json_schema", wanted.json_schema)
        case "regex":
            return Constraint("regex", wanted.regex)
        case "choice":
            return Constraint("choice", json.dumps(list(wanted.choice.texts)))
        case "grammar":
            return Constraint("grammar", wanted.grammar)
    raise invalid("a constraint of a kind that is not known here", "constraint", stage="worker")


def _if_set(
    sampling: common_pb2.Sampling, name: Literal["logprobs", "prompt_logprobs"]
) -> int | None:
    return int(getattr(sampling, name)) if sampling.HasField(name) else None


def _send(call: LinkCall, output: RequestOutput) -> None:
    delta = worker_pb2.TokenDelta(
        token_ids=output.new_token_ids,
        draft_tokens=output.draft_tokens,
        accepted_tokens=output.accepted_tokens,
    )
    for told, found in (
        (delta.logprobs, output.logprobs),
        (delta.prompt_logprobs, output.prompt_logprobs),
    ):
        for one in found or ():
            told.add(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs)
    if output.timeline is not None:  # the first tokens: what was cached is known now
        delta.usage.cached_tokens = output.num_cached_tokens
    if output.pooled is not None:
        delta.pooled = output.pooled
    if output.finish_reason in _FINISH:
        delta.finish = _FINISH[output.finish_reason]
        if output.usage is not None:
            delta.usage.prompt_tokens = output.usage.prompt_tokens
            delta.usage.cached_tokens = output.usage.cached_tokens
            delta.usage.completion_tokens = output.usage.completion_tokens
    if delta.token_ids or delta.finish:
        call.send(delta.SerializeToString())


def _trace(stage: Stage, span: Span, running: Running) -> None:
    """The engine's own clock, as spans: waiting, each prompt chunk, decoding."""
    timeline, telemetry = running.timeline, stage.telemetry
    if timeline is None:
        return
    first_ns, last_ns = running.first_token_ns, running.last_token_ns
    stage.meter.request(timeline, first_ns, last_ns, running.tokens)
    if timeline.scheduled_ns:
        telemetry.past_span("queue", span, timeline.queued_ns, timeline.scheduled_ns)
    for chunk in timeline.chunks:
        telemetry.past_span("prefill", span, chunk.start_ns, chunk.end_ns, tokens=chunk.tokens)
    if running.tokens > 1 and first_ns:
        telemetry.past_span("decode", span, first_ns, last_ns, tokens=running.tokens)
