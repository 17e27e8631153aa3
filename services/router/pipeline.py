"""A request's way through the router: admitted in order, placed by cost, carried to its end."""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError

from protos import common_pb2, router_pb2
from services.common.config import Settings
from services.common.errors import PenstockError, invalid, unavailable
from services.common.link import LinkCall
from services.common.packed_ids import count, pack
from services.common.served_models import ServedModels
from services.common.telemetry.spans import Span
from services.common.telemetry.telemetry import Telemetry, remote_parent, traceparent
from services.router import metrics
from services.router.admission import LANE_NAMES, Admission, Ticket, not_served
from services.router.answer import Answer
from services.router.block_index import Reach
from services.router.chains import chains_of
from services.router.journal import Journal
from services.router.leg import DRAINING, Way, WorkerLostError
from services.router.legs import run
from services.router.placement import (
    EXPECTED_OUTPUT_TOKENS,
    Ask,
    Placement,
    Plan,
    SplitMode,
    place,
)
from services.router.quarantine import Case, Quarantine
from services.router.warming import Warming, warm
from services.router.workers import Worker, Workers

log = logging.getLogger(__name__)

_INTERNAL = PenstockError(
    grpc.StatusCode.INTERNAL,
    "the router failed on this request",
    stage="router",
    reason="internal",
)


@dataclass(frozen=True)
class Router:
    """The router's parts."""

    settings: Settings
    telemetry: Telemetry
    workers: Workers
    models: ServedModels
    admission: Admission
    quarantine: Quarantine
    warming: Warming = field(default_factory=Warming)


async def generate(router: Router, call: LinkCall, journal: Journal, span: Span) -> str:
    """Admits, places, runs; goes on elsewhere when a worker is lost. Its outcome, as it is counted.
    Raises PenstockError."""
    request, call.payload = parse(call.payload), b""  # which it holds no longer
    if request.warm:
        await _warm(router, request, call, journal, span)
        return "warmed"  # nobody's request
    router.warming.drop(request.model)
    answer = Answer(request, call)
    ticket = _ticket(answer)
    case = router.quarantine.case(request)
    split = router.settings.router.split
    lost: list[WorkerLostError] = []
    try:
        case.raise_if_refused()
        await _raise_unless_served(router, request.model)

        try:
            with router.telemetry.span("admit", span):
                await router.admission.admit(ticket)
        finally:
            journal.admission(ticket)

        while not answer.finished:
            recalled = ticket.recalled.done()  # it goes on from its tokens, like after a loss
            if recalled:
                with router.telemetry.span("admit again", span):
                    await router.admission.admit_again(ticket)
                journal.recall(ticket, answer)

            with router.telemetry.span("place", span):
                placement = await _place(router, answer, split, case)
            if lost and not recalled:
                journal.failover(placement.plan, lost, answer, case)
            journal.placement(placement, split)
            if not (lost or ticket.recalls or ticket.resumed):
                _count_prompt(placement.plan)
            journal.breakers(router.workers.ready(request.model, request.checkpoint))

            plan = placement.plan
            with router.telemetry.span("run", span, workers=plan.name) as running:
                way = Way(
                    call.deadline,
                    traceparent(running),
                    journal.below,
                    router.settings.router.stall_timeout_s,
                    ticket.recalled,
                )
                try:
                    with case.trial(plan.decode, answer) as way.alone_tokens:
                        await run(plan, answer, way)
                except WorkerLostError as loss:
                    lost.append(loss)
                    split = _after_loss(router, lost, split, case)
    finally:
        router.admission.leave(ticket)
        _account(span, answer)
    return "ok"


