"""POST /v1/messages, Anthropic's, streamed or whole."""

import asyncio
import json
from collections.abc import Mapping

from protos.tokenizer_pb2 import TextDelta
from services.common.errors import PenstockError
from services.gateway.api.anthropic_schema import Chat, MessagesRequest
from services.gateway.api.rest.anthropic_format import (
    Content,
    Event,
    error_body,
    message,
    opening,
    stop_reason,
    usage,
)
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.keep_alive import KeepAlive
from services.gateway.api.schema import parse, read_aside
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway
from services.gateway.runs.pipeline import serve
from services.gateway.runs.prompt import Answer, Prompt

_PING: Event = {"type": "ping"}


class MessagesFront:
    """front.Front."""

    def __init__(self, gateway: Gateway, exchange: Exchange) -> None:
        self.request_id = exchange.request_id
        self.route = exchange.route
        self.endpoint = exchange.endpoint
        key = exchange.headers.get("x-api-key")  # as Anthropic's clients send it
        self.authorization = exchange.authorization or (f"Bearer {key}" if key else None)
        self.traceparent = exchange.headers.get("traceparent")
        self.shown = False
        self._gateway = gateway
        self._exchange = exchange
        self._chat: Chat | None = None
        self._stream = False
        self._content = Content()
        self._opened = False
        every_s = gateway.settings.gateway.sse_keep_alive_s
        self._keeping = KeepAlive(every_s, self._keep_alive)
        self._writing = asyncio.Lock()

    async def read(self, place: Place) -> list[Prompt]:
        self._exchange.place = place
        body = await self._exchange.json_body()
        prompt = await read_aside(len(body), lambda: self._understand(body))
        self._exchange.watch_client()
        return [prompt]

    def _understand(self, body: bytes) -> Prompt:
        limits = self._gateway.settings.gateway
        request = parse(MessagesRequest, body, limits)
        self._stream = bool(request.stream)
        self._chat = request.chat(limits)
        prompt = self._chat.request.prompt(self._gateway.settings.retrieval.top_k)
        prompt.request.chat.whole = True  # as there: what does not fit is refused
        return prompt

    def admitted(self, headers: Mapping[str, str]) -> None:
        self._exchange.headers_out.update(headers)
        if self._stream:
            self._keeping.begin()

    def close(self) -> None:
        """Whatever the answer's end is, only that is written from here on."""
        self._keeping.close()

    async def _keep_alive(self) -> None:
        async with self._writing:
            await self._send([_PING])

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        self.shown = True
        events = [event for delta in deltas for event in self._content.push(answer, delta)]
        if self._stream:
            async with self._writing:
                await self._send([*self._opening(answer), *events])

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        self.close()
        (answer,) = answers
        events = [*self._opening(answer), *self._content.close()]
        whole = message(answer, self._content, cost)
        if not self._stream:
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

    async def _send(self, events: list[Event]) -> None:
        if events:
            self._keeping.spoke()
            await self._begin()
            await self._exchange.write(_sse(events))

    async def _begin(self) -> None:
        if not self._exchange.status:
            await self._exchange.start_events()


def _sse(events: list[Event]) -> bytes:
    return "".join(
        f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events
    ).encode()


async def create_message(gateway: Gateway, exchange: Exchange) -> None:
    exchange.error_body = error_body
    front = MessagesFront(gateway, exchange)
    try:
        await serve(gateway, front)
    except PenstockError as error:
        await front.failed(error)
    finally:
        front.close()
