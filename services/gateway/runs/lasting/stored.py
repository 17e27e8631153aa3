"""A run as it is stored, and back: its request, who asked, and its events."""

import base64
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from protos.runs_pb2 import RunEvent, RunEvents, StoredCaller, StoredPrompt, StoredRun
from protos.tokenizer_pb2 import TextDelta
from services.common.errors import PenstockError
from services.gateway.identity.limits import Bound, Limit
from services.gateway.identity.principal import Permission, Principal
from services.gateway.metering.prices import Cost
from services.gateway.metering.refusals import LimitError
from services.gateway.runs.prompt import Answer, Prompt


def text_of(message: Message) -> str:
    """Redis' client reads texts."""
    return base64.b64encode(message.SerializeToString()).decode()


def run_of(text: str) -> StoredRun:
    return StoredRun.FromString(base64.b64decode(text))


def events_of(text: str) -> Sequence[RunEvent]:
    return RunEvents.FromString(base64.b64decode(text)).events


def stored_caller(principal: Principal) -> StoredCaller:
    return StoredCaller(
        tenant=principal.tenant,
        user=principal.user,
        priority=principal.priority,
        weight=principal.weight,
        all_models=principal.models is None,
        models=principal.models or (),
        permissions=principal.permissions,
        limits=[
            StoredCaller.Bound(owner=bound.owner, limit=bound.limit.model_dump_json())
            for bound in principal.limits
        ],
    )


def caller_of(stored: StoredCaller) -> Principal:
    return Principal(
        tenant=stored.tenant,
        user=stored.user,
        permissions=frozenset(map(Permission, stored.permissions)),
        models=None if stored.all_models else frozenset(stored.models),
        priority=stored.priority,  # type: ignore[arg-type]
        weight=stored.weight,
        limits=tuple(
            Bound(one.owner, Limit.model_validate_json(one.limit)) for one in stored.limits
        ),
    )


def stored_prompt(prompt: Prompt) -> StoredPrompt:
    return StoredPrompt(
        request=prompt.request,
        stores=prompt.stores,
        max_chunks=prompt.max_chunks,
        question=prompt.question,
        filter=prompt.filter,
        score_threshold=prompt.score_threshold,
        ranking=prompt.ranking,
        tags=prompt.tags,
        delivery=prompt.delivery,
        form=prompt.form,
        param=prompt.param,
    )


def prompt_of(stored: StoredPrompt) -> Prompt:
    return Prompt(
        stored.request,
        stores=tuple(stored.stores),
        max_chunks=stored.max_chunks,
        question=stored.question,
        filter=stored.filter if stored.HasField("filter") else None,
        score_threshold=stored.score_threshold,
        ranking=stored.ranking if stored.HasField("ranking") else None,
        tags=dict(stored.tags),
        delivery=stored.delivery,
        form=stored.form,
        param=stored.param,
    )


def begun(answer: Answer) -> RunEvent:
    told = RunEvent.Begun(
        index=answer.index,
        choice=answer.choice,
        model=answer.model,
        created=answer.created,
        passages=answer.passages,
        warnings=answer.warnings,
        wants_logprobs=answer.wants_logprobs,
        search=answer.search,
    )
    return RunEvent(begun=told)


def answer_of(request_id: str, told: RunEvent.Begun) -> Answer:
    return Answer(
        request_id,
        told.model,
        list(told.passages),
        index=told.index,
        choice=told.choice,
        warnings=list(told.warnings),
        created=told.created,
        wants_logprobs=told.wants_logprobs,
        search=told.search if told.HasField("search") else None,
    )


def without_tokens(delta: TextDelta) -> TextDelta:
    """The same, but for which tokens it stands for: they are counted alone."""
    count = len(delta.token_ids)
    del delta.token_ids[:]
    delta.token_ids.extend([0] * count)
    return delta


def finished(cost: Cost | None, warnings: Iterable[str] = ()) -> RunEvent:
    told = RunEvent.Finished(warnings=warnings)
    if cost is not None:
        told.priced, told.nanos, told.currency = True, cost.nanos, cost.currency
    return RunEvent(finished=told)


def cost_of(told: RunEvent.Finished) -> Cost | None:
    return Cost(told.nanos, told.currency) if told.priced else None


def failed(error: PenstockError) -> RunEvent:
    headers = error.headers if isinstance(error, LimitError) else {}
    return RunEvent(failed=RunEvent.Failed(status=error.to_status(), headers=headers))


def error_of(told: RunEvent.Failed) -> PenstockError:
    if not told.headers:
        return PenstockError.from_status(told.status)
    error = LimitError.from_status(told.status)
    error.headers = dict(told.headers)
    return error


def whole(answers: Iterable[Answer], deltas: Iterable[RunEvent], cost: Cost | None) -> RunEvents:
    """All events of a run that was not stored before its end."""
    return RunEvents(events=[*map(begun, answers), *deltas, finished(cost)])
