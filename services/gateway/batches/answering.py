"""One line of a batch, answered as if its client had sent it: the same way through the gateway."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import orjson
from starlette.types import Message

from services.common.telemetry.telemetry import traceparent
from services.gateway.api.rest.generation import chat_completions, completions
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.moderations import create_moderation
from services.gateway.api.rest.pooled import embeddings
from services.gateway.api.rest.responses import create_response
from services.gateway.batches.record import BatchRecord
from services.gateway.batches.validation import Entry
from services.gateway.identity.permissions import admit
from services.gateway.identity.principal import Principal
from services.gateway.ids import BATCH, REQUEST
from services.gateway.parts import Gateway

ENDPOINTS: dict[str, Callable[[Gateway, Exchange], Awaitable[None]]] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
    "/v1/responses": create_response,
    "/v1/moderations": create_moderation,
}
_SEEDED = frozenset(ENDPOINTS) - {"/v1/embeddings", "/v1/moderations"}
_TIME_DIGITS = 14


class Reply(NamedTuple):
    """What its client would have got."""

    status: int
    request_id: str
    body: Any


async def answer(
    gateway: Gateway, batch: BatchRecord, entry: Entry, line: bytes, principal: Principal
) -> Reply:
    """Raises the PenstockError that a client would have been told of.

    What is computed again (its gateway was killed) has the same request id, by which it is charged
    once, and the same seed, by which it says the same.
    """
    body = orjson.loads(line)["body"]
    if batch.endpoint in _SEEDED and body.get("seed") is None:
        body["seed"] = int.from_bytes(_digest(batch, entry)[:7], "big")
    id = request_id(batch, entry)
    admit(principal, f"POST {batch.endpoint}")
    said = _Said()
    with gateway.telemetry.lone_span(
        "batch line", request_id=id, batch=batch.id, line=entry.line, custom_id=entry.custom_id
    ) as span:
        exchange = _exchange(gateway, batch.endpoint, orjson.dumps(body), said, traceparent(span))
        exchange.request_id, exchange.principal = id, principal
        try:
            await ENDPOINTS[batch.endpoint](gateway, exchange)
        finally:
            exchange.unwatch_client()
    return Reply(said.status, id, orjson.loads(b"".join(said.pieces)))


def request_id(batch: BatchRecord, entry: Entry) -> str:
    """Of one try: what failed is another request the next time, what was cut off is the same."""
    time = batch.id.removeprefix(BATCH.prefix)[:_TIME_DIGITS]
    digits = REQUEST.digits - _TIME_DIGITS
    return REQUEST.prefix + time + _digest(batch, entry, entry.tries + entry.waits).hex()[:digits]


def line_id(batch: BatchRecord, line: int) -> str:
    told = f"{batch.id} {line}".encode()
    return "batch_req_" + hashlib.blake2b(told, digest_size=12).hexdigest()


def _digest(batch: BatchRecord, entry: Entry, attempt: int = 0) -> bytes:
    return hashlib.blake2b(f"{batch.id} {entry.line} {attempt}".encode(), digest_size=16).digest()


class _Said:
    """An answer, as ASGI's `send` gets it."""

    def __init__(self) -> None:
        self.status = 0
        self.pieces: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.pieces.append(bytes(message.get("body", b"")))


def _exchange(gateway: Gateway, path: str, body: bytes, said: _Said, trace: str) -> Exchange:
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not pieces:
            await asyncio.Event().wait()  # nobody goes away
        return pieces.pop()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"traceparent", trace.encode()),
        ],
    }
    return Exchange(scope, receive, said, path, gateway.settings.gateway)
