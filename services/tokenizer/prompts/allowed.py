"""The policy's verdict on a request, beside what is made of it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from protos.common_pb2 import Record
from protos.tokenizer_pb2 import PromptRequest
from services.common.errors import PenstockError, invalid
from services.common.policy import Policy, RuleSpec, Verdict
from services.common.policy.metrics import VERDICTS
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import decision
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.parts import Pipeline, threaded
from services.tokenizer.prompts.subjects import edit, subjects

T = TypeVar("T")


class Routed(Exception):
    """The policy sends the request to another model: whoever asks must see whether it may."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


def policy_of(pipeline: Pipeline, request: PromptRequest) -> Policy:
    """An answer that is gone on with has the version that it began with, as long as that is known
    here."""
    begun_with = pipeline.policy.of(request.resume.policy) if request.HasField("resume") else None
    return begun_with or pipeline.policy.current


async def allowed(
    pipeline: Pipeline,
    policy: Policy,
    model: ServedModel,
    request: PromptRequest,
    span: Span,
    record: Record,
    make: Callable[[ServedModel], Coroutine[Any, Any, T]],
) -> tuple[ServedModel, T]:
    """What `make` makes of the request as the policy lets it be, and of which model: both at once;
    a refusal counts before a prompt's fault. What is redacted or routed is made again.

    An answer that is gone on with was allowed when it began, and is redacted as it was then.
    Raises INVALID_ARGUMENT that names rule and field, and Routed.
    """
    if not policy.texts.has("input", "retrieved"):
        return model, await make(model)
    verdict, made = await asyncio.gather(
        _check(pipeline, policy, model, request, span), make(model), return_exceptions=True
    )
    if isinstance(verdict, BaseException):
        raise verdict
    if not request.HasField("resume"):
        routed = verdict.routed if verdict.refused is None else None
        if routed is not None and routed.model not in (None, request.model):
            if not request.HasField("pool"):  # another model's numbers say something else
                raise Routed(routed.model)  # which is told when it is asked for there
            verdict.refused = routed, "model"
        tell(policy, verdict.hits, span, record)
        if verdict.refused is not None:
            raise _refusal(*verdict.refused)
    if verdict.edits:
        return model, await _again(request, verdict, make, model)
    if isinstance(made, BaseException):
        raise made
    return model, made


async def _again(
    request: PromptRequest,
    verdict: Verdict,
    make: Callable[[ServedModel], Coroutine[Any, Any, T]],
    model: ServedModel,
) -> T:
    edit(request, verdict.edits)
    return await make(model)


async def _check(
    pipeline: Pipeline, policy: Policy, model: ServedModel, request: PromptRequest, span: Span
) -> Verdict:
    """In a thread."""

    def work() -> Verdict:
        return pipeline.policy.check(policy, subjects(request, model.decode))

    return await threaded(pipeline, request.caller.tenant, span, "policy", work)


def tell(policy: Policy, hits: Counter[tuple[str, str, str]], span: Span, record: Record) -> None:
    """Which rules matched, in the trace, the record and the metrics; never what they matched."""
    if not hits:
        return
    for (rule, action, place), times in hits.items():
        VERDICTS.labels(rule, action, place).inc(times)
    told: dict[str, str] = {}
    for rule, action, place in hits:
        of_rule = f"{action}, in {place}"
        told[rule] = f"{told[rule]}; {of_rule}" if rule in told else of_rule
    actions = {action for _, action, _ in hits}
    done = next(a for a in ("refuse", "route", "redact", "flag") if a in actions)
    span.set_attribute("policy", f"{done}: {', '.join(told)}")
    reasons = {"version": policy.version, **told}
    record.decisions.append(decision("tokenizer", "policy", done, reasons))


def _refusal(rule: RuleSpec, param: str) -> PenstockError:
    """Names the rule and the field, not the text."""
    message = f"refused by the content policy, rule {rule.name!r}"
    return invalid(message, param, reason="content_policy")