async def _warm(
    router: Router,
    request: router_pb2.GenerateRequest,
    call: LinkCall,
    journal: Journal,
    span: Span,
) -> None:
    """A prompt whose blocks alone are wanted, and only while nobody waits."""
    router.quarantine.case(request).raise_if_refused()
    await _raise_unless_served(router, request.model)
    nothing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    way = Way(
        call.deadline,
        traceparent(span),
        journal.below,
        router.settings.router.stall_timeout_s,
        nothing,
    )
    way.proves = False
    workers = router.workers.sound(request.model, request.checkpoint)
    if router.admission.waiting(request.model):
        workers = []  # they are somebody's in a moment
    warmed = await warm(router.warming, router.workers.index, request, workers, way)
    span.set_attributes({"warm": warmed.outcome, "cached_tokens": warmed.held})
    span.set_attribute("warmed_tokens", warmed.done - warmed.held)
    call.send(warmed.delta().SerializeToString())


async def serve(router: Router, call: LinkCall) -> None:
    """Runs one GenerateRequest to its end; the call carries its tokens, or the error."""
    journal = Journal()
    status: common_pb2.Status | None = None  # unknown: no way out may look like success
    outcome = "cancelled"
    try:
        with router.telemetry.span("router", remote_parent(call.traceparent)) as span:
            try:
                outcome = await generate(router, call, journal, span)
                status = common_pb2.Status()
            except PenstockError as error:
                outcome = error.code.name.lower()
                span.set_attribute("error", error.reason or outcome)
                error.stage = error.stage or "router"
                status = error.to_status()
            except Exception:
                outcome = _INTERNAL.reason
                span.set_attribute("error", outcome)
                log.exception("a request of %s failed in its router", call.peer)
    finally:  # a cancelled request tells its record too
        metrics.ended.labels(outcome).inc()
        if status is None:
            status = _INTERNAL.to_status()
        call.end(status, router.telemetry.record(span, journal.decisions, journal.below))


def parse(payload: bytes) -> router_pb2.GenerateRequest:
    """The request, whole and in range; raises INVALID_ARGUMENT."""
    try:
        request = router_pb2.GenerateRequest.FromString(payload)
        prompt_tokens = count(request.prompt_token_ids)
    except (DecodeError, ValueError):
        raise invalid("not a GenerateRequest", "", stage="router") from None
    caller = request.caller
    faults = {
        "caller.tenant": not caller.tenant or "\0" in caller.tenant,
        "caller.priority": caller.priority not in LANE_NAMES,
        "caller.weight": not 0 < caller.weight < float("inf"),
        "checkpoint": not request.checkpoint,
        "prompt_token_ids": not prompt_tokens,
        "generated_prefix": request.generated_prefix >= max(1, prompt_tokens),
        "sampling.max_tokens": not request.sampling.max_tokens,
        "pooling": request.HasField("pooling") and request.generated_prefix,
    }
    for param, wrong in faults.items():
        if wrong:
            raise invalid(f"{param} is missing or out of range", param, stage="router")
    return request


def _ticket(answer: Answer) -> Ticket:
    request = answer.request

    def progress() -> tuple[float, float]:
        # Of the output only what is expected: max_tokens may well be all that the window has left.
        return answer.used, min(answer.tokens_left, EXPECTED_OUTPUT_TOKENS)

    return Ticket(
        id=uuid.uuid4().hex,
        model=request.model,
        tenant=request.caller.tenant,
        lane=request.caller.priority,
        cost=0 if answer.before else sum(progress()),
        weight=request.caller.weight,
        progress=progress,
        resumed=answer.before > 0,
    )


async def _raise_unless_served(router: Router, model: str) -> None:
    """Raises NOT_FOUND for a model that nobody serves."""
    if model not in router.workers.models() and not await router.models.has(model):
        raise not_served(model)


