"""A generation over gRPC."""

import asyncio
from collections.abc import Mapping

from protos.gateway_pb2 import ChatRequest, CompleteRequest, GenerateEvent
from protos.tokenizer_pb2 import TextDelta
from services.common.errors import invalid
from services.gateway.api.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.api.grpc.calls import Context, cost_of, endpoint, metadata_of, tell_headers
from services.gateway.api.grpc.fields import chat_fields, completion_fields
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.api.rest.lasting import (
    KEY,
    LAST,
    check_event,
    digest,
    idempotency_key,
    last_event,
)
from services.gateway.api.schema import validated
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway
from services.gateway.runs.prompt import Answer, Prompt, total_usage
from services.gateway.runs.text_stream import client_too_slow


class GrpcFront:
    """A generation over gRPC (front.LastingFront)."""

    says_begun = None

    def __init__(self, gateway: Gateway, inbox: Inbox, context: Context, id: str, route: str):
        metadata = metadata_of(context)
        self.request_id = id
        self.route = route
        self.endpoint = endpoint(route)
        self.authorization = metadata.get("authorization")
        self.traceparent = metadata.get("traceparent")
        self.key, self.digest, self.told = idempotency_key(metadata), "", "{}"
        self.lasts = bool(self.key)
        self._after = last_event(metadata)  # events up to this one are known
        self._number = 0
        self._settings = gateway.settings
        self._inbox = inbox
        self._context = context
        self._begun: set[int] = set()  # prompts, by the index of their first answer
        self._turn = asyncio.Lock()  # answers to several prompts come at once
        self._headers: Mapping[str, str] = {}

    async def read(self, principal: Principal, place: Place) -> list[Prompt]:
        if self._after is not None and not self.key:
            raise invalid(f"'{LAST}' needs '{KEY}'.", LAST, stage="gateway")
        message = await self._inbox.take(place, self._context)
        if self.key:
            self.digest = digest(self.route, message)
        # In a thread, as a large HTTP body.
        return await asyncio.to_thread(self._understand, message)

    def _understand(self, message: bytes) -> list[Prompt]:
        limits = self._settings.gateway
        if self.route == "Chat":
            fields = chat_fields(self._inbox.parse(ChatRequest, message), limits.max_messages)
            chat = validated(ChatCompletionRequest, fields, limits)
            return [chat.prompt(self._settings.retrieval.top_k)]
        fields = completion_fields(self._inbox.parse(CompleteRequest, message), limits)
        return validated(CompletionRequest, fields, limits).prompts(limits)

    def joins(self, id: str) -> None:
        self._context.set_trailing_metadata((("x-request-id", id),))

    def admitted(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    @property
    def shown(self) -> bool:
        return bool(self._begun)

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        """One event for all that is ready."""
        event = GenerateEvent(
            text="".join([delta.text for delta in deltas]),
            reasoning="".join([delta.reasoning for delta in deltas]),
            tool_calls=[call for delta in deltas for call in delta.tool_calls],
            logprobs=[one for delta in deltas for one in delta.logprobs],
            choice=answer.index,
        )
        if (prompt := answer.index - answer.choice) not in self._begun:
            self._begun.add(prompt)
            event.plan.CopyFrom(answer.plan)
            event.passages.extend(answer.passages_used)
            event.warning = answer.warning
            if answer.echo is not None:
                event.echo.CopyFrom(answer.echo)
        says = event.text or event.reasoning or event.tool_calls or event.logprobs
        if says or event.HasField("plan"):
            await self._send(event)

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        *others, last = answers
        for answer in others:
            await self._send(GenerateEvent(choice=answer.index, finish=answer.finish))
        ending = GenerateEvent(choice=last.index, finish=last.finish, usage=total_usage(answers))
        if cost is not None:
            ending.cost.MergeFrom(cost_of(cost))
        await self._send(ending)
        check_event(self._after or 0, self._number, LAST)

    async def _send(self, event: GenerateEvent) -> None:
        if self.key:
            self._number += 1
            event.number = self._number
            if self._number <= (self._after or 0):
                return
        async with self._turn:
            try:
                async with asyncio.timeout(self._settings.gateway.write_timeout_s):
                    headers, self._headers = self._headers, {}
                    await tell_headers(self._context, headers)
                    await self._context.write(event)
            except TimeoutError:
                raise client_too_slow() from None
