"""A generation's way through the gateway, the same for REST and gRPC."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import grpc
from opentelemetry import trace

from protos.common_pb2 import Caller, Passage
from protos.retrieval_pb2 import SearchRequest
from protos.tokenizer_pb2 import TextDelta
from services.common.config import Settings
from services.common.errors import PenstockError
from services.common.fair_threads import FairThreads
from services.common.metrics import BoundedNames
from services.common.peers import Peers
from services.common.policy import PolicyFile
from services.common.telemetry import Telemetry, traceparent
from services.gateway import metrics
from services.gateway.api.rest.http import internal
from services.gateway.identity.auth import Authenticator
from services.gateway.identity.identity import Identity
from services.gateway.identity.permissions import admit
from services.gateway.identity.principal import Permission, Principal
from services.gateway.intake import Intake, Place
from services.gateway.metering.estimate import expected
from services.gateway.metering.meter import Meter, status_of
from services.gateway.metering.prices import Cost
from services.gateway.models import ModelCatalog
from services.gateway.runs.delivery import Delivery, Mode, joined
from services.gateway.runs.judgement import Judgement
from services.gateway.runs.prompt import Answer, Prompt, total_usage
from services.gateway.runs.records import Journal, Records, client_context
from services.gateway.runs.text_stream import TextStream
from services.gateway.stores.files import Files
from services.gateway.stores.retrieval_client import RetrievalClient, is_outage
from services.gateway.stores.vector_stores import VectorStores

log = logging.getLogger(__name__)

_LAST_WORD_S = 1.0  # after the deadline, for the downstream's own account of it


@dataclass
class Gateway:
    """The gateway's parts."""

    settings: Settings
    telemetry: Telemetry
    auth: Authenticator
    identity: Identity
    meter: Meter
    tokenizers: Peers
    models: ModelCatalog
    retrieval: RetrievalClient
    policy: PolicyFile
    files: Files
    stores: VectorStores
    records: Records
    intake: Intake
    threads: FairThreads  # for what may take seconds
    tenants_told: BoundedNames  # in metrics


class Asked(Protocol):
    """Where a request comes from."""

    @property
    def request_id(self) -> str: ...
    @property
    def route(self) -> str: ...
    @property
    def endpoint(self) -> str:
        """As permissions.py has it."""

    @property
    def authorization(self) -> str | None: ...
    @property
    def traceparent(self) -> str | None: ...


class Front(Asked, Protocol):
    """A generation as its protocol has it: where it comes from, and where its answer goes."""

    async def read(self, place: Place) -> list[Prompt]:
        """Takes the request in, at its tenant's `place`, and validates it: one prompt, or several
        of a completion. Raises INVALID_ARGUMENT, or RESOURCE_EXHAUSTED for what has no room.
        """

    def admitted(self, headers: Mapping[str, str]) -> None:
        """Takes what the caller is to hear of its limits, with the beginning of the answer."""

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        """Passes deltas on, which `answer` holds already; waits for a client that is slow. The
        answers of several prompts call this at the same time.
        """

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        """Ends complete answers, in the order of their prompts. `cost`: of all of them; None: the
        model has no price."""

    @property
    def shown(self) -> bool:
        """Whether any of the answer has left."""


