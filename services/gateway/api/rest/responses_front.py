"""A generation by way of POST /v1/responses, streamed or whole."""

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from protos.tokenizer_pb2 import TextDelta
from services.common.errors import PenstockError
from services.common.redis import RedisAway
from services.gateway.api.as_chat import Chat, rename
from services.gateway.api.responses_chat import NAMES
from services.gateway.api.responses_items import Item
from services.gateway.api.responses_schema import RESULTS, ResponsesRequest
from services.gateway.api.rest.front import HttpFront
from services.gateway.api.rest.generation import KEEP_ALIVE
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.kept_answers import KeptAnswers
from services.gateway.api.rest.lasting import KEY, LAST, check_event, digest
from services.gateway.api.rest.responses_format import (
    PREFIX,
    Event,
    Items,
    response,
    status_of,
)
from services.gateway.api.rest.stored_responses import (
    said_before,
    snapshot,
    stored_response,
)
from services.gateway.api.rest.turns import NOT_JOINED, add_turn
from services.gateway.api.schema import bad_value, parse, read_aside
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway
from services.gateway.runs.prompt import Answer, Prompt

_compact = json.JSONEncoder(separators=(",", ":")).encode


class ResponsesFront(HttpFront):
    """front.LastingFront."""

    about = ""  # in no list

    def __init__(self, gateway: Gateway, exchange: Exchange) -> None:
        super().__init__(exchange, gateway.settings)
        self.key = self.digest = ""
        self.lasts = False
        self.background = False
        self.shown = False
        self._gateway = gateway
        self._last_event: int | None = None
        self._chat: Chat | None = None
        self._prompts: list[Prompt] | None = None
        self._told: dict[str, Any] = {}
        self._input: Sequence[Item] = ()
        self._items = self._new_items()
        self._answer: Answer | None = None
        self._kept: KeptAnswers | None = None  # to be stored when all is there
        self._after = -1  # events up to this one are known
        self._field = LAST  # which says so
        self._count = 0
        self._opened = False

    # ---- in -----------------------------------------------------------------------------------

    def outlives(self, key: str, last_event: int | None) -> None:
        self.key, self._last_event = key, last_event

    async def read(self, principal: Principal, place: Place) -> list[Prompt]:
        """Once: it is known then whether the answer lasts."""
        if self._prompts is None:
            self._prompts = await super().read(principal, place)
        return self._prompts

    async def _understand(self, body: bytes, principal: Principal, place: Place) -> list[Prompt]:
        self.digest = digest(self.route, body)
        limits = self._settings.gateway
        request = await read_aside(len(body), lambda: parse(ResponsesRequest, body, limits))
        before, size = await said_before(self._gateway, principal, place, request, self.key)
        self._chat = await read_aside(len(body) + size, lambda: request.chat(before, limits))
        prompt = self._chat.request.prompt(self._settings.retrieval.top_k)
        prompt.request.chat.whole = request.truncation != "auto"
        self.stream, self.background = bool(request.stream), bool(request.background)
        self.lasts = self.background or bool(self.key)
        self._told = {
            "response": _echo(request, await self._own_sampling(request.model)),
            "input": request.model_dump(exclude_none=True, include={"input"})["input"],
            "lasts": self.lasts,
            "results": RESULTS in (request.include or ()),
        }
        self._items = self._new_items()
        self._tenant, self._input = place.tenant, request.input
        if request.stores and not self.lasts:
            self._kept = KeptAnswers(place.tenant, request.model)
        if self._last_event is not None:
            if not (self.key and self.stream):
                raise bad_value(LAST, f"only of a stream that was asked for with '{KEY}'")
            self._after = self._last_event  # a retry whose client has the events up to this one
        return [prompt]

    @property
    def resumes(self) -> bool:
        return self._last_event is not None  # they are numbered from 0 on

    @property
    def told(self) -> str:
        return json.dumps(self._told, ensure_ascii=False)

    def joins(self, id: str) -> None:
        self._exchange.request_id = self.request_id = id
        self._items = self._new_items()

    def _new_items(self) -> Items:
        return Items(self.request_id, results=self._told.get("results", False))

    def tells_again(self, id: str, told: dict[str, Any], after: int, field: str) -> None:
        """A stream of a run that was begun with another request."""
        self._told, self._after = told, after
        self.joins(id)
        self._field = field
        self.stream = self.lasts = True
        self.background = bool(told["response"]["background"])

    # ---- out ----------------------------------------------------------------------------------

    @property
    def says_begun(self) -> Callable[[Principal], Awaitable[None]] | None:
        return self._say_begun if self.background and not self.stream else None

    async def _say_begun(self, principal: Principal) -> None:
        """A retry's run may be older than its request, and be told of as that one asked."""
        id = PREFIX + self.request_id.removeprefix(REQUEST.prefix)
        with self._gateway.intake.visit(principal.tenant) as place:
            stored, told = await stored_response(self._gateway, principal, id, place.hold)
            whole = await snapshot(self._gateway, principal, stored, told)
            await self._exchange.reply_json(whole)

    def _at_once(self) -> Callable[[], Awaitable[None]] | None:
        """What runs in the background has begun for its client; what fails from then on is an
        event."""
        return self._open if self.background else None

    async def _open(self) -> None:
        async with self._writing:
            await self._send(self._opening())

    async def _keep_alive(self) -> None:
        async with self._writing:
            await self._send(self._opening())
            await self._begin()
            await self._exchange.write(KEEP_ALIVE)

    def _told_of(self, answer: Answer, deltas: list[TextDelta]) -> bytes:
        self.shown, self._answer = True, answer
        events = [event for delta in deltas for event in self._items.push(answer, delta)]
        if self._kept is not None:
            self._kept.add(answer, deltas)
        if not self.stream:
            return b""
        self._keeping.spoke()
        return self._opening() + self._sse(events)

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        self.close()
        (answer,) = answers
        status = status_of(answer)
        events = self._items.close(answer, status)
        if self._kept is not None:
            kept = await self._kept.keep(self._gateway, self, answers, cost)
            self._told["response"]["store"] = kept
        conversation = self._told["response"].get("conversation")
        if conversation is not None and not self.lasts:  # a run adds its turn by itself
            await self._join(conversation["id"], answer)
        ended = response(
            self.request_id, self._told["response"], status, self._items, answer, cost=cost
        )
        if not self.stream:
            return await self._exchange.reply_json(ended)
        events.append({"type": f"response.{status}", "response": ended})
        async with self._writing:
            await self._end(self._opening() + self._sse(events))

    async def failed(self, error: PenstockError) -> None:
        """In a stream that has begun, and in one of a cancelled run, its last event; else raises
        it, in the request's terms. OpenAI has no event for what was cancelled: it is incomplete."""
        self.close()
        if self._chat is not None:
            self._chat.rename(error)
        else:
            error.param = rename(error.param, NAMES)
        cancelled = error.reason == "cancelled"
        begun = self._exchange.status or (self.stream and (self._opened or cancelled))
        if self._exchange.complete or not begun or error.param == self._field:
            raise error
        closing = self._items.close(self._answer, "incomplete") if self._answer else []
        status, kind = ("cancelled", "incomplete") if cancelled else ("failed", "failed")
        told = response(
            self.request_id, self._told["response"], status, self._items, self._answer, error=error
        )
        async with self._writing:
            last = {"type": f"response.{kind}", "response": told}
            events = [*closing, last] if cancelled else [last]
            await self._end(self._opening() + self._sse(events))

    async def _join(self, conversation: str, answer: Answer) -> None:
        """Input and output become a part of it, before the client hears of the end."""
        models = {self._told["response"]["model"], answer.model}  # asked, and has answered
        said = self._input, self._items.output, models
        try:
            answer.warnings += await add_turn(
                self._gateway, self._tenant, conversation, self.request_id, *said
            )
        except RedisAway:
            answer.warnings.append(NOT_JOINED)

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
        if events:
            await self._begin()
            await self._exchange.write(events)

    async def _own_sampling(self, model: str) -> Mapping[str, float]:
        """A model that is not there is told of where it is asked for."""
        with suppress(PenstockError):
            return (await self._gateway.models.find(model)).sampling
        return {}

    async def _end(self, events: bytes) -> None:
        check_event(self._after, self._count - 1, self._field)
        await self._begin()
        await self._exchange.end_events(events)


def _echo(request: ResponsesRequest, own: Mapping[str, float]) -> dict[str, Any]:
    """What an answer repeats of its request; `own`: what the model does where that does not say."""
    told = request.model_dump(exclude_none=True, by_alias=True)
    defaults: dict[str, Any] = {
        "background": False,
        "conversation": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": request.model,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": True,
        "temperature": own.get("temperature", 1.0),
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": own.get("top_p", 1.0),
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
