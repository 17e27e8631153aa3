"""Embed, Score, Rerank and Classify: REST's requests in gRPC's shape, by REST's rules."""

from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.message import Message

from protos.common_pb2 import Pooling
from protos.gateway_pb2 import (
    PublicClassifyReply,
    PublicClassifyRequest,
    PublicEmbedReply,
    PublicEmbedRequest,
    PublicRerankReply,
    PublicRerankRequest,
    PublicScoreReply,
    PublicScoreRequest,
)
from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.api.pooled_schema import (
    MAX_INPUTS,
    ClassifyRequest,
    EmbeddingsRequest,
    Pooled,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.api.rest.pooled import ranking
from services.gateway.api.schema import validated
from services.gateway.runs.numbers import Numbers
from services.gateway.runs.pooling import Ask, rename

Fields = dict[str, Any]
ONE_MORE = MAX_INPUTS + 1  # is enough to be refused
_OfInputs = PublicEmbedRequest | PublicClassifyRequest
_POOLINGS = {Pooling.LAST: "last", Pooling.MEAN: "mean"}


class Kind(NamedTuple):
    """One of the calls."""

    request: type[Message]
    fields: Callable[[Any], Fields]
    """In REST's shape."""
    body: type[Pooled]
    tell: Callable[[Any, Numbers], Any]
    """The reply."""
    reply: Any


def understood(
    inbox: Inbox, route: str, message: bytes, limits: GatewaySettings
) -> tuple[Pooled, Ask]:
    """Blocking. Raises INVALID_ARGUMENT."""
    kind = POOLED[route]
    request = inbox.parse(kind.request, message)
    by_ids = isinstance(request, _OfInputs) and request.token_ids
    try:
        body = validated(kind.body, kind.fields(request), limits)
        ask = body.ask()
    except PenstockError as error:
        if by_ids:
            rename(error, [("input", "token_ids")])
        raise
    if by_ids:
        ask.called = [("inputs", "token_ids")]
    return body, ask


def _inputs(request: _OfInputs) -> Fields:
    if request.texts and request.token_ids:
        raise invalid("Texts or token ids, not both.", "token_ids")
    ids = [list(one.ids) for one in request.token_ids[:ONE_MORE]]
    return {"model": request.model, "input": ids or list(request.texts[:ONE_MORE])}


def _to_embed(request: PublicEmbedRequest) -> Fields:
    fields = _inputs(request)
    if request.HasField("dimensions"):
        fields["dimensions"] = request.dimensions
    if request.HasField("pooling"):
        if request.pooling not in _POOLINGS:
            raise invalid("LAST or MEAN is what embeddings are made of.", "pooling")
        fields["pooling"] = _POOLINGS[request.pooling]
    return fields


def _to_score(request: PublicScoreRequest) -> Fields:
    queries, documents = request.queries[:ONE_MORE], request.documents[:ONE_MORE]
    return {"model": request.model, "queries": list(queries), "documents": list(documents)}


def _to_rerank(request: PublicRerankRequest) -> Fields:
    fields: Fields = {"model": request.model, "query": request.query}
    if request.HasField("top_n"):
        fields["top_n"] = request.top_n
    return {**fields, "documents": list(request.documents[:ONE_MORE])}


def _embedded(body: EmbeddingsRequest, got: Numbers) -> PublicEmbedReply:
    reply = PublicEmbedReply(tokens=got.usage.prompt_tokens)
    for values in got.arrays():
        reply.vectors.add(values=values)
    return reply


def _scored(body: ScoreRequest, got: Numbers) -> PublicScoreReply:
    return PublicScoreReply(scores=got.scores(), tokens=got.usage.prompt_tokens)


def _ranked(body: RerankRequest, got: Numbers) -> PublicRerankReply:
    reply = PublicRerankReply(tokens=got.usage.prompt_tokens)
    for index, score in ranking(got.scores(), body.top_n):
        reply.results.add(index=index, score=score)
    return reply


def _classified(body: ClassifyRequest, got: Numbers) -> PublicClassifyReply:
    reply = PublicClassifyReply(labels=got.labels, tokens=got.usage.prompt_tokens)
    for chances in got.arrays():
        reply.results.add(probabilities=chances)
    return reply


POOLED = {
    "Embed": Kind(PublicEmbedRequest, _to_embed, EmbeddingsRequest, _embedded, PublicEmbedReply),
    "Score": Kind(PublicScoreRequest, _to_score, ScoreRequest, _scored, PublicScoreReply),
    "Rerank": Kind(PublicRerankRequest, _to_rerank, RerankRequest, _ranked, PublicRerankReply),
    "Classify": Kind(
        PublicClassifyRequest, _inputs, ClassifyRequest, _classified, PublicClassifyReply
    ),
}
