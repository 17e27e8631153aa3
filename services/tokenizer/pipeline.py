"""A request's way through the tokenizer: `run` reads top to bottom."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import grpc

from protos.common_pb2 import Decision, Passage, Record
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.errors import PenstockError, invalid, unavailable
from services.common.link import End, LinkCall
from services.common.packed_ids import pack
from services.common.policy import Policy
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import decision, traceparent
from services.tokenizer import metrics
from services.tokenizer.answers.answer_policy import AnswerPolicy
from services.tokenizer.answers.choices import generate_all, seed_of
from services.tokenizer.answers.generation import Way
from services.tokenizer.answers.output import CannotResumeError, Output
from services.tokenizer.answers.token_texts import bad_words
from services.tokenizer.checkpoints.models import ServedModel
from services.tokenizer.checkpoints.own_sampling import fill
from services.tokenizer.parts import Pipeline, model_of, threaded, told_of
from services.tokenizer.prompts.allowed import Routed, allowed, policy_of, tell
from services.tokenizer.prompts.constraint import constraint_of, shape_of
from services.tokenizer.prompts.context import Prompt, assemble, check_length
from services.tokenizer.prompts.offers import offered

_SHORT_BYTES = 1024  # of a request


async def run(
    pipeline: Pipeline, call: LinkCall, request: PromptRequest, span: Span, record: Record
) -> None:
    """Sends the request's TextDeltas; adds to `record` what was decided and what came from below.

    Raises PenstockError.
    """
    replaced: set[str] = set()  # checkpoints whose workers left before they made a token of it
    policy, given = policy_of(pipeline, request), list(map(_words, request.chat.passages))
    warms = pipeline.warming.wants(request)
    while True:
        # In: the model, then its prompt beside the verdict on the text; both before the router
        # hears.
        try:
            model, prompt = await _prompt(pipeline, policy, request, replaced, span, record)
        except Routed as to:
            return call.send(TextDelta(model=to.model).SerializeToString())
        context_at = len(record.decisions)
        try:
            # Out: tokens to text, in the link's callback, until the end or a stop string.
            outputs = _outputs(model, request, prompt, policy, given, warms)
            if request.HasField("resume"):
                await _resume(pipeline, outputs, request, span)
            before = sum(len(output.token_ids) for output in outputs)
            patience_s = pipeline.router_patience_s
            way = Way(call, pipeline.routers, patience_s, traceparent(span), record)
            asked = _generate_requests(request, model, prompt, len(outputs))
            put_away = request.SerializeToString()
            del request  # as a message it would be a kilobyte, as long as the answer lasts
            end = await generate_all(asked, outputs, way, pipeline.choices_at_once)
        finally:  # the first token does not wait for what is told of the prompt
            record.decisions.insert(context_at, _context_decision(prompt))
        begun = any(output.token_ids for output in outputs)
        if end.status.reason != "checkpoint_replaced" or begun:
            break
        request = PromptRequest.FromString(put_away)
        replaced.add(model.checkpoint)
        record.decisions.append(decision("tokenizer", "checkpoint", "replaced", told_of(model)))

    # Account for it.
    tokens = sum(len(output.token_ids) for output in outputs)
    metrics.COMPLETION_TOKENS.labels(model.name).inc(tokens - before)
    span.set_attribute("completion_tokens", tokens)
    for output in outputs:
        if output.stop is not None:
            told = {"completion_tokens": len(output.token_ids)}
            record.decisions.append(decision("tokenizer", "stop", "stop string", told))
        if output.hits:
            tell(policy, output.hits, span, record)
    if not all(output.finish for output in outputs):
        raise _unfinished(end)
    if warms:
        request = PromptRequest.FromString(put_away)
        pipeline.warming.answered(model, request, prompt, outputs[0], call.traceparent)


async def _prompt(
    pipeline: Pipeline,
    policy: Policy,
    request: PromptRequest,
    replaced: Collection[str],
    span: Span,
    record: Record,
) -> tuple[ServedModel, Prompt]:
    """An answer that is gone on with has the checkpoint and window that it had when it began. One
    that is tokenized anew is judged anew: a completion's token ids may be another text to another
    checkpoint."""

    async def make(model: ServedModel) -> Prompt:
        if not model.kind.generates:
            what = f"the model {model.name!r} makes no text"
            raise invalid(what, "model", reason="unsupported_model")
        return await _assemble(pipeline, model, request, span)

    model = await model_of(pipeline, request, replaced, span)
    if request.HasField("resume"):
        model = replace(model, window=request.resume.plan.window)
    elif not policy.texts.routes:  # to a model whose window may be another
        check_length(model, request)
    model, prompt = await allowed(pipeline, policy, model, request, span, record, make)
    if not request.HasField("resume") and not replaced:
        _count(model, prompt)
    return model, prompt


def _count(model: ServedModel, prompt: Prompt) -> None:
    """Once for a request."""
    metrics.PROMPT_TOKENS.labels(model.name).inc(len(prompt.token_ids))
    metrics.CUT.labels("passages").inc(prompt.plan.passages_dropped)
    metrics.CUT.labels("messages").inc(prompt.plan.messages_dropped)


async def _assemble(
    pipeline: Pipeline, model: ServedModel, request: PromptRequest, span: Span
) -> Prompt:
    tenant, work = request.caller.tenant, partial(assemble, model, request)
    if _is_short(
        model, request
    ):  # a thread, and its word that it is done, would take as long again
        with pipeline.telemetry.span("assemble", span):
            prompt = work()
    else:
        prompt = await threaded(pipeline, tenant, span, "assemble", work)
    span.set_attribute("prompt_tokens", len(prompt.token_ids))
    return prompt


def _is_short(model: ServedModel, request: PromptRequest) -> bool:
    """Some 0.2 ms of work, as far as is known: what else templates get may make them do more than
    its length tells (the question again for each passage), and one that took long once does so
    again."""
    chat, template = request.chat, model.template
    if chat.tools or chat.passages or chat.template_options:
        return False
    if template is not None and not template.is_quick:
        return False
    return bool(request.ByteSize() <= _SHORT_BYTES)


async def _resume(
    pipeline: Pipeline, outputs: Sequence[Output], request: PromptRequest, span: Span
) -> None:
    def work() -> None:
        for output in outputs:
            output.resume(request.resume)

    tenant = request.caller.tenant
    try:
        await threaded(pipeline, tenant, span, "resume", work)
    except CannotResumeError as why:
        raise unavailable(
            f"the answer cannot be gone on with after the loss of a tokenizer: {why}",
            stage="tokenizer",
            reason="cannot_resume",
        ) from None


def _context_decision(prompt: Prompt) -> Decision:
    plan = prompt.plan
    figures = {field.name: getattr(plan, field.name) for field in plan.DESCRIPTOR.fields}
    return decision("tokenizer", "context", "cut" if prompt.was_cut else "whole", figures)


def _outputs(
    model: ServedModel,
    request: PromptRequest,
    prompt: Prompt,
    policy: Policy,
    given: Sequence[tuple[str, str]],
    keeps: bool,
) -> list[Output]:
    """One for each choice; the first brings the prompt back where that is wanted. `given`: titles
    and texts of the passages, before the policy looked at them; `keeps`: what they tell is wanted
    afterwards."""
    texts = model.token_texts if request.sampling.HasField("logprobs") else None
    detokenizer = model.with_calls if offered(request.chat) else model.detokenizer
    is_json = request.sampling.constraint.WhichOneof("kind") in ("json_object", "json_schema")
    first = TextDelta(policy=policy.digest, hold=policy.rules.delivery == "hold")
    for index, (passage, before) in enumerate(zip(request.chat.passages, given, strict=True)):
        if _words(passage) != before:
            first.redacted.add(index=index, title=passage.title, text=passage.text)
    echo = None
    if request.echo:
        echo = request.text or model.decode(prompt.token_ids.tolist())
    outputs = []
    for choice in range(max(1, request.choices)):
        shape = shape_of(request, model, prompt)
        allowed = AnswerPolicy.of(
            policy, shaped=shape is not None, json=is_json, logprobs=texts is not None
        )
        outputs.append(
            Output(
                detokenizer(),
                request.stop,
                prompt,
                shape,
                choice,
                request.sampling.min_tokens,
                texts,
                None if choice else echo,
                allowed,
                first,
                keeps,
            )
        )
    return outputs


def _words(passage: Passage) -> tuple[str, str]:
    return passage.title, passage.text


def _generate_requests(
    request: PromptRequest, model: ServedModel, prompt: Prompt, choices: int
) -> list[bytes]:
    """Serialized: one for each choice."""
    generate = GenerateRequest(
        caller=request.caller,
        model=model.routed_as,
        checkpoint=prompt.checkpoint,
        prompt_token_ids=pack(prompt.token_ids),
        sampling=request.sampling,
    )
    generate.sampling.max_tokens = prompt.max_tokens
    fill(generate.sampling, model.sampling)
    if (constraint := constraint_of(request, model, prompt)) is not None:
        generate.sampling.constraint.CopyFrom(constraint)
    for ids in bad_words(model.tokenizer, request.bad_words):
        generate.sampling.bad_words.add(ids=ids)
    asked = []
    for choice in range(choices):
        one = generate
        if choices > 1:
            one = GenerateRequest()
            one.CopyFrom(generate)
        one.choice = choice
        one.sampling.seed = seed_of(request.sampling.seed, choice)
        if request.echo and request.sampling.HasField("logprobs") and not choice:
            one.sampling.prompt_logprobs = request.sampling.logprobs
        asked.append(one.SerializeToString())
    return asked


def _unfinished(end: End) -> PenstockError:
    if end.status.code:
        return PenstockError.from_status(end.status)
    return PenstockError(
        grpc.StatusCode.INTERNAL, "the output ended without a reason", stage="router"
    )
