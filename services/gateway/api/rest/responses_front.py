"""A generation by way of POST /v1/responses, streamed or whole."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from protos.runs_pb2 import RunEvent, StoredCaller, StoredRun
from protos.tokenizer_pb2 import TextDelta
from services.common.errors import PenstockError
from services.gateway import metrics
from services.gateway.api.responses_chat import Chat, rename
from services.gateway.api.responses_schema import ResponsesRequest
from services.gateway.api.rest.generation import KEEP_ALIVE
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.keep_alive import KeepAlive
from services.gateway.api.rest.lasting import KEY, LAST, digest
from services.gateway.api.rest.responses_format import Event, Items, response, status_of
from services.gateway.api.rest.stored_responses import conversation
from services.gateway.api.schema import bad_value, parse, read_aside
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway
from services.gateway.runs.delivery import joined
from services.gateway.runs.lasting.stored import whole, without_tokens
from services.gateway.runs.prompt import Answer, Prompt

_compact = json.JSONEncoder(separators=(",", ":")).encode
_NOT_KEPT = "this answer could not be stored"


class ResponsesFront:
    """front.LastingFront."""

    def __init__(self, gateway: Gateway, exchange: Exchange, key: str = "") -> None:
        self.request_id = exchange.request_id
        self.route = exchange.route
        self.endpoint = exchange.endpoint
        self.authorization = exchange.authorization
        self.traceparent = exchange.headers.get("traceparent")
        self.key, self.digest = key, ""
        self.stream = self.lasts = False
        self.background = False
        self.shown = False
        self._gateway = gateway
        self._exchange = exchange
        self._chat: Chat | None = None
        self._prompts: list[Prompt] | None = None
        self._size = 0
        self._told: dict[str, Any] = {}
        self._items = Items(self.request_id)
        self._answer: Answer | None = None
        self._deltas: list[TextDelta] = []  # to be stored when all is there
        self._after = -1  # events up to this one are known
        self._count = 0
        self._opened = False
        every_s = gateway.settings.gateway.sse_keep_alive_s
        self._keeping = KeepAlive(every_s, self._keep_alive)
        self._writing = asyncio.Lock()

    # ---- in -----------------------------------------------------------------------------------

    async def read(self, place: Place) -> list[Prompt]:
        """Once from the client; what was read then from there on."""
        if self._prompts is not None:
            place.hold(self._size)
            return self._prompts
        self._exchange.place = place
        body = await self._exchange.json_body()
        self.digest = digest(self.route, body)
        limits = self._gateway.settings.gateway
        request = await read_aside(len(body), lambda: parse(ResponsesRequest, body, limits))
        before, size = await conversation(self._gateway, place, request.previous_response_id)
        self._size = len(body) + size
        self._chat = await read_aside(self._size, lambda: request.chat(before, limits))
        prompt = self._chat.request.prompt(self._gateway.settings.retrieval.top_k)
        prompt.request.chat.whole = request.truncation != "auto"
        self._prompts = [prompt]
        self.stream, self.background = bool(request.stream), bool(request.background)
        self.lasts = self.background or bool(self.key)
        self._told = {
            "response": _echo(request),
            "input": request.model_dump(exclude_none=True, include={"input"})["input"],
            "lasts": self.lasts,
        }
        self._tenant = place.tenant
        self._exchange.watch_client()
        return self._prompts

    @property
    def told(self) -> str:
        return json.dumps(self._told, ensure_ascii=False)

    def joins(self, id: str) -> None:
        self._exchange.request_id = self.request_id = id
        self._items = Items(id)

    def goes_on_behind(self, last: int) -> None:
        """A retry whose client has the events up to this one. Raises INVALID_ARGUMENT."""
        if not (self.key and self.stream):
            raise bad_value(LAST, f"only of a stream that was asked for with '{KEY}'")
        self._after = last

    def tells_again(self, id: str, told: dict[str, Any], after: int) -> None:
        """A stream of a run that was begun with another request."""
        self.joins(id)
        self._told, self._after = told, after
        self.stream = self.lasts = True
        self.background = bool(told["response"]["background"])

    # ---- out ----------------------------------------------------------------------------------

    def admitted(self, headers: Mapping[str, str]) -> None:
        self._exchange.headers_out.update(headers)
        if self.stream:
            self._keeping.begin(self._open if self.background else None)

    def close(self) -> None:
        """Whatever the answer's end is, only that is written from here on."""
        self._keeping.close()

    async def _open(self) -> None:
        """What runs in the background has begun for its client at once; what fails from then on is
        an event."""
        async with self._writing:
            await self._send(self._opening())

    async def _keep_alive(self) -> None:
        async with self._writing:
            await self._send(self._opening())
            await self._exchange.write(KEEP_ALIVE)

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        self.shown, self._answer = True, answer
        events = [event for delta in deltas for event in self._items.push(answer, delta)]
        if not self.lasts and self._told["response"]["store"]:
            self._deltas += deltas
        if self.stream:
            async with self._writing:
                await self._send(self._opening() + self._sse(events))

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        self.close()
        (answer,) = answers
        status = status_of(answer)
        events = self._items.close(answer, status)
        if not self.lasts and self._told["response"]["store"]:
            await self._keep(answer, cost)
        ended = response(
            self.request_id, self._told["response"], status, self._items, answer, cost=cost
        )
        if not self.stream:
            return await self._exchange.reply_json(ended)
        events.append({"type": f"response.{status}", "response": ended})
        async with self._writing:
            await self._end(self._opening() + self._sse(events))

    async def failed(self, error: PenstockError) -> None:
        """In a stream that has begun its last event; else raises it, in the request's terms."""
        self.close()
        if self._chat is not None:
            self._chat.rename(error)
        else:
            error.param = rename(error.param)
        if not self._exchange.status or self._exchange.complete:
            raise error
        status = "cancelled" if error.reason == "cancelled" else "failed"
        told = response(
            self.request_id, self._told["response"], status, self._items, self._answer, error=error
        )
        async with self._writing:
            await self._end(self._sse([{"type": "response.failed", "response": told}]))

    async def _keep(self, answer: Answer, cost: Cost | None) -> None:
        """All of it, before the client hears of the end: what it refers to then is there."""
        stored = StoredRun(
            request_id=self.request_id,
            route=self.route,
            endpoint=self.endpoint,
            created=time.time(),
            caller=StoredCaller(tenant=self._tenant),
            told=self.told,
            digest=self.digest,
        )
        deltas = [
            RunEvent(delta=RunEvent.Delta(index=answer.index, delta=without_tokens(delta)))
            for delta in joined(self._deltas)
        ]
        if await self._gateway.runs.keep(stored, whole([answer], deltas, cost)):
            metrics.runs.labels("kept").inc()
        else:
            self._told["response"]["store"] = False
            answer.warnings.append(_NOT_KEPT)

    def _opening(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        kinds = ["queued"] if self.background else []
        first = response(
            self.request_id, self._told["response"], "queued" if kinds else "in_progress"
        )
        running = {**first, "status": "in_progress"}
        events = [{"type": "response.created", "response": first}]
        events += [{"type": f"response.{kind}", "response": first} for kind in kinds]
        return self._sse([*events, {"type": "response.in_progress", "response": running}])

    def _sse(self, events: list[Event]) -> bytes:
        """Those that are not known, with their numbers."""
        out: list[bytes] = []
        for event in events:
            number = self._count
            self._count += 1
            if number > self._after:
                kind = event["type"]
                data = _compact({"type": kind, "sequence_number": number, **event})
                out.append(f"event: {kind}\ndata: {data}\n\n".encode())
        return b"".join(out)

    async def _send(self, events: bytes) -> None:
        self._keeping.spoke()
        if not self._exchange.status:
            await self._exchange.start_events()
        if events:
            await self._exchange.write(events)

    async def _end(self, events: bytes) -> None:
        if not self._exchange.status:
            await self._exchange.start_events()
        await self._exchange.end_events(events)


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """What an answer repeats of its request."""
    told = request.model_dump(exclude_none=True, by_alias=True)
    defaults: dict[str, Any] = {
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": request.model,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }
    choice = request.tool_choice
    if choice is not None and choice.type in ("auto", "none", "required"):
        told["tool_choice"] = choice.type
    return {
        "created_at": int(time.time()),
        **{name: told.get(name, default) for name, default in defaults.items()},
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "text": {"format": told.get("text", {}).get("format", {"type": "text"})},
    }
