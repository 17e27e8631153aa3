"""Chats whose answers are stored, as OpenAI has them: those that asked for it (`store`) are listed
and described; what was asked for with an Idempotency-Key is told again as well."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

import grpc
import orjson
from pydantic import Field

from protos.runs_pb2 import StoredRun
from services.common.errors import PenstockError
from services.gateway.api.generation_schema import Name
from services.gateway.api.resources.pages import Item, PageQuery, page, page_json, page_of
from services.gateway.api.rest.generation import RestFront
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.lasting import LAST, Resume, resume_query
from services.gateway.api.rest.queries import page_query
from services.gateway.api.rest.whole import completion
from services.gateway.api.schema import Body, Metadata, parse_body, read_aside, validated
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST, not_found
from services.gateway.parts import Gateway
from services.gateway.runs.lasting.following import follow
from services.gateway.runs.lasting.stored import answer_of, cost_of
from services.gateway.runs.prompt import Answer

_ROUTE = "/v1/chat/completions"
_PREFIX = "chatcmpl-"
_BY_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)
_SENT = ("name", "tool_calls", "tool_call_id")  # of a message, beside who says what


class ChatList(PageQuery):
    """`model`: as it was asked for."""

    order: Literal["asc", "desc"] = "asc"
    model: Name | None = None
    metadata: Metadata = Field({}, description="all of these are its own")


class SentList(PageQuery):
    order: Literal["asc", "desc"] = "asc"


class UpdateChat(Body):
    metadata: Metadata | None


async def list_chats(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """Those that are whole, and whose models the caller may use."""
    query = page_query(_by_metadata(exchange.query), ChatList)
    left = query.limit + 1  # the last of which says that there are more

    async def look(ids: Sequence[str]) -> list[Item]:
        nonlocal left
        runs = [_run_of(id) for id in ids]
        found: list[Item] = []
        listed = await gateway.runs.listed(principal.tenant, runs)
        for run, (text, size) in zip(runs, listed, strict=True):
            about = orjson.loads(text) if text is not None and left else None
            if about is not None and _fits(about, query) and principal.covers(about["model"]):
                exchange.place.hold(size)
                told = await _whole(gateway, principal, run, about)
                if told is not None:
                    found.append({"id": _id_of(run), "told": told})
                    left -= 1
        return found

    runs = await gateway.runs.ids(principal.tenant)
    listed = await page_of(map(_id_of, runs), query, look)
    await exchange.reply(page_json(listed), "application/json")


async def get_chat(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """As it was answered, or is being answered; with `stream` its events."""
    query = validated(Resume, resume_query(exchange))
    stored = await _found(gateway, exchange, principal)
    after, field = query.behind(exchange.headers)
    await _tell(
        gateway, exchange, principal, stored, stream=query.stream, after=after or 0, field=field
    )


async def update_chat(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """With this metadata in the place of what it had."""
    body = await parse_body(UpdateChat, await exchange.json_body())
    stored = await _listed(gateway, exchange, principal)

    def change(before: str) -> str:
        return orjson.dumps({**orjson.loads(before), "metadata": body.metadata or {}}).decode()

    if not await gateway.runs.describe(principal.tenant, stored.request_id, change):
        raise _unknown(exchange)
    await _tell(gateway, exchange, principal, stored)


async def delete_chat(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    stored = await _found(gateway, exchange, principal)
    await gateway.runs.drop(principal.tenant, stored.request_id)
    id = exchange.path["completion"]
    await exchange.reply_json({"object": "chat.completion.deleted", "id": id, "deleted": True})


async def list_messages(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    """Those that were sent."""
    query = page_query(exchange.query, SentList)
    stored = await _listed(gateway, exchange, principal)
    sent = (await _told(stored))["messages"]
    items = [_sent(exchange.path["completion"], index, one) for index, one in enumerate(sent)]
    order = {item["id"]: number for number, item in enumerate(items)}
    await exchange.reply_json(page(items, query, key=lambda item: order[item["id"]]))


# ---- finding and telling ------------------------------------------------------------------------


def _run_of(id: str) -> str:
    """What is no such id gives one that nobody has."""
    return REQUEST.prefix + id.removeprefix(_PREFIX) if id.startswith(_PREFIX) else ""


def _id_of(run: str) -> str:
    return _PREFIX + run.removeprefix(REQUEST.prefix)


async def _found(gateway: Gateway, exchange: Exchange, principal: Principal) -> StoredRun:
    """Raises NOT_FOUND; PERMISSION_DENIED to who may not use its model."""
    stored = await gateway.runs.find(
        principal, _run_of(exchange.path["completion"]), exchange.place.hold
    )
    if stored is None or stored.route != _ROUTE:
        raise _unknown(exchange)
    return stored


async def _listed(gateway: Gateway, exchange: Exchange, principal: Principal) -> StoredRun:
    """One of which lists tell. Raises as `_found`."""
    stored = await _found(gateway, exchange, principal)
    if await _about(gateway, principal, stored) is None:
        raise _unknown(exchange)
    return stored


def _unknown(exchange: Exchange) -> PenstockError:
    return not_found("chat completion", exchange.path["completion"])


async def _told(stored: StoredRun) -> Any:
    """How it was asked for."""
    text = stored.told
    return await read_aside(len(text), lambda: json.loads(text))


async def _about(gateway: Gateway, principal: Principal, stored: StoredRun) -> Any:
    (text,) = await gateway.runs.about(principal.tenant, [stored.request_id])
    return None if text is None else orjson.loads(text)


async def _tell(
    gateway: Gateway,
    exchange: Exchange,
    principal: Principal,
    stored: StoredRun,
    *,
    stream: bool = False,
    after: int = 0,
    field: str = LAST,
) -> None:
    front = RestFront(gateway, exchange, chat=True)
    about = await _about(gateway, principal, stored)
    metadata = None if about is None else about["metadata"]
    told = await _told(stored)
    front.tells_again(told, stream=stream, after=after, field=field, metadata=metadata)
    front.joins(stored.request_id)
    try:
        await exchange.body.skim()
        exchange.watch_client()
        await follow(gateway, principal, stored.request_id, front)
    finally:
        front.close()


async def _whole(
    gateway: Gateway, principal: Principal, run: str, about: Mapping[str, Any]
) -> bytes | None:
    """JSON of one that is, and that the caller may read."""
    answers: dict[int, Answer] = {}
    try:
        async with aclosing(gateway.runs.so_far(principal, run)) as events:
            async for event in events:
                if event.HasField("begun"):
                    answers[event.begun.index] = answer_of(run, event.begun)
                elif event.HasField("delta"):
                    answers[event.delta.index].add([event.delta.delta])
                elif event.HasField("finished"):
                    ordered = [answers[index] for index in sorted(answers)]
                    told = await completion(ordered, cost_of(event.finished), chat=True)
                    return orjson.dumps({**told, "metadata": about["metadata"]})
    except PenstockError as error:
        if error.code is not grpc.StatusCode.PERMISSION_DENIED:
            raise
    return None


# ---- what lists are asked for, and tell ---------------------------------------------------------


def _by_metadata(query: Mapping[str, str]) -> dict[str, Any]:
    """With `metadata[name]=value` as an object."""
    fields: dict[str, Any] = {}
    for name, value in query.items():
        if named := _BY_METADATA.fullmatch(name):
            fields.setdefault("metadata", {})[named[1]] = value
    return {**{name: v for name, v in query.items() if not _BY_METADATA.fullmatch(name)}, **fields}


def _fits(about: Mapping[str, Any], query: ChatList) -> bool:
    if query.model is not None and about["model"] != query.model:
        return False
    return all(about["metadata"].get(name) == value for name, value in query.metadata.items())


def _sent(completion: str, index: int, message: Mapping[str, Any]) -> Item:
    """As OpenAI tells it: a text, or parts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    return {
        "id": f"{completion}-{index}",
        "role": message["role"],
        "content": None if parts is not None else content,
        "content_parts": parts,
        "refusal": None,
        **{name: message[name] for name in _SENT if message.get(name) is not None},
    }
