"""Embeddings, through the retrieval service's model."""

import asyncio
import base64
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import orjson
from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from protos.common_pb2 import Record, Usage
from protos.retrieval_pb2 import EmbedReply, EmbedRequest
from services.common.errors import PenstockError
from services.common.fair_threads import FairThreads
from services.gateway.api.generation_schema import Name, Tag
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.openai_format import priced
from services.gateway.api.schema import Body, parse_body, refuse
from services.gateway.identity.principal import Principal
from services.gateway.metering.estimate import of_texts
from services.gateway.metering.meter import Metered
from services.gateway.metering.prices import Cost
from services.gateway.models import model_not_found
from services.gateway.runs.pipeline import Gateway
from services.gateway.runs.records import client_context

MAX_TEXTS = 2048


def _as_inputs(value: Any) -> Any:
    """OpenAI's four forms of `input` (a text, token ids, a list of either) as a list."""
    many = isinstance(value, list) and value and isinstance(value[0], str | list)
    return value if many else [value]


def _said(one: Any) -> str | list[Any]:
    if not isinstance(one, str | list):
        raise refuse("", "must be a text, or a list of token ids")
    if not one or (isinstance(one, str) and not one.strip()):
        raise refuse("", "must not be empty")
    return one


class EmbeddingsRequest(Body):
    NEUTRAL: ClassVar = {"dimensions": ()}

    model: Name
    input: Annotated[
        list[Annotated[Any, AfterValidator(_said)]],
        Field(min_length=1, max_length=MAX_TEXTS),
        FailFast(),
        BeforeValidator(_as_inputs),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    user: Tag | None = Field(None, description="an end user's name; embeddings keep no record")

    async def texts(self, threads: FairThreads, tenant: str, max_bytes: int) -> list[str]:
        """What is to be embedded; token ids are decoded in a thread (openai_tokens.py), which takes
        seconds for 8 MB of text."""
        if all(isinstance(one, str) for one in self.input):
            return [str(one) for one in self.input]
        return await threads.run(tenant, lambda: _texts_of(self.input, max_bytes))


def _texts_of(given: list[str | list[Any]], max_bytes: int) -> list[str]:
    from services.gateway.api.openai_tokens import texts_of  # 30 MB that few installs need

    return texts_of(given, "input", max_bytes)


class EmbedCall(NamedTuple):
    """One request as its protocol has it."""

    request_id: str
    route: str
    traceparent: str | None


async def embed(
    gateway: Gateway, principal: Principal, asked: EmbedCall, model: str, texts: list[str]
) -> tuple[EmbedReply, Metered]:
    """What REST and gRPC share. Raises NOT_FOUND for any model but retrieval's own."""
    principal.authorize(model)
    known = gateway.retrieval.embedding_model
    if known and model != known:
        raise model_not_found(model)
    id, most = asked.request_id, (of_texts(texts), 0)
    with gateway.telemetry.lone_span(
        "embeddings", client_context(asked.traceparent), request_id=id, texts=len(texts)
    ) as span:
        async with gateway.meter.run(principal, id, asked.route, model, most) as metered:
            request = EmbedRequest(caller=principal.caller(id), texts=texts)
            try:
                reply = await gateway.retrieval.embed(request, span, Record())
            except PenstockError as error:
                _name_as_the_client_does(error)
                raise
            metered.usage = lambda: Usage(prompt_tokens=reply.tokens)
            await gateway.meter.settle(metered)
    return reply, metered


async def embeddings(gateway: Gateway, exchange: Exchange, principal: Principal) -> None:
    body = await parse_body(EmbeddingsRequest, await exchange.json_body())
    exchange.watch_client()
    asked = EmbedCall(exchange.request_id, exchange.route, exchange.headers.get("traceparent"))
    limit = gateway.settings.gateway.body_limit_bytes
    texts = await body.texts(gateway.threads, principal.tenant, limit)
    reply, metered = await embed(gateway, principal, asked, body.model, texts)
    exchange.headers_out.update(metered.headers)
    # 2,048 vectors are 8 MB of JSON: not on the event loop.
    answer = await asyncio.to_thread(_answer, reply, body.encoding_format == "base64", metered.cost)
    exchange.place.hold(len(answer))
    await exchange.reply(answer, "application/json")


def _name_as_the_client_does(error: PenstockError) -> None:
    """Retrieval's `texts[3]` is `input[3]` here."""
    if error.param.startswith("texts"):
        ours = "input" + error.param.removeprefix("texts")
        error.message = error.message.replace(error.param, ours)
        error.param = ours


def _answer(reply: EmbedReply, as_base64: bool, cost: Cost | None) -> bytes:
    """Vector by vector, so that this thread holds the interpreter for none of it for long."""
    data = []
    for index, vector in enumerate(reply.vectors):
        values = np.asarray(vector.values, dtype="<f4")
        coded = base64.b64encode(values.tobytes()).decode() if as_base64 else values
        told = {"object": "embedding", "index": index, "embedding": coded}
        data.append(orjson.Fragment(orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY)))
    usage = {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens}
    told = {"object": "list", "data": data, "model": reply.model, "usage": usage}
    return orjson.dumps({**told, "penstock": priced(cost)} if cost else told)
