"""The public gRPC service: the pipeline of REST behind another front."""

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import grpc

from protos import gateway_pb2
from protos.common_pb2 import Message
from protos.gateway_pb2 import (
    ChatRequest,
    CompleteRequest,
    GenerateEvent,
    PublicListModelsReply,
    SamplingOptions,
)
from protos.tokenizer_pb2 import ModelInfo, TextDelta
from services.common.errors import PenstockError, invalid
from services.gateway import metrics
from services.gateway.api.generation_schema import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_DOCUMENTS,
    MAX_STOP_IDS,
    MAX_STOPS,
    ChatCompletionRequest,
    CompletionRequest,
)
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.api.grpc.pooled import POOLED, understood
from services.gateway.api.grpc.tool_fields import FORMS, call_fields, form_fields, tool_fields
from services.gateway.api.messages_schema import MAX_PARTS
from services.gateway.api.rest.http import CLIENT_GONE, http_status, internal
from services.gateway.api.schema import validated
from services.gateway.api.tools_schema import MAX_STORES
from services.gateway.identity.permissions import admit
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.metering.refusals import LimitError
from services.gateway.runs.pipeline import Gateway, recorded, serve
from services.gateway.runs.pooling import compute
from services.gateway.runs.prompt import Answer, Prompt, total_usage
from services.gateway.runs.records import Journal
from services.gateway.runs.text_stream import client_too_slow

log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext, which has no type stubs
Reply = TypeVar("Reply")

INFERENCE = "penstock.v1.Inference"
_LAST_WORD_S = 2.0  # for a client that does not read to take its error

# The rules are those of REST; what they are called here.
_FUNCTIONS = re.compile(r"((?:tools|tool_calls)\[\d+\])\.function\.")
_STORES = re.compile(r"tools\[\d+\]\.vector_store_ids")
_PARAMS = (
    ("input", "texts"),
    ("top_logprobs", "sampling.logprobs"),
    *FORMS,
    *((name, f"sampling.{name}") for name in SamplingOptions.DESCRIPTOR.fields_by_name),
)


class _Asked(NamedTuple):
    """pipeline.Asked."""

    request_id: str
    route: str
    endpoint: str
    authorization: str | None
    traceparent: str | None


