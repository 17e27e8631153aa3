"""A response's turn in its conversation: its input and output, added whole and once."""

import json
from collections.abc import Collection, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from protos.runs_pb2 import StoredRun
from services.common.errors import PenstockError
from services.gateway.api.resources.conversations import as_kept
from services.gateway.api.responses_items import Item
from services.gateway.api.rest.responses_format import Items, status_of
from services.gateway.api.rest.stored_responses import ROUTE, input_id
from services.gateway.api.schema import read_aside, validated
from services.gateway.parts import Gateway
from services.gateway.runs.lasting.run import Ending
from services.gateway.runs.lasting.stored import answer_of

NOT_JOINED = "input and output could not be added to the conversation"


async def add_turn(
    gateway: Gateway,
    tenant: str,
    conversation: str,
    request_id: str,
    said: Sequence[Item],
    output: Sequence[dict[str, Any]],
    models: Collection[str],
) -> list[str]:
    """Returns what is to be said where it could not be added. Raises one of `RedisAway`."""
    items = [
        as_kept(item, input_id(item.type, request_id, index)) for index, item in enumerate(said)
    ]
    items += [dict(item) for item in output]
    try:
        await gateway.conversations.add(tenant, conversation, items, models, turn=request_id)
    except PenstockError as error:  # it was deleted meanwhile, or has no room
        return [f"{NOT_JOINED}: {error.message}"]
    return []


async def turn_of(gateway: Gateway, stored: StoredRun) -> Ending | None:
    """What ends a run that is a turn in a conversation. It keeps nothing of what is stored."""
    if stored.route != ROUTE or (await _told(stored))["response"].get("conversation") is None:
        return None
    return partial(_end, gateway, stored.caller.tenant, stored.request_id)


async def _told(stored: StoredRun) -> dict[str, Any]:
    text = stored.told
    told: dict[str, Any] = await read_aside(len(text), lambda: json.loads(text))
    return told


async def _end(gateway: Gateway, tenant: str, id: str) -> list[str]:
    """By what was written of it: whoever ends it, its items are the same."""
    place, answer = (tenant, id), None
    if (stored := await gateway.runs.store.find(place)) is None:  # it was deleted
        return []
    told = await _told(stored)
    items = Items(id, results=told.get("results", False))
    async with aclosing(gateway.runs.store.written(place)) as events:
        async for event in events:
            if event.HasField("begun"):
                answer = answer_of(id, event.begun)
            elif event.HasField("delta") and answer is not None:
                answer.add([event.delta.delta])
                items.push(answer, event.delta.delta)
    if answer is None:  # likewise
        return []
    items.close(answer, status_of(answer))
    said = [validated(Item, item) for item in told["input"]]
    models = {stored.model, answer.model}  # asked, and has answered
    conversation = told["response"]["conversation"]["id"]
    return await add_turn(gateway, tenant, conversation, id, said, items.output, models)
