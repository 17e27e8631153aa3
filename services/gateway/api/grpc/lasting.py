"""Runs: answers of Chat and Complete that outlive their calls, told again, cancelled, deleted."""

from contextlib import aclosing
from typing import Any

from protos.gateway_pb2 import (
    CancelRunRequest,
    DeleteRunRequest,
    FollowRunRequest,
    GenerateEvent,
    GetRunRequest,
    PublicRun,
)
from protos.gateway_stores_pb2 import Deleted
from protos.runs_pb2 import StoredRun
from services.gateway.api.grpc.calls import (
    LASTING,
    Context,
    Handler,
    admitted,
    answered,
    streaming,
)
from services.gateway.api.grpc.events import Events, ending_of, event_of, tell_beginning, tell_end
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.api.grpc.kept import id_of
from services.gateway.api.grpc.looking import Look
from services.gateway.identity.principal import Principal
from services.gateway.ids import not_found
from services.gateway.intake import Intake, Place
from services.gateway.parts import Gateway
from services.gateway.runs.delivery import whole_of
from services.gateway.runs.lasting.following import follow
from services.gateway.runs.lasting.stored import answer_of, cost_of, error_of
from services.gateway.runs.prompt import Answer

_AFTER = "starting_after"


async def _found(gateway: Gateway, principal: Principal, request: Any, place: Place) -> StoredRun:
    """Raises NOT_FOUND; PERMISSION_DENIED to who may not use its model."""
    id = id_of(request, "run_id")
    stored = await gateway.runs.find(principal, id, place.hold)
    if stored is None or stored.route not in LASTING:
        raise not_found("run", id, "run_id")
    return stored


async def get_run(
    gateway: Gateway,
    context: object,
    id: str,
    principal: Principal,
    request: GetRunRequest,
    place: Place,
) -> PublicRun:
    return await _so_far(gateway, principal, await _found(gateway, principal, request, place))


async def cancel_run(
    gateway: Gateway,
    context: object,
    id: str,
    principal: Principal,
    request: CancelRunRequest,
    place: Place,
) -> PublicRun:
    stored = await _found(gateway, principal, request, place)
    await gateway.runs.cancel(principal.tenant, stored.request_id)
    return await _so_far(gateway, principal, stored)


async def delete_run(
    gateway: Gateway,
    context: object,
    id: str,
    principal: Principal,
    request: DeleteRunRequest,
    place: Place,
) -> Deleted:
    stored = await _found(gateway, principal, request, place)
    await gateway.runs.drop(principal.tenant, stored.request_id)
    return Deleted(id=stored.request_id, deleted=True)


async def _so_far(gateway: Gateway, principal: Principal, stored: StoredRun) -> PublicRun:
    run = PublicRun(
        id=stored.request_id, created_at=int(stored.created), model=stored.model, status="queued"
    )
    answers: dict[int, Answer] = {}
    cost = None
    async with aclosing(gateway.runs.so_far(principal, stored.request_id)) as events:
        async for event in events:
            if event.HasField("begun"):
                run.status = "in_progress"
                answers[event.begun.index] = answer_of(stored.request_id, event.begun)
            elif event.HasField("delta"):
                answers[event.delta.index].add([event.delta.delta])
            elif event.HasField("finished"):
                run.status, cost = "completed", cost_of(event.finished)
            elif event.HasField("failed"):
                error = error_of(event.failed)
                run.status = "cancelled" if error.reason == "cancelled" else "failed"
                run.error.stage, run.error.message = error.stage, error.message
                run.error.code = error.reason or error.code.name.lower()
    ordered = [answers[index] for index in sorted(answers)]
    for answer in ordered:
        choice = event_of(answer, [whole_of(answer)])
        if answer.finish:
            choice.MergeFrom(ending_of(answer))
        if not answer.choice:
            tell_beginning(choice, answer)
        run.choices.append(choice)
    if run.status == "completed":
        tell_end(run.choices[-1], ordered, cost)
    return run


def _follow_run(gateway: Gateway, inbox: Inbox) -> Handler:
    async def handler(_: object, context: Context) -> None:
        async def answer(id: str, metadata: dict[str, str]) -> None:
            async with admitted(gateway, metadata, "FollowRun", Intake.visit) as (who, place):
                request = inbox.parse(FollowRunRequest, await inbox.take(place, context))
                stored = await _found(gateway, who, request, place)
                own, after = gateway.settings.gateway, request.starting_after
                events = Events(context, own, numbered=True, after=after, field=_AFTER)
                await follow(gateway, who, stored.request_id, events)

        await answered("FollowRun", context, answer)

    return handler


LOOKING = {
    "GetRun": Look(GetRunRequest, get_run, PublicRun, Intake.visit),
    "CancelRun": Look(CancelRunRequest, cancel_run, PublicRun, Intake.slot),
    "DeleteRun": Look(DeleteRunRequest, delete_run, Deleted, Intake.slot),
}


def methods(gateway: Gateway, inbox: Inbox) -> dict[str, Any]:
    """The handlers of what has several replies, by route."""
    return {"FollowRun": streaming(_follow_run(gateway, inbox), GenerateEvent)}