class GrpcFront:
    """A generation over gRPC (pipeline.Front)."""

    def __init__(self, gateway: Gateway, inbox: Inbox, context: Context, id: str, route: str):
        metadata = dict(context.invocation_metadata() or ())
        self.request_id = id
        self.route = route
        self.endpoint = _endpoint(route)
        self.authorization = metadata.get("authorization")
        self.traceparent = metadata.get("traceparent")
        self._settings = gateway.settings
        self._inbox = inbox
        self._context = context
        self._began = False
        self._headers: Mapping[str, str] = {}

    async def read(self, place: Place) -> list[Prompt]:
        message = await self._inbox.take(place, self._context)
        # In a thread, as a large HTTP body.
        return await asyncio.to_thread(self._understand, message)

    def _understand(self, message: bytes) -> list[Prompt]:
        limits = self._settings.gateway
        if self.route == "Chat":
            fields = _chat_fields(self._inbox.parse(ChatRequest, message), limits.max_messages)
            chat = validated(ChatCompletionRequest, fields, limits)
            return [chat.prompt(self._settings.retrieval.top_k)]
        fields = _completion_fields(
            self._inbox.parse(CompleteRequest, message), limits.max_prompt_tokens
        )
        return validated(CompletionRequest, fields, limits).prompts(limits)

    def admitted(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    @property
    def shown(self) -> bool:
        return self._began

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        """One event for all that is ready."""
        event = GenerateEvent(
            text="".join([delta.text for delta in deltas]),
            reasoning="".join([delta.reasoning for delta in deltas]),
            tool_calls=[call for delta in deltas for call in delta.tool_calls],
            logprobs=[one for delta in deltas for one in delta.logprobs],
            choice=answer.index,
        )
        if not self._began:
            self._began = True
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
            ending.cost.MergeFrom(_cost(cost))
        await self._send(ending)

    async def _send(self, event: GenerateEvent) -> None:
        try:
            async with asyncio.timeout(self._settings.gateway.write_timeout_s):
                headers, self._headers = self._headers, {}
                await _told(self._context, headers)
                await self._context.write(event)
        except TimeoutError:
            raise client_too_slow() from None


async def _told(context: Context, headers: Mapping[str, str]) -> None:
    if headers:
        await context.send_initial_metadata(tuple(headers.items()))


def _cost(cost: Cost) -> gateway_pb2.Cost:
    return gateway_pb2.Cost(amount=cost.amount, currency=cost.currency)


def _endpoint(route: str) -> str:
    """As permissions.py has it."""
    return f"/{INFERENCE}/{route}"


def _sampling(options: SamplingOptions) -> dict[str, Any]:
    """Lists cut where they are too long already, which refuses them."""
    fields = {field.name: value for field, value in options.ListFields()}
    for name, most in _LISTS.items():
        if name in fields:
            fields[name] = list(fields[name][: most + 1])
    if "delivery" in fields:
        fields["stream"] = True  # as everything here is
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(islice(options.logit_bias.items(), MAX_BIAS + 1))
    return fields


def _of_chat(sampling: dict[str, Any]) -> dict[str, Any]:
    """A chat's form of logprobs is another than a completion's."""
    if "logprobs" in sampling:
        sampling = {**sampling, "logprobs": True, "top_logprobs": sampling["logprobs"]}
    return sampling


_LISTS = {"stop": MAX_STOPS, "bad_words": MAX_BAD_WORDS, "stop_token_ids": MAX_STOP_IDS}


def _chat_fields(request: ChatRequest, max_messages: int) -> dict[str, Any]:
    """The request in REST's shape, to be validated by REST's rules. Of what is too many, one more
    than may be: that is enough to be refused.
    """
    documents = request.documents[: MAX_DOCUMENTS + 1]
    stores = list(request.vector_store_ids[: MAX_STORES + 1])
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": [
            _message(m, f"messages[{index}]")
            for index, m in enumerate(request.messages[: max_messages + 1])
        ],
        "documents": [{"title": d.title, "text": d.text} for d in documents],
        **_of_chat(_sampling(request.sampling)),
        **tool_fields(request),
        **(form_fields(request.constraint) if request.HasField("constraint") else {}),
    }
    for index, document in enumerate(documents):
        if document.score or document.source_id or document.position:
            raise invalid("A client's own document has a title and a text.", f"documents[{index}]")
    if stores:
        search = {"type": "file_search", "vector_store_ids": stores}
        fields["tools"] = [*fields.get("tools", ()), search]
    return fields


def _message(message: Message, at: str) -> dict[str, Any]:
    parts = message.content[: MAX_PARTS + 1]
    for index, part in enumerate(parts):
        if part.WhichOneof("kind") is None:
            raise invalid("A part of a kind that is not known here.", f"{at}.content[{index}]")
    content = [{"type": "text", "text": part.text} for part in parts]
    told = {"role": message.role, "content": content or None, "name": message.name or None}
    return {**told, **call_fields(message)}


def _completion_fields(request: CompleteRequest, max_ids: int) -> dict[str, Any]:
    fields = {"model": request.model, **_sampling(request.sampling)}
    if request.HasField("constraint"):
        fields |= form_fields(request.constraint)
    if request.HasField("token_ids"):
        one_more = max_ids + 1  # is enough to be refused
        return {**fields, "prompt": list(request.token_ids.ids[:one_more])}
    return {**fields, "prompt": request.text}