async def _some_workers(router: Router, answer: Answer, case: Case) -> list[Worker]:
    """The workers of the request's checkpoint that are ready and sound, and where it may run for
    its case; waits for one while there is none, and in the end takes any that is ready.

    Raises UNAVAILABLE after the patience; at once where another checkpoint has taken the place of
    the request's, which no token was made with yet; NOT_FOUND as soon as nobody serves the model.
    """
    model, checkpoint = answer.request.model, answer.request.checkpoint
    until = time.monotonic() + router.settings.router.worker_patience_s
    while True:
        if not answer.begun and await router.workers.replaced(model, checkpoint):
            raise unavailable(
                f"the checkpoint {checkpoint} of {model!r} was replaced",
                stage="router",
                reason="checkpoint_replaced",
            )
        await _raise_unless_served(router, model)
        ready = router.workers.ready(model, checkpoint)
        left_s = until - time.monotonic()
        next_s = router.workers.next_try_s(model, checkpoint)
        sound = [w for w in router.workers.sound(model, checkpoint) if case.may_run_on(w)]
        if sound or (ready and left_s <= 0):
            return sound or ready
        if left_s <= 0:
            raise unavailable(
                f"no worker for {model!r} is available", stage="router", reason="no_worker"
            )
        await router.workers.changed(min(left_s, next_s))


async def _place(router: Router, answer: Answer, split: SplitMode, case: Case) -> Placement:
    """Where the rest of the answer is made at the least predicted cost.

    From the choice of workers on nothing is waited for, so the request is under way on its worker
    before another one's place is chosen.
    """
    request = answer.request
    token_ids = request.prompt_token_ids + pack(answer.tokens)
    ready = router.workers.ready(request.model, request.checkpoint)
    index, tenant = router.workers.index, request.caller.tenant
    chains = await chains_of(index, token_ids, tenant, request.checkpoint, ready)
    workers = await _some_workers(router, answer, case)
    case.raise_if_refused()
    matched: dict[int, int] = {}
    below: dict[int, Reach] = {}
    for chain in chains:
        matched.update(index.match(chain))
        below.update(index.match_below(chain))
    ask = Ask(
        prompt_tokens=answer.prompt_tokens + len(answer.tokens),
        max_tokens=answer.tokens_left,
        matched=matched,
        below=below,
        split=split,
        split_min_tokens=router.settings.router.split_min_tokens,
        prompt_alone=request.HasField("pooling"),
    )
    placement = place(ask, workers)
    metrics.placements.labels("split" if placement.plan.prefill else "unsplit").inc()
    return placement


def _after_loss(
    router: Router, lost: Sequence[WorkerLostError], split: SplitMode, case: Case
) -> SplitMode:
    """Whether the next placement may split. Raises when the request is not to go on: the last loss
    as it is after too many, or what the case has come to."""
    loss = lost[-1]
    metrics.failovers.labels(loss.cause).inc()
    case.lost(loss.cause)
    # It may be the request that they die of; a drain it cannot be, however many are replaced.
    losses = sum(one.cause != DRAINING for one in lost)
    if loss.cause != DRAINING and losses > router.settings.router.max_failovers:
        raise loss.error
    # After a failed hand-over either end may be at fault; a suspect risks one engine, not two.
    return "never" if loss.cause == "kv_transfer" or case.suspected else split


def _count_prompt(plan: Plan) -> None:
    metrics.prompt_tokens.inc(plan.cached_tokens + plan.uncached_tokens)
    metrics.hit_tokens.inc(plan.cached_tokens)


def _account(span: Span, answer: Answer) -> None:
    metrics.output_tokens.inc(len(answer.tokens))
    span.set_attribute("model", answer.request.model)
    span.set_attribute("checkpoint", answer.request.checkpoint)
    span.set_attribute("prompt_tokens", answer.usage().prompt_tokens)
    span.set_attribute("cached_tokens", answer.cached_tokens)
    span.set_attribute("output_tokens", len(answer.tokens))
    if answer.draft_tokens:
        span.set_attribute("draft_tokens", answer.draft_tokens)
        span.set_attribute("accepted_tokens", answer.accepted_tokens)
    if answer.first_token_s:
        span.set_attribute("ttft_ms", round(answer.ttft_s * 1000, 3))
