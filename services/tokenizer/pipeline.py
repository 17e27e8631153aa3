"""A request's way through the tokenizer: `run` reads top to bottom."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from opentelemetry.trace import Span
from prometheus_client import Histogram

from protos.common_pb2 import Decision, Record
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import PromptRequest
from protos.worker_pb2 import TokenDelta
from services.common.errors import PenstockError
from services.common.link import End, LinkCall
from services.common.peers import Peers
from services.common.telemetry import Telemetry, decision, traceparent
from services.tokenizer import metrics
from services.tokenizer.context import Prompt, assemble
from services.tokenizer.models import Models, ServedModel
from services.tokenizer.output import Output
from services.tokenizer.policy import Policy, PolicyRefusalError

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOST = ("peer_lost", "peer_stalled", "draining")  # of a link: another router may take it


@dataclass(frozen=True)
class Pipeline:
    """What all requests share."""

    models: Models
    policy: Policy
    routers: Peers
    router_patience_s: float
    telemetry: Telemetry
    threads: Executor


async def run(
    pipeline: Pipeline, call: LinkCall, request: PromptRequest, span: Span, record: Record
) -> None:
    """Sends the request's TextDeltas; adds to `record` what was decided and what came from below.

    Raises PenstockError.
    """
    # In: the model, then its prompt beside the verdict on the text; both before the router hears.
    model = pipeline.models[request.model]
    span.set_attribute("model", model.name)
    prompt = await _assemble_and_check(pipeline, model, request, span)
    record.decisions.append(_context_decision(prompt))

    # Out: tokens to text, in the link's callback, until the end or a stop string.
    output = Output(model.detokenizer(), request.stop, prompt.plan, len(prompt.token_ids))

    def forward(payload: bytes) -> None:
        delta = TokenDelta.FromString(payload)
        text = output.push(delta)
        if text is not None:
            call.send(text.SerializeToString())
        if output.stop is not None and not delta.finish:
            generation.stop()

    payload = _generate_request(request, prompt)
    for last_try in (False, True):
        router = await pipeline.routers.pick_least_loaded(pipeline.router_patience_s)
        generation = router.link.open(
            payload, deadline=call.deadline, traceparent=traceparent(span), on_item=forward
        )
        try:
            end = await generation.ended()
        finally:
            generation.cancel()
        if last_try or not _router_was_lost(end) or output.tokens:
            break
        log.warning("router %s was lost before its first token, trying again", router.id)
        reasons = {"lost": router.id, "why": end.status.reason}
        record.decisions.append(decision("tokenizer", "router", "tried again", reasons))

    # Account for it.
    record.MergeFrom(end.record)
    metrics.COMPLETION_TOKENS.labels(model.name).inc(output.tokens)
    span.set_attribute("completion_tokens", output.tokens)
    if output.stop is not None:
        told = {"completion_tokens": output.tokens}
        record.decisions.append(decision("tokenizer", "stop", "stop string", told))
    if not output.finish:
        raise _unfinished(end)


async def _assemble_and_check(
    pipeline: Pipeline, model: ServedModel, request: PromptRequest, span: Span
) -> Prompt:
    """Both at once, each in a thread; a refusal by the policy counts before a prompt's fault."""

    async def threaded(name: str, timer: Histogram, work: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        with pipeline.telemetry.span(name, span), timer.time():
            return await loop.run_in_executor(pipeline.threads, work, *args)

    verdict, prompt = await asyncio.gather(
        threaded("policy", metrics.POLICY, pipeline.policy.check, request, model.decode),
        threaded("assemble", metrics.ASSEMBLE, assemble, model, request),
        return_exceptions=True,
    )
    if isinstance(verdict, PolicyRefusalError):
        metrics.REFUSALS.labels(verdict.rule).inc()
    for outcome in (verdict, prompt):
        if isinstance(outcome, BaseException):
            raise outcome
    assert isinstance(prompt, Prompt)
    metrics.PROMPT_TOKENS.labels(model.name).inc(len(prompt.token_ids))
    metrics.CUT.labels("passages").inc(prompt.plan.passages_dropped)
    metrics.CUT.labels("messages").inc(prompt.plan.messages_dropped)
    span.set_attribute("prompt_tokens", len(prompt.token_ids))
    return prompt


def _context_decision(prompt: Prompt) -> Decision:
    plan = prompt.plan
    figures = {field.name: getattr(plan, field.name) for field in plan.DESCRIPTOR.fields}
    return decision("tokenizer", "context", "cut" if prompt.was_cut else "whole", figures)


def _generate_request(request: PromptRequest, prompt: Prompt) -> bytes:
    generate = GenerateRequest(
        caller=request.caller,
        model=request.model,
        prompt_token_ids=prompt.token_ids,
        sampling=request.sampling,
    )
    generate.sampling.max_tokens = prompt.max_tokens
    return generate.SerializeToString()


def _router_was_lost(end: End) -> bool:
    """A router passes on the loss of its workers in the same words, with their stage, once it has
    tried as many as it may: no other router shall try more.
    """
    return end.status.stage == "router" and end.status.reason in _LOST


def _unfinished(end: End) -> PenstockError:
    if end.status.code:
        return PenstockError.from_status(end.status)
    return PenstockError(
        grpc.StatusCode.INTERNAL, "the output ended without a reason", stage="router"
    )
