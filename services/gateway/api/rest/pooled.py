"""POST /v1/embeddings, /v1/score, /v1/rerank (and /v2) and /v1/classify."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson

from services.gateway.api.pooled_schema import (
    ClassifyRequest,
    EmbeddingsRequest,
    Pooled,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.api.rest.http import Exchange
from services.gateway.api.rest.openai_format import priced
from services.gateway.api.schema import parse, read_aside
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.parts import Gateway
from services.gateway.runs.numbers import Numbers
from services.gateway.runs.pooling import compute
from services.gateway.runs.recorded import recorded
from services.gateway.runs.records import Journal

B = TypeVar("B", bound=Pooled)
Told = dict[str, Any]


class _Asked(NamedTuple):
    """pipeline.Asked."""

    request_id: str
    route: str
    endpoint: str
    authorization: str | None
    traceparent: str | None


def asked_of(exchange: Exchange) -> _Asked:
    return _Asked(
        exchange.request_id,
        exchange.route,
        exchange.endpoint,
        exchange.authorization,
        exchange.headers.get("traceparent"),
    )


def endpoint(
    model: type[B], tell: Callable[[B, Numbers, Exchange], Told]
) -> Callable[[Gateway, Exchange], Awaitable[None]]:
    """Of a body of the kind `model`; `tell` makes the answer."""

    async def serve(gateway: Gateway, exchange: Exchange) -> None:
        asked = asked_of(exchange)

        async def work(principal: Principal, place: Place, journal: Journal) -> None:
            exchange.place = place
            content = await exchange.json_body()
            body, ask = await read_aside(len(content), lambda: _understood(content))
            exchange.watch_client()
            got = await compute(gateway, asked, principal, journal, ask)
            exchange.headers_out.update(got.headers)
            # 2,048 vectors are 8 MB of JSON: not on the event loop.
            answer = await asyncio.to_thread(lambda: _whole(tell(body, got, exchange), got))
            place.hold(len(answer))
            await exchange.reply(answer, "application/json")

        def _understood(content: bytes) -> tuple[B, Any]:
            body = parse(model, content, gateway.settings.gateway)
            return body, body.ask()

        await recorded(gateway, asked, work, exchange.principal)

    return serve


def _whole(told: Told, got: Numbers) -> bytes:
    told["model"] = got.model
    used = got.usage.prompt_tokens
    told["usage"] = {"prompt_tokens": used, "total_tokens": used}
    if got.cost:
        told["penstock"] = priced(got.cost)
    return orjson.dumps(told)


def _embeddings(body: EmbeddingsRequest, got: Numbers, exchange: Exchange) -> Told:
    """Vector by vector, so that this thread holds the interpreter for none of it for long."""
    data = []
    for index, values in enumerate(got.arrays()):
        coded: Any = values
        if body.encoding_format == "base64":
            coded = base64.b64encode(values.tobytes()).decode()
        told = {"object": "embedding", "index": index, "embedding": coded}
        data.append(orjson.Fragment(orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY)))
    return {"object": "list", "data": data}


def _scores(body: ScoreRequest, got: Numbers, exchange: Exchange) -> Told:
    data = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(got.scores())
    ]
    return {**_listed("score", exchange), "data": data}


def _classes(body: ClassifyRequest, got: Numbers, exchange: Exchange) -> Told:
    data = [
        {
            "index": index,
            "label": got.labels[int(np.argmax(chances))],
            "probs": chances.tolist(),
            "num_classes": len(chances),
        }
        for index, chances in enumerate(got.arrays())
    ]
    return {**_listed("classify", exchange), "data": data}


def _ranked(body: RerankRequest, got: Numbers, exchange: Exchange) -> Told:
    """Best first, of equals the first."""
    results = []
    for index, score in ranking(got.scores(), body.top_n):
        told: Told = {"index": index, "relevance_score": score}
        if body.return_documents:
            told["document"] = {"text": body.documents[index]}
        results.append(told)
    version = exchange.route.split("/")[1].removeprefix("v")
    meta = {
        "api_version": {"version": version},
        "tokens": {"input_tokens": got.usage.prompt_tokens},
    }
    return {"id": exchange.request_id, "results": results, "meta": meta}


def ranking(scores: list[float], top_n: int | None) -> list[tuple[int, float]]:
    """(index, score), the best first, of equals the first; `top_n` of them."""
    return sorted(enumerate(scores), key=lambda one: -one[1])[:top_n]


def _listed(kind: str, exchange: Exchange) -> Told:
    id = f"{kind}-{exchange.request_id.removeprefix('req_')}"
    return {"id": id, "object": "list", "created": int(time.time())}


embeddings = endpoint(EmbeddingsRequest, _embeddings)
score = endpoint(ScoreRequest, _scores)
rerank = endpoint(RerankRequest, _ranked)
classify = endpoint(ClassifyRequest, _classes)
