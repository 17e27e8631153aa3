"""The public gRPC service: the pipeline of REST behind another front."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from protos.gateway_pb2 import (
    GenerateEvent,
    PublicListModelsReply,
    PublicModerateReply,
    PublicModerateRequest,
)
from protos.tokenizer_pb2 import ModelInfo, PromptRequest
from services.common.errors import PenstockError
from services.gateway.api.grpc.calls import (
    Asked,
    Context,
    answered,
    caller,
    cost_of,
    endpoint,
    single,
    streaming,
    tell_headers,
)
from services.gateway.api.grpc.generation import GrpcFront
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.api.grpc.pooled import POOLED, understood
from services.gateway.api.grpc.tokens import TOKENS
from services.gateway.api.moderation_schema import MAX_TEXTS, ModerationRequest
from services.gateway.api.schema import validated
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.parts import Gateway
from services.gateway.runs.lasting.following import serve_lasting
from services.gateway.runs.moderation import Judged, moderate
from services.gateway.runs.numbers import Numbers
from services.gateway.runs.pipeline import serve
from services.gateway.runs.pooling import compute, rename
from services.gateway.runs.recorded import recorded
from services.gateway.runs.records import Journal
from services.gateway.runs.tokens import tokens_of


class Inference:
    """penstock.v1.Inference."""

    def __init__(self, gateway: Gateway, inbox: Inbox) -> None:
        self._gateway = gateway
        self._inbox = inbox

    async def chat(self, _: object, context: Context) -> None:
        await self._generate("Chat", context)

    async def complete(self, _: object, context: Context) -> None:
        await self._generate("Complete", context)

    def pooled(self, route: str) -> Callable[[object, Context], Awaitable[Any]]:
        """The handler of one of POOLED."""

        async def reply(
            asked: Asked, principal: Principal, journal: Journal, message: bytes
        ) -> tuple[Any, Numbers]:
            body, ask = await asyncio.to_thread(
                understood, self._inbox, route, message, self._gateway.settings.gateway
            )
            got = await compute(self._gateway, asked, principal, journal, ask)
            return await asyncio.to_thread(POOLED[route].tell, body, got), got

        return self._recorded(route, reply)

    def moderate(self) -> Callable[[object, Context], Awaitable[Any]]:
        async def reply(
            asked: Asked, principal: Principal, journal: Journal, message: bytes
        ) -> tuple[Any, Judged]:
            request = self._inbox.parse(PublicModerateRequest, message)
            fields = {"input": list(request.texts[: MAX_TEXTS + 1])}
            texts = validated(ModerationRequest, fields).texts()
            judged = await moderate(self._gateway, asked, principal, journal, texts)
            told = PublicModerateReply(
                judged=judged.known, policy=judged.version, tokens=judged.usage.prompt_tokens
            )
            for scores in judged.scores:
                told.results.add(scores=scores)
            return told, judged

        return self._recorded("Moderate", reply)

    def tokens(self, route: str) -> Callable[[object, Context], Awaitable[Any]]:
        """The handler of one of TOKENS."""
        kind, limits = TOKENS[route], self._gateway.settings.gateway

        def understood(message: bytes) -> PromptRequest:
            return kind.understand(self._inbox.parse(kind.request, message), limits)

        async def reply(
            asked: Asked, principal: Principal, journal: Journal, message: bytes
        ) -> tuple[Any, None]:
            try:
                request = await asyncio.to_thread(understood, message)
                made = await tokens_of(self._gateway, asked, principal, journal, request)
            except PenstockError as error:
                rename(error, kind.called)
                raise
            return kind.tell(*made), None

        return self._recorded(route, reply)

    def _recorded(
        self, route: str, reply: Callable[..., Awaitable[tuple[Any, Numbers | Judged | None]]]
    ) -> Callable[[object, Context], Awaitable[Any]]:
        """The handler of what has one reply, which `reply` makes."""

        async def handler(_: object, context: Context) -> Any:
            async def answer(id: str, metadata: dict[str, str]) -> Any:
                told: list[Any] = []
                asked = Asked(
                    id,
                    route,
                    endpoint(route),
                    metadata.get("authorization"),
                    metadata.get("traceparent"),
                )

                async def work(principal: Principal, place: Place, journal: Journal) -> None:
                    message = await self._inbox.take(place, context)
                    made, got = await reply(asked, principal, journal, message)
                    if got is not None:
                        await tell_headers(context, got.headers)
                        if got.cost:
                            made.cost.CopyFrom(cost_of(got.cost))
                    told.append(made)

                await recorded(self._gateway, asked, work)
                return told[0]

            return await answered(route, context, answer)

        return handler

    async def list_models(self, _: object, context: Context) -> PublicListModelsReply | None:
        async def answer(id: str, metadata: dict[str, str]) -> PublicListModelsReply:
            principal = await caller(self._gateway, metadata, "ListModels")
            models = await self._gateway.models.all()
            if embedding := self._gateway.retrieval.embedding_model:
                models.append(ModelInfo(name=embedding))
            usable = [m for m in models if principal.covers(m.name)]
            return PublicListModelsReply(models=usable)

        return await answered("ListModels", context, answer)

    async def _generate(self, route: str, context: Context) -> None:
        async def answer(id: str, metadata: dict[str, str]) -> None:
            front = GrpcFront(self._gateway, self._inbox, context, id, route)
            await (serve_lasting if front.key else serve)(self._gateway, front)

        await answered(route, context, answer)


def methods(gateway: Gateway, inbox: Inbox) -> dict[str, Any]:
    """Their handlers, by route."""
    service = Inference(gateway, inbox)
    return {
        "Chat": streaming(service.chat, GenerateEvent),
        "Complete": streaming(service.complete, GenerateEvent),
        **{route: single(service.pooled(route), one.reply) for route, one in POOLED.items()},
        "Moderate": single(service.moderate(), PublicModerateReply),
        **{route: single(service.tokens(route), one.reply) for route, one in TOKENS.items()},
        "ListModels": single(service.list_models, PublicListModelsReply),
    }
