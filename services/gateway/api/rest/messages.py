"""POST /v1/messages, Anthropic's, streamed or whole."""

import json
from typing import Literal

from pydantic import Field

from protos.tokenizer_pb2 import TextDelta
from services.common.config import Settings
from services.common.errors import PenstockError
from services.gateway.api.anthropic_schema import MessagesRequest
from services.gateway.api.as_chat import Chat
from services.gateway.api.rest.anthropic_format import (
    Content,
    Event,
    error_body,
    message,
    opening,
    stop_reason,
    usage,
)
from services.gateway.api.rest.front import HttpFront
from services.gateway.api.rest.http import Exchange
from services.gateway.api.schema import Body, parse, read_aside, validated
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway
from services.gateway.runs.pipeline import serve
from services.gateway.runs.prompt import Answer, Prompt


class MessagesQuery(Body):
    beta: Literal["true", "false"] | None = Field(
        None, description="what Anthropic's client says; no effect"
    )


_PING: Event = {"type": "ping"}


def authorization(exchange: Exchange) -> str | None:
    """Also as Anthropic's clients send it."""
    key = exchange.headers.get("x-api-key")
    return exchange.authorization or (f"Bearer {key}" if key else None)


def check_query(exchange: Exchange) -> None:
    """Raises INVALID_ARGUMENT."""
    if exchange.query:
        validated(MessagesQuery, dict(exchange.query))


class MessagesFront(HttpFront):
    """front.Front."""

    def __init__(self, exchange: Exchange, settings: Settings) -> None:
        super().__init__(exchange, settings)
        self.authorization = authorization(exchange)
        self.shown = False
        self._chat: Chat | None = None
        self._content = Content()
        self._opened = False

    async def _understand(self, body: bytes, principal: Principal, place: Place) -> list[Prompt]:
        return [await read_aside(len(body), lambda: self._prompt(body))]

    def _prompt(self, body: bytes) -> Prompt:
        limits = self._settings.gateway
        request = parse(MessagesRequest, body, limits)
        self.stream = bool(request.stream)
        self._chat = request.chat(limits)
        prompt = self._chat.request.prompt(self._settings.retrieval.top_k)
        prompt.request.chat.whole = True  # as there: what does not fit is refused
        return prompt

    async def _keep_alive(self) -> None:
        async with self._writing:
            await self._begin()
            await self._exchange.write(_sse([_PING]))

    def _told_of(self, answer: Answer, deltas: list[TextDelta]) -> bytes:
        self.shown = True
        events = [event for delta in deltas for event in self._content.push(answer, delta)]
        events = [*self._opening(answer), *events] if self.stream else []
        if events:
            self._keeping.spoke()
        return _sse(events)

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        self.close()
        (answer,) = answers
        events = [*self._opening(answer), *self._content.close()]
        whole = message(answer, self._content, cost)
        if not self.stream:
            return await self._exchange.reply_json(whole)
        reason, stop = stop_reason(answer)
        ended = {"stop_reason": reason, "stop_sequence": stop}
        last = {"usage": usage(answer), "penstock": whole["penstock"]}
        events += [{"type": "message_delta", "delta": ended, **last}, {"type": "message_stop"}]
        async with self._writing:
            await self._begin()
            await self._exchange.end_events(_sse(events))

    async def failed(self, error: PenstockError) -> None:
        """In a stream that has begun its last event; else raises it, in the request's terms."""
        self.close()
        if self._chat is not None:
            self._chat.rename(error)
        if not self._exchange.status or self._exchange.complete:
            raise error
        async with self._writing:
            await self._exchange.end_events(_sse([error_body(error)]))

    def _opening(self, answer: Answer) -> list[Event]:
        if self._opened:
            return []
        self._opened = True
        return [{"type": "message_start", "message": opening(answer)}]


def _sse(events: list[Event]) -> bytes:
    return "".join(
        f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events
    ).encode()


async def create_message(gateway: Gateway, exchange: Exchange) -> None:
    check_query(exchange)
    front = MessagesFront(exchange, gateway.settings)
    try:
        await serve(gateway, front)
    except PenstockError as error:
        await front.failed(error)
    finally:
        front.close()
