"""Search: the question is embedded, looked for and ranked, within its time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from protos import retrieval_pb2 as pb
from services.common.errors import invalid, unavailable
from services.common.policy import Subject
from services.common.telemetry.spans import Span
from services.retrieval import metrics, requests
from services.retrieval.cache.searches import Embedded
from services.retrieval.index import attributes
from services.retrieval.index.fusing import most_read
from services.retrieval.index.points import BOTH, Found, Weights
from services.retrieval.index.store import Store
from services.retrieval.pipeline.judging import check_passages, checked, policy_of
from services.retrieval.pipeline.parts import Parts
from services.retrieval.search.passages import passages_of, unlike
from services.retrieval.search.ranking import CLOSELY, beside, by_tokens
from services.retrieval.served_model import ServedModel
from services.retrieval.token_vectors import few

_FETCHED = 24  # chunks at least, by meaning and by words
_MORE, _MOST_FETCHED = 8, 2048  # so many times more where copies fill them, up to so many
_NO_TOKENS = np.empty((0, 1), np.float32)
_EMBEDDING_SHARE = 0.5  # of a search's time, at most: the store is to have some, too


async def search(
    parts: Parts, request: pb.SearchRequest, span: Span, within_s: float
) -> pb.SearchReply:
    """What is found, or was found before (cache/searches.py). Within `within_s` it is found or
    not."""
    requests.check_search(request)
    parts = parts.of_model(request.embedder)
    tenant, policy = request.caller.tenant, policy_of(parts, request.policy)
    if request.judged and policy.texts.has("input"):
        subjects = [Subject("query", "input", request.query, "user")]
        (request.query,) = await checked(parts, policy, tenant, subjects, span)
    # Words are looked for, and results kept, of what the model reads: a query may have megabytes.
    request.query = parts.model.reader.ends(request.query)
    until = time.monotonic() + within_s
    reply = await parts.searches.find(
        request,
        lambda: _embedded(parts, request, span, within_s * _EMBEDDING_SHARE),
        lambda query: _looked_up(parts, request, query, span, until - time.monotonic()),
        span,
    )
    if request.judged and policy.texts.has("retrieved"):
        await check_passages(parts, policy, tenant, reply, span)
    metrics.SEARCH_PASSAGES.observe(len(reply.passages))
    return reply


async def _embedded(
    parts: Parts, request: pb.SearchRequest, span: Span, within_s: float
) -> Embedded:
    """A question longer than the window is embedded by its two ends; the span says so."""
    if isinstance(parts.model, ServedModel):
        return _told(parts.model, request)
    if request.HasField("vector"):
        why = f"{parts.model.name!r} is one of retrieval's own embedding models"
        raise invalid(f"vector: {why}", "vector", stage="retrieval")
    tenant = request.caller.tenant
    with parts.telemetry.span("embed", span) as step:
        async with stage("the embedding model", "embedder_slow", within_s):
            query = await parts.questions.run(
                tenant, lambda: parts.model.reader.query(request.query)
            )
            step.set_attributes({"tokens": len(query.ids), "tokens_cut": query.cut})
            (read,) = await parts.embedder.read(tenant, [query.ids], lambda read: read)
    return Embedded(read.vector, len(query.ids), few(read.tokens))


def _told(model: ServedModel, request: pb.SearchRequest) -> Embedded:
    """By who asks; what it cost he knows. Without it the words are looked for alone."""
    vector = np.empty(0, np.float32)
    if request.HasField("vector"):
        (vector,) = model.vectors([request.vector], 1)
    return Embedded(vector, 0, _NO_TOKENS)


async def _looked_up(
    parts: Parts, request: pb.SearchRequest, query: Embedded, span: Span, within_s: float
) -> pb.SearchReply:
    weights = _weights(request.ranking)
    if not len(query.late):  # of a served model's texts none are kept
        weights = weights._replace(late=0.0)
    with parts.telemetry.span("store", span, kind=parts.calls.kind) as step:
        async with stage("the vector store", "store_slow", within_s):
            found = await _found(parts.store, request, query, weights)
        by_words = sum(hit.sparse > 0 for hit in found.hits) + len(found.earlier)
        step.set_attributes({"found": len(found.hits), "by_words": by_words})
    with parts.telemetry.span("rank", span) as step:
        near = by_tokens(found.hits, query.late, weights) if weights.late else found.hits
        ranked = beside(near, found.earlier)
        reply = passages_of(ranked, request.score_threshold, request.limit)
        late = sum(one.late is not None for one in ranked)
        step.set_attributes({"by_tokens": late, "passages": len(reply.passages)})
        if reply.passages:
            step.set_attribute("best_score", round(reply.passages[0].score, 4))
    reply.by_words.extend(sorted({hit.payload["collection"] for hit in found.earlier}))
    reply.incomplete = found.incomplete
    return reply


async def _found(
    store: Store, request: pb.SearchRequest, query: Embedded, weights: Weights
) -> Found:
    """More hits than chunks are wanted, for what ranks best by both to be among them; and more yet
    where copies of one text took the places of so many that too few others are left."""
    fetched = max(_FETCHED, 4 * request.limit)
    while True:
        found = await store.search(
            request.caller.tenant,
            request.collections,
            query.vector,
            request.query,
            fetched,
            attributes.condition(request.filter) if request.HasField("filter") else None,
            weights,
            CLOSELY if weights.late else 0,
        )
        hits = [*found.hits, *found.earlier]
        no_more = len(hits) < most_read(fetched) or fetched >= _MOST_FETCHED
        if no_more or len(unlike(hits, request.limit)) == request.limit:
            return found
        fetched = min(_MORE * fetched, _MOST_FETCHED)


@asynccontextmanager
async def stage(what: str, reason: str, within_s: float) -> AsyncIterator[None]:
    """One step of a search, which ends in time for another to do without it. Raises UNAVAILABLE."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        why = f"{what} did not answer within {max(0.0, within_s):.2g} s"
        raise unavailable(why, stage="retrieval", reason=reason) from None


def _weights(ranking: pb.Ranking) -> Weights:
    if ranking.ranker == pb.Ranking.NONE:
        return Weights(1.0, 0.0, 0.0)
    given = Weights(ranking.embedding_weight, ranking.text_weight, ranking.late_weight)
    return given if given.embedding + given.text else BOTH
