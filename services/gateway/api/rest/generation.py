"""POST /v1/chat/completions and /v1/completions, streamed or whole."""

import json
from collections.abc import Awaitable, Mapping
from typing import Any

import orjson

from protos.tokenizer_pb2 import TextDelta
from services.common.errors import invalid
from services.gateway.api.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.api.rest.front import HttpFront
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.kept_answers import KeptAnswers
from services.gateway.api.rest.lasting import (
    KEY,
    LAST,
    Numbered,
    digest,
    idempotency_key,
    last_event,
)
from services.gateway.api.rest.openai_format import Chunks
from services.gateway.api.rest.whole import completion
from services.gateway.api.schema import bad_value, parse, read_aside, read_json
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway
from services.gateway.runs.lasting.following import serve_lasting
from services.gateway.runs.pipeline import serve
from services.gateway.runs.prompt import Answer, Prompt

KEEP_ALIVE = b": keep-alive\n\n"


class RestFront(HttpFront):
    """A chat's or a completion's (front.LastingFront)."""

    says_begun = None

    def __init__(self, gateway: Gateway, exchange: Exchange, *, chat: bool) -> None:
        super().__init__(exchange, gateway.settings)
        self.key = self.digest = ""
        self.about = ""  # what lists tell of a stored chat
        self._gateway = gateway
        self._chat = chat
        self._sent: Any = None  # messages of a stored chat, as they came
        self._metadata: Mapping[str, str] | None = None  # of one that is told again
        self._kept: KeptAnswers | None = None
        self._include_usage = self._continuous_usage = False
        self._chunks: dict[int, Chunks] = {}  # by the answer's index
        self._last_event: int | None = None
        self._numbered: Numbered | None = None  # of a run that lasts

    async def _understand(self, body: bytes, principal: Principal, place: Place) -> list[Prompt]:
        if self.key:
            self.digest = digest(self.route, body)
        prompts = await read_aside(len(body), lambda: self._prompts(body))
        if self.about and not self.lasts:
            self._kept = KeptAnswers(place.tenant, prompts[0].request.model)
        return prompts

    def _prompts(self, body: bytes) -> list[Prompt]:
        request: ChatCompletionRequest | CompletionRequest
        if self._chat:
            request = parse(ChatCompletionRequest, body, self._settings.gateway)
            prompts = [request.prompt(self._settings.retrieval.top_k)]
            if request.store:
                about = {"model": request.model, "metadata": request.metadata or {}}
                self.about = orjson.dumps(about).decode()
                self._sent = read_json(body)["messages"]
        else:
            request = parse(CompletionRequest, body, self._settings.gateway)
            prompts = request.prompts(self._settings.gateway)
        self.stream = bool(request.stream)
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        if self._last_event is not None and not self.stream:
            raise bad_value(LAST, "only events of a stream have ids")
        if self.key and self.stream:
            self._numbered = Numbered(self._last_event or 0)
        return prompts

    # ---- a run that lasts -----------------------------------------------------------------------

    def outlives(self, key: str, last_event: int | None) -> None:
        self.key, self._last_event = key, last_event

    @property
    def lasts(self) -> bool:
        return bool(self.key)

    @property
    def resumes(self) -> bool:
        return bool(self._last_event)

    @property
    def told(self) -> str:
        told = {"include_usage": self._include_usage, "continuous_usage": self._continuous_usage}
        return json.dumps(told if self._sent is None else {**told, "messages": self._sent})

    def joins(self, id: str) -> None:
        self._exchange.request_id = id

    def tells_again(
        self,
        told: Mapping[str, Any],
        *,
        stream: bool,
        after: int,
        field: str,
        metadata: Mapping[str, str] | None,
    ) -> None:
        """Of a run that was begun with another request. `metadata`: of a stored one."""
        self._metadata = metadata
        self._include_usage = told["include_usage"]
        self._continuous_usage = told.get("continuous_usage", False)
        self.stream = stream
        self._numbered = Numbered(after, field) if stream else None

    # ---- out ------------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        async with self._writing:
            await self._begin()
            await self._exchange.write(KEEP_ALIVE)

    @property
    def shown(self) -> bool:
        return bool(self._chunks)

    def _told_of(self, answer: Answer, deltas: list[TextDelta]) -> bytes:
        if self._kept is not None:
            self._kept.add(answer, deltas)
        if not self.stream:
            return b""
        chunks, events = self._chunks_of(answer)
        events += b"".join([chunks.delta(delta) for delta in deltas])
        if events:
            self._keeping.spoke()
        return events if self._numbered is None else self._numbered.of(events)

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        self.close()
        if self._kept is not None:
            await self._kept.keep(self._gateway, self, answers, cost)
        if self.stream:
            found = [self._chunks_of(answer) for answer in answers]
            events = b"".join([opening for _, opening in found])
            *others, last = [chunks for chunks, _ in found]
            events += b"".join([of_one.closing() for of_one in others]) + last.closing(cost)
            events += last.ending(answers, cost)
            told = events if self._numbered is None else self._numbered.ending(events)
            await self._begin()  # nothing was left to tell before
            await self._exchange.end_events(told)
        else:
            content = await completion(answers, cost, chat=self._chat)
            if self._metadata is not None:
                content["metadata"] = self._metadata
            await self._exchange.reply(orjson.dumps(content), "application/json")

    def _chunks_of(self, answer: Answer) -> tuple[Chunks, bytes]:
        """And what opens them, where nothing has left: it leaves with what follows."""
        if (chunks := self._chunks.get(answer.index)) is not None:
            return chunks, b""
        chunks = Chunks(
            answer,
            chat=self._chat,
            include_usage=self._include_usage,
            continuous_usage=self._continuous_usage,
        )
        self._chunks[answer.index] = chunks
        return chunks, chunks.opening()


async def _serve(gateway: Gateway, exchange: Exchange, *, chat: bool) -> None:
    front = RestFront(gateway, exchange, chat=chat)
    key, last = idempotency_key(exchange.headers), last_event(exchange.headers)
    try:
        if key:
            front.outlives(key, last)
            await serve_lasting(gateway, front)
        elif last is not None:
            raise invalid(f"'{LAST}' needs '{KEY}'.", LAST, stage="gateway")
        else:
            await serve(gateway, front, exchange.principal, watched=exchange.principal is None)
    finally:
        front.close()


def chat_completions(gateway: Gateway, exchange: Exchange) -> Awaitable[None]:
    return _serve(gateway, exchange, chat=True)


def completions(gateway: Gateway, exchange: Exchange) -> Awaitable[None]:
    return _serve(gateway, exchange, chat=False)
