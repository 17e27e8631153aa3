"""The public gRPC service: the pipeline of REST behind another front."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from protos import gateway_pb2_grpc
from protos.gateway_pb2 import (
    ChatRequest,
    CompleteRequest,
    GenerateEvent,
    PublicEmbedReply,
    PublicEmbedRequest,
    PublicListModelsReply,
    PublicListModelsRequest,
    SamplingOptions,
)
from protos.tokenizer_pb2 import ModelInfo, TextDelta
from services.common.errors import PenstockError, invalid
from services.gateway import metrics
from services.gateway.embeddings import MAX_TEXTS, EmbeddingsRequest, embed
from services.gateway.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.http import CLIENT_GONE, http_status, internal
from services.gateway.ids import REQUEST
from services.gateway.intake import Place
from services.gateway.pipeline import Gateway, serve
from services.gateway.prompt import Answer, Prompt
from services.gateway.schema import validated

log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext, which has no type stubs
Reply = TypeVar("Reply")

# The rules are those of REST; what they are called here.
_PARAMS = (
    ("tools[0].vector_store_ids", "vector_store_ids"),
    ("tools", "vector_store_ids"),
    ("prompt", "token_ids"),
    ("input", "texts"),
    *((name, f"sampling.{name}") for name in SamplingOptions.DESCRIPTOR.fields_by_name),
)


class GrpcFront:
    """A generation over gRPC (pipeline.Front)."""

    def __init__(
        self, gateway: Gateway, request: ChatRequest | CompleteRequest, context: Context, id: str
    ) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self.request_id = id
        self.route = "Chat" if isinstance(request, ChatRequest) else "Complete"
        self.authorization = metadata.get("authorization")
        self.traceparent = metadata.get("traceparent")
        self._settings = gateway.settings
        self._request = request
        self._context = context
        self._began = False

    async def read(self, place: Place) -> list[Prompt]:
        # In a thread, as a large HTTP body: to know a message's size is to serialize it.
        return await asyncio.to_thread(self._understand)

    def _understand(self) -> list[Prompt]:
        if isinstance(self._request, ChatRequest):
            chat = validated(ChatCompletionRequest, _chat_fields(self._request))
            return [chat.prompt(self._settings.retrieval.top_k)]
        limits = self._settings.gateway
        fields = _completion_fields(self._request, limits.max_prompt_tokens)
        return validated(CompletionRequest, fields).prompts(limits)

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        """One event for all that is ready."""
        event = GenerateEvent(text="".join([delta.text for delta in deltas]))
        if not self._began:
            self._began = True
            event.plan.CopyFrom(answer.plan)
            event.passages.extend(answer.passages_used)
        if event.text or event.HasField("plan"):
            await self._context.write(event)

    async def finish(self, answers: list[Answer]) -> None:
        (answer,) = answers  # a call has one prompt
        await self._context.write(GenerateEvent(finish=answer.finish, usage=answer.usage))


def _sampling(options: SamplingOptions) -> dict[str, Any]:
    fields = {field.name: value for field, value in options.ListFields()}
    return {**fields, **({"stop": list(options.stop)} if options.stop else {})}


def _chat_fields(request: ChatRequest) -> dict[str, Any]:
    """The request in REST's shape, to be validated by REST's rules."""
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": [
            {"role": m.role, "content": m.content, "name": m.name or None} for m in request.messages
        ],
        "documents": [{"title": d.title, "text": d.text} for d in request.documents],
        **_sampling(request.sampling),
    }
    for index, document in enumerate(request.documents):
        if document.score or document.source_id or document.position:
            raise invalid("A client's own document has a title and a text.", f"documents[{index}]")
    if request.vector_store_ids:
        fields["tools"] = [
            {"type": "file_search", "vector_store_ids": list(request.vector_store_ids)}
        ]
    return fields


def _completion_fields(request: CompleteRequest, max_ids: int) -> dict[str, Any]:
    fields = {"model": request.model, **_sampling(request.sampling)}
    if request.HasField("token_ids"):
        one_more = max_ids + 1  # is enough to be refused
        return {**fields, "prompt": list(request.token_ids.ids[:one_more])}
    return {**fields, "prompt": request.text}


class Inference(gateway_pb2_grpc.InferenceServicer):
    """penstock.v1.Inference."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Chat(self, request: ChatRequest, context: Context) -> None:
        await self._generate(request, context)

    async def Complete(self, request: CompleteRequest, context: Context) -> None:
        await self._generate(request, context)

    async def Embed(self, request: PublicEmbedRequest, context: Context) -> PublicEmbedReply:
        async def answer(id: str, metadata: dict[str, str]) -> PublicEmbedReply:
            identity = await self._gateway.auth.identify(metadata.get("authorization"))
            one_more = MAX_TEXTS + 1  # is enough to be refused
            fields = {"model": request.model, "input": list(request.texts[:one_more])}
            body = await asyncio.to_thread(validated, EmbeddingsRequest, fields)
            trace = metadata.get("traceparent")
            with self._gateway.intake.slot(identity.tenant):
                reply = await embed(self._gateway, identity, id, trace, body.model, body.input)
            return PublicEmbedReply(vectors=reply.vectors, tokens=reply.tokens)

        return await _answered("Embed", context, answer)

    async def ListModels(
        self, request: PublicListModelsRequest, context: Context
    ) -> PublicListModelsReply:
        async def answer(id: str, metadata: dict[str, str]) -> PublicListModelsReply:
            identity = await self._gateway.auth.identify(metadata.get("authorization"))
            models = await self._gateway.models.all()
            if embedding := self._gateway.retrieval.embedding_model:
                models.append(ModelInfo(name=embedding))
            usable = [m for m in models if identity.models is None or m.name in identity.models]
            return PublicListModelsReply(models=usable)

        return await _answered("ListModels", context, answer)

    async def _generate(self, request: ChatRequest | CompleteRequest, context: Context) -> None:
        async def answer(id: str, metadata: dict[str, str]) -> None:
            await serve(self._gateway, GrpcFront(self._gateway, request, context, id))

        await _answered(type(request).__name__.removesuffix("Request"), context, answer)


async def _answered(
    route: str, context: Context, answer: Callable[[str, dict[str, str]], Awaitable[Reply]]
) -> Reply:
    """Runs a call with a request id; errors end it with gateway.proto's trailing metadata."""
    id = REQUEST.new()
    status = 200
    began = time.monotonic()
    context.set_trailing_metadata((("x-request-id", id),))
    try:
        return await answer(id, dict(context.invocation_metadata() or ()))
    except PenstockError as error:
        failure, status = error, http_status(error)
    except asyncio.CancelledError:
        status = CLIENT_GONE
        raise
    except Exception:
        log.exception("%s failed", route)
        failure, status = internal(), 500
    finally:
        metrics.requests.labels(route, status).inc()
        metrics.duration.labels(route).observe(time.monotonic() - began)
    await context.abort(failure.code, failure.message, tuple(_trailers(id, failure)))
    raise AssertionError("abort does not return")


def _trailers(id: str, error: PenstockError) -> Iterable[tuple[str, str]]:
    yield "x-request-id", id
    if error.param:
        yield "x-param", _param(error.param)
    if error.retry_after_s > 0:
        yield "retry-after", str(max(1, round(error.retry_after_s)))


def _param(rest: str) -> str:
    for theirs, ours in _PARAMS:
        if rest == theirs or rest.startswith((theirs + "[", theirs + ".")):
            return ours + rest[len(theirs) :]
    return rest