async def generate(
    gateway: Gateway, front: Front, principal: Principal, place: Place, journal: Journal
) -> None:
    """Validation and passages on the way in; text, usage and sources on the way out."""
    span = gateway.telemetry.span
    deadline = time.monotonic() + gateway.settings.gateway.request_timeout_s
    caller = principal.caller(front.request_id)

    with span("validate"):
        prompts = await front.read(place)
        model = journal.model = prompts[0].request.model
        journal.tags = prompts[0].tags
        principal.authorize(model)
        window = (await gateway.models.find(model)).window
        if any(prompt.stores for prompt in prompts):
            principal.require(Permission.STORES_READ)
        journal.served = model
        unready = [await gateway.stores.require(principal.tenant, p.stores) for p in prompts]

    with span("limits"):
        most = expected(prompts, window, gateway.meter.open_output_tokens)
        metered = journal.metered = await gateway.meter.admit(
            principal, front.request_id, front.route, model, most
        )
        front.admitted(metered.headers)

    of_prompts: list[list[Answer]] = []
    for prompt, files in zip(prompts, unready, strict=True):
        warnings = [warning] if (warning := files.warning()) else []
        if prompt.stores:
            await _retrieve(gateway, caller, prompt, warnings, journal)
        prompt.request.caller.CopyFrom(caller)
        count = max(1, prompt.request.choices)
        of_prompts.append(
            [
                Answer(
                    front.request_id,
                    model,
                    list(prompt.request.chat.passages),
                    index=len(of_prompts) * count + choice,
                    choice=choice,
                    warnings=warnings,
                    wants_logprobs=prompt.request.sampling.HasField("logprobs"),
                )
                for choice in range(count)
            ]
        )
    answers = [answer for of_one in of_prompts for answer in of_one]
    metered.usage, metered.shown = lambda: total_usage(answers), lambda: front.shown

    with span("generate") as generating:
        judgement = Judgement(gateway.policy.current, prompts, journal)
        judgement.begin(gateway.retrieval, caller, generating)
        way = _Way(deadline, traceparent(generating), journal, judgement)
        try:
            await _all_at_once(
                _answer(gateway, front, way, prompt, of_one)
                for prompt, of_one in zip(prompts, of_prompts, strict=True)
            )
        finally:
            judgement.cancel()
        if gateway.settings.log_prompts:
            generating.set_attribute("prompt", "\n".join(prompt.text for prompt in prompts))
            generating.set_attribute("answer", "\n".join(answer.text for answer in answers))
        journal.usage = total_usage(answers)
        await gateway.meter.settle(metered)
        await front.finish(answers, metered.cost)


class _Way(NamedTuple):
    """What the answers of one request share."""

    deadline: float  # monotonic seconds
    traceparent: str
    journal: Journal
    judgement: Judgement


async def _answer(
    gateway: Gateway, front: Front, way: _Way, prompt: Prompt, answers: list[Answer]
) -> None:
    """One prompt's answers, from a tokenizer to the front."""
    if (routed := await way.judgement.route()) is not None:
        prompt.request.model = routed
        for answer in answers:
            answer.model = routed
    stream = TextStream(
        gateway.tokenizers,
        prompt.request,
        patience_s=gateway.settings.gateway.tokenizer_patience_s,
        deadline=way.deadline,
        traceparent=way.traceparent,
    )
    own = gateway.settings.gateway
    wanted = cast(Mode, prompt.delivery) or own.delivery
    delivery = Delivery(wanted, own.hybrid_s, lambda: gateway.intake.running / own.max_requests)
    try:
        async with aclosing(stream.batches()) as batches:
            async for deltas in batches:
                await way.judgement.settled()
                for answer in answers:
                    its = deltas
                    if len(answers) > 1:
                        its = [delta for delta in deltas if delta.choice == answer.choice]
                    if its:
                        _measure(way.journal, answer, its)
                        answer.echo = answers[0].echo
                        if ready := delivery.ready(its):
                            await front.write(answer, joined(ready))
                await delivery.pause(stream)
    finally:
        stream.cancel()
        way.journal.below.MergeFrom(stream.record)
    if len(stream.attempts) > 1:
        lost = ", ".join(stream.attempts[:-1])
        way.journal.decide("tokenizer", stream.attempts[-1], lost=lost)
    if stream.finished:
        for answer in answers:
            if rest := delivery.rest(answer):
                await front.write(answer, list(rest))
            if (rate := answer.tokens_per_s) is not None:
                metrics.rate.labels(way.journal.served).observe(rate)
        return
    if stream.end.status.code:
        error = PenstockError.from_status(stream.end.status)
        if error.param in ("constraint", "grammar"):
            error.param = prompt.form or "tools"
        if prompt.param and error.param.startswith("prompt"):
            error.param = prompt.param + error.param.removeprefix("prompt")
        raise error
    raise PenstockError(grpc.StatusCode.INTERNAL, "the answer broke off", stage="tokenizer")