class Inference:
    """penstock.v1.Inference."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._inbox = Inbox(gateway.settings.gateway)

    async def chat(self, _: object, context: Context) -> None:
        await self._generate("Chat", context)

    async def complete(self, _: object, context: Context) -> None:
        await self._generate("Complete", context)

    def pooled(self, route: str) -> Callable[[object, Context], Awaitable[Any]]:
        """The handler of one of POOLED."""

        async def handler(_: object, context: Context) -> Any:
            async def answer(id: str, metadata: dict[str, str]) -> Any:
                told: list[Any] = []
                asked = _Asked(
                    id,
                    route,
                    _endpoint(route),
                    metadata.get("authorization"),
                    metadata.get("traceparent"),
                )

                async def work(principal: Principal, place: Place, journal: Journal) -> None:
                    message = await self._inbox.take(place, context)
                    body, ask = await asyncio.to_thread(
                        understood, self._inbox, route, message, self._gateway.settings.gateway
                    )
                    got = await compute(self._gateway, asked, principal, journal, ask)
                    await _told(context, got.headers)
                    reply = await asyncio.to_thread(POOLED[route].tell, body, got)
                    if got.cost:
                        reply.cost.CopyFrom(_cost(got.cost))
                    told.append(reply)

                await recorded(self._gateway, asked, work)
                return told[0]

            return await _answered(route, context, answer)

        return handler

    async def list_models(self, _: object, context: Context) -> PublicListModelsReply | None:
        async def answer(id: str, metadata: dict[str, str]) -> PublicListModelsReply:
            principal = await self._caller(metadata, "ListModels")
            models = await self._gateway.models.all()
            if embedding := self._gateway.retrieval.embedding_model:
                models.append(ModelInfo(name=embedding))
            usable = [m for m in models if principal.covers(m.name)]
            return PublicListModelsReply(models=usable)

        return await _answered("ListModels", context, answer)

    async def _caller(self, metadata: dict[str, str], route: str) -> Principal:
        principal = await self._gateway.auth.identify(metadata.get("authorization"))
        return admit(principal, _endpoint(route))

    async def _generate(self, route: str, context: Context) -> None:
        async def answer(id: str, metadata: dict[str, str]) -> None:
            await serve(self._gateway, GrpcFront(self._gateway, self._inbox, context, id, route))

        await _answered(route, context, answer)


def inference(gateway: Gateway) -> Any:
    """The service's handlers, all of them for streams of requests: so gRPC leaves a call's message
    unread until it is asked for it. On the wire one request is a stream of one."""
    service = Inference(gateway)
    events = GenerateEvent.SerializeToString
    streaming, single = grpc.stream_stream_rpc_method_handler, grpc.stream_unary_rpc_method_handler
    models = PublicListModelsReply.SerializeToString
    methods = {
        "Chat": streaming(service.chat, response_serializer=events),
        "Complete": streaming(service.complete, response_serializer=events),
        **{
            route: single(service.pooled(route), response_serializer=one.reply.SerializeToString)
            for route, one in POOLED.items()
        },
        "ListModels": single(service.list_models, response_serializer=models),
    }
    return grpc.method_handlers_generic_handler(INFERENCE, methods)


async def _answered(
    route: str, context: Context, answer: Callable[[str, dict[str, str]], Awaitable[Reply]]
) -> Reply | None:
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
    with contextlib.suppress(TimeoutError):  # the client reads nothing; what is said waits for it
        async with asyncio.timeout(_LAST_WORD_S):
            await context.abort(failure.code, failure.message, tuple(_trailers(id, failure)))
    return None


def _trailers(id: str, error: PenstockError) -> Iterable[tuple[str, str]]:
    yield "x-request-id", id
    if error.param:
        yield "x-param", _param(error.param)
    if error.retry_after_s > 0:
        yield "retry-after", str(math.ceil(error.retry_after_s))
    if isinstance(error, LimitError):
        yield from error.headers.items()


def _param(rest: str) -> str:
    if found := _STORES.match(rest):
        return "vector_store_ids" + rest[found.end() :]
    rest = _FUNCTIONS.sub(r"\1.", rest)
    for theirs, ours in _PARAMS:
        if rest == theirs or rest.startswith((theirs + "[", theirs + ".")):
            return ours + rest[len(theirs) :]
    return rest
