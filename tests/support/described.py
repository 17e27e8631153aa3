"""Holds what a gateway answers to what the API's document says of it."""

import re
from functools import cache
from typing import Any

import httpx
from pydantic import TypeAdapter

from services.gateway.api.openapi.operation import Operation, Raw
from services.gateway.api.openapi.operations.table import OPERATIONS

_PATHS = [
    (endpoint.split()[0], re.compile(re.sub(r"{\w+}", "[^/]+", path)), operation)
    for endpoint, operation in OPERATIONS.items()
    for path in [re.sub(r"{\w+:path}", ".+", endpoint.split()[1])]
]


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def operation_of(method: str, path: str) -> Operation | None:
    found = (one for verb, form, one in _PATHS if verb == method and form.fullmatch(path))
    return next(found, None)


async def as_described(answer: httpx.Response) -> None:
    """An event hook of httpx. What is streamed stays as it is."""
    if answer.headers.get("content-type") == "application/json":
        await answer.aread()
        check(answer)


def check(answer: httpx.Response) -> None:
    """Of JSON, which was read. What has no path of ours says what it likes."""
    operation = operation_of(answer.request.method, answer.request.url.path)
    if operation is None:
        return
    usual = operation.error if answer.status_code >= 400 else operation.answer
    kind = operation.others.get(answer.status_code, usual)
    if not isinstance(kind, Raw):
        adapter(kind).validate_json(answer.content, extra="forbid")


def events_as_described(path: str, text: str) -> list[Any]:
    """Of a whole stream; those of OpenAI end with [DONE]."""
    operation = operation_of("POST", path)
    assert operation is not None
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:5] == "data:"]
    told = [line for line in lines if line != "[DONE]"]
    return [adapter(operation.events).validate_json(line, extra="forbid") for line in told]