async def _all_at_once(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Returns when all are done; the first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _retrieve(
    gateway: Gateway, caller: Caller, prompt: Prompt, warnings: list[str], journal: Journal
) -> None:
    """Adds passages to the prompt, or says in the warnings why there are none."""
    found: list[Passage] = []
    with gateway.telemetry.span("retrieve", stores=len(prompt.stores)) as searching:
        request = SearchRequest(
            caller=caller,
            collections=prompt.stores,
            query=prompt.question,
            limit=prompt.max_passages,
        )
        try:
            found.extend(
                (
                    await gateway.retrieval.search_for_chat(request, searching, journal.below)
                ).passages
            )
        except PenstockError as error:
            if not is_outage(error):
                raise
            cause = error.reason or error.code.name.lower()
            metrics.retrieval_skipped.labels(error.code.name.lower()).inc()
            journal.decide("retrieval", "skipped", cause=cause, message=error.message)
            warnings.append(f"answered without the vector stores: {error.message}")
            return
        searching.set_attribute("passages", len(found))
    best = found[0].score if found else 0.0
    journal.decide("retrieval", "searched", passages=len(found), best_score=best)
    prompt.request.chat.passages.extend(found)


def _measure(journal: Journal, answer: Answer, deltas: list[TextDelta]) -> None:
    tokens, gap_s = answer.add(deltas)
    if journal.arrived(tokens):
        metrics.ttft.labels(journal.served).observe(journal.first_text_s)
    if tokens and gap_s:
        metrics.itl.labels(journal.served).observe(gap_s / tokens)


async def serve(gateway: Gateway, front: Front) -> None:
    """`generate`, recorded."""

    async def work(principal: Principal, place: Place, journal: Journal) -> None:
        await generate(gateway, front, principal, place, journal)

    await recorded(gateway, front, work)


async def recorded(
    gateway: Gateway, asked: Asked, work: Callable[[Principal, Place, Journal], Awaitable[None]]
) -> None:
    """Who asks, and whether there is a place; then runs `work` within its bounds and keeps its
    record, however it ends. Of a stranger's or a refused request nothing is kept.

    Raises PenstockError; and CancelledError when the client has gone, after cancelling downstream.
    """
    journal = Journal(asked.request_id, asked.route)
    root = place = None
    span = gateway.telemetry.span
    told = {"route": asked.route, "request_id": asked.request_id}
    try:
        with span("request", client_context(asked.traceparent), **told) as root:
            with span("authenticate"):
                principal = await gateway.auth.identify(asked.authorization)
                admit(principal, asked.endpoint)
                journal.tenant = principal.tenant
            with gateway.intake.slot(principal.tenant) as place:
                async with asyncio.timeout(
                    gateway.settings.gateway.request_timeout_s + _LAST_WORD_S
                ):
                    await work(principal, place, journal)
    except PenstockError as error:
        journal.fail(error)
        raise
    except TimeoutError:
        late = PenstockError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "the request did not end in time",
            stage="gateway",
            reason="deadline",
        )
        journal.fail(late)
        raise late from None
    except asyncio.CancelledError:
        gone = "the client went away"
        journal.fail(
            PenstockError(grpc.StatusCode.CANCELLED, gone, stage="client", reason="cancelled")
        )
        raise
    except Exception:
        journal.fail(internal())
        raise
    finally:
        if (metered := journal.metered) is not None:
            gateway.meter.end(metered, journal.error)
            journal.metered, journal.cost = None, metered.cost
        if root is not None:
            journal.close(gateway.telemetry.record(root, journal.decisions, journal.below))
            if place is not None:
                gateway.records.keep(journal)
                with trace.use_span(root):  # which has ended: for the line in the log
                    _account(gateway, journal)


def _account(gateway: Gateway, journal: Journal) -> None:
    model = journal.served or metrics.UNKNOWN
    metrics.generations.labels(model, status_of(journal.error)).inc()
    spent = {"completion": journal.tokens}  # what has come, of an answer that is not whole
    if (used := journal.usage) is not None:
        spent = {
            "prompt": used.prompt_tokens,
            "cached": used.cached_tokens,
            "completion": used.completion_tokens,
        }
    tenant = gateway.tenants_told.of(journal.tenant)
    for kind, count in spent.items():
        metrics.tokens.labels(model, kind).inc(count)
        metrics.tenant_tokens.labels(tenant, kind).inc(count)
    log.info(
        "%s %s: %s in %.0f ms, %d tokens",
        journal.request_id,
        journal.route,
        (journal.error.reason or journal.error.code.name.lower()) if journal.error else "ok",
        journal.duration_s * 1000,
        journal.tokens,
    )
