"""Embeddings, through the retrieval service's model."""

import asyncio
import base64
from typing import Annotated, ClassVar, Literal

import numpy as np
import orjson
from pydantic import BeforeValidator, Field

from protos.common_pb2 import Record
from protos.retrieval_pb2 import EmbedReply, EmbedRequest
from services.gateway.auth import Identity
from services.gateway.generation_schema import Name, Tag, as_list
from services.gateway.http import Exchange
from services.gateway.models import model_not_found
from services.gateway.pipeline import Gateway
from services.gateway.records import client_context
from services.gateway.schema import Body, parse_body

MAX_TEXTS = 2048


class EmbeddingsRequest(Body):
    NEUTRAL: ClassVar = {"dimensions": ()}

    model: Name
    input: Annotated[
        list[Annotated[str, Field(pattern=r"\S")]],
        Field(min_length=1, max_length=MAX_TEXTS),
        BeforeValidator(as_list),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    user: Tag | None = Field(None, description="an end user's name; embeddings keep no record")


async def embed(
    gateway: Gateway,
    identity: Identity,
    request_id: str,
    traceparent: str | None,
    model: str,
    texts: list[str],
) -> EmbedReply:
    """What REST and gRPC share. Raises NOT_FOUND for any model but retrieval's own."""
    identity.authorize(model)
    known = gateway.retrieval.embedding_model
    if known and model != known:
        raise model_not_found(model)
    record = Record()
    with gateway.telemetry.span(
        "embeddings", client_context(traceparent), request_id=request_id, texts=len(texts)
    ) as span:
        request = EmbedRequest(caller=identity.caller(request_id), texts=texts)
        reply = await gateway.retrieval.embed(request, span, record)
    gateway.telemetry.record(span)
    return reply


async def embeddings(gateway: Gateway, exchange: Exchange, identity: Identity) -> None:
    body = await parse_body(EmbeddingsRequest, await exchange.json_body())
    exchange.watch_client()
    traceparent = exchange.headers.get("traceparent")
    reply = await embed(gateway, identity, exchange.request_id, traceparent, body.model, body.input)
    # 2,048 vectors are 8 MB of JSON: not on the event loop.
    answer = await asyncio.to_thread(_answer, reply, body.encoding_format == "base64")
    exchange.place.hold(len(answer))
    await exchange.reply(answer, "application/json")


def _answer(reply: EmbedReply, as_base64: bool) -> bytes:
    """Vector by vector, so that this thread holds the interpreter for none of it for long."""
    data = []
    for index, vector in enumerate(reply.vectors):
        values = np.asarray(vector.values, dtype="<f4")
        coded = base64.b64encode(values.tobytes()).decode() if as_base64 else values
        told = {"object": "embedding", "index": index, "embedding": coded}
        data.append(orjson.Fragment(orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY)))
    usage = {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens}
    return orjson.dumps({"object": "list", "data": data, "model": reply.model, "usage": usage})
