"""Responses that are stored: told of again, gone on with."""

import json
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson

from protos.runs_pb2 import StoredRun
from services.common.errors import PenstockError, invalid
from services.common.redis import RedisAway
from services.gateway.api.responses_items import PREFIXES, Item
from services.gateway.api.responses_schema import ResponseInput
from services.gateway.api.rest.responses_format import (
    PREFIX,
    Items,
    item_id,
    response,
    status_of,
)
from services.gateway.api.schema import parsed_bytes, read_aside, validated
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST, not_found
from services.gateway.intake import Holding, Place
from services.gateway.parts import Gateway
from services.gateway.runs.lasting.failures import away
from services.gateway.runs.lasting.stored import answer_of, cost_of, error_of
from services.gateway.runs.prompt import Answer

ROUTE = "/v1/responses"


def run_of(id: str) -> str:
    """A run's id, of a response's; what is none gives an id that nobody has."""
    return REQUEST.prefix + id.removeprefix(PREFIX) if id.startswith(PREFIX) else ""


async def stored_response(
    gateway: Gateway, principal: Principal, id: str, hold: Holding
) -> tuple[StoredRun, Any]:
    """The run, and what its request told. Raises NOT_FOUND; PERMISSION_DENIED to who may not use
    its model; what `hold` does of all that is kept of it."""
    stored = await gateway.runs.find(principal, run_of(id), hold)
    if stored is not None and stored.route == ROUTE:
        text = stored.told
        told = await read_aside(len(text), lambda: json.loads(text))
        if told["response"]["store"]:
            return stored, told
    raise not_found("response", id)


async def snapshot(
    gateway: Gateway, principal: Principal, stored: StoredRun, told: dict[str, Any]
) -> dict[str, Any]:
    """A response as far as it is."""
    status, cost, error = "queued", None, None
    answer: Answer | None = None
    items = Items(stored.request_id, results=told.get("results", False))
    async with aclosing(gateway.runs.so_far(principal, stored.request_id)) as events:
        async for event in events:
            if event.HasField("begun"):
                answer, status = answer_of(stored.request_id, event.begun), "in_progress"
            elif event.HasField("delta") and answer is not None:
                answer.add([event.delta.delta])
                items.push(answer, event.delta.delta)
            elif event.HasField("finished") and answer is not None:
                status, cost = status_of(answer), cost_of(event.finished)
                answer.warnings.extend(event.finished.warnings)
                items.close(answer, status)
            elif event.HasField("failed"):
                error = error_of(event.failed)
                status = "cancelled" if error.reason == "cancelled" else "failed"
                if answer is not None:
                    items.close(answer, "incomplete")
    items.show()
    return response(
        stored.request_id, told["response"], status, items, answer, cost=cost, error=error
    )


def input_items(stored: StoredRun, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Of this response's own request, first to last."""
    return [
        {"id": input_id(item["type"], stored.request_id, index), **item}
        for index, item in enumerate(told["input"])
    ]


def input_id(kind: str, request_id: str, index: int) -> str:
    return item_id(PREFIXES[kind] + "_in", request_id, index)


async def said_before(
    gateway: Gateway,
    principal: Principal,
    place: Place,
    request: ResponseInput,
    key: str = "",
) -> tuple[Sequence[Item], int]:
    """What the request goes on with, and its bytes: no more than a body may have. `place` holds
    them, and what their values take. Of a retry under an idempotency `key`: what was there before
    its own turn. Raises INVALID_ARGUMENT, RESOURCE_EXHAUSTED for what has no room, or
    PERMISSION_DENIED to who may not use a model that said some of it."""
    if request.conversation is None:
        return await _followed(gateway, principal, place, request.previous_response_id)
    id, most = request.conversation.id, gateway.settings.gateway.body_limit_bytes
    turn = await gateway.runs.named(principal, key) if key else ""
    try:
        await gateway.conversations.authorize(principal, id, "conversation")
        stored = await gateway.conversations.items(
            principal.tenant, id, place.hold, "conversation", turn
        )
    except RedisAway:
        raise away() from None
    size = sum(map(len, stored))
    if size > most:
        why = f"it has more than {most} bytes: delete items of it, or begin another"
        raise invalid(
            f"Invalid 'conversation': {why}.",
            "conversation",
            reason="body_too_large",
            stage="gateway",
        )
    place.hold(sum(map(parsed_bytes, stored)))
    return await read_aside(size, lambda: _items([orjson.loads(one) for one in stored])), size


async def _followed(
    gateway: Gateway, principal: Principal, place: Place, previous: str | None
) -> tuple[Sequence[Item], int]:
    """All items of the responses that this one follows, first to last, and their bytes: they are
    together no more than a body may have. `place` holds what is read. Raises INVALID_ARGUMENT, or
    RESOURCE_EXHAUSTED for what has no room."""
    own, parts, count, size = gateway.settings.gateway, list[list[Item]](), 0, 0
    while previous is not None and count <= own.max_messages:
        try:
            stored, told = await stored_response(gateway, principal, previous, place.hold)
        except PenstockError as error:
            if error.reason != "not_found":
                raise
            raise _refused(previous, "previous_response_not_found", "not found") from None
        if told["response"].get("conversation") is not None:
            why = "is of a conversation, which 'conversation' goes on with"
            raise _refused(previous, "invalid_value", why)
        whole = await snapshot(gateway, principal, stored, told)
        if whole["status"] not in ("completed", "incomplete"):
            raise _refused(previous, "invalid_value", f"is {whole['status']}")
        said = (*told["input"], *whole["output"])
        its_size = len(stored.told.encode()) + len(orjson.dumps(whole["output"]))
        size += its_size
        if size > own.body_limit_bytes:
            why = f"and those before it are more than {own.body_limit_bytes} bytes"
            raise _refused(previous, "body_too_large", why)
        place.hold(parsed_bytes(stored.told.encode()))
        parts.append(await read_aside(its_size, partial(_items, said)))
        count += len(said)
        previous = told["response"]["previous_response_id"]
    return [item for part in reversed(parts) for item in part], size


def _items(said: Sequence[Any]) -> list[Item]:
    return [validated(Item, item) for item in said]


def _refused(id: str, reason: str, why: str) -> PenstockError:
    message = f"Previous response with id '{id[:100]}' {why}."
    return invalid(message, "previous_response_id", reason=reason, stage="gateway")
