"""A search of one vector store by itself, metered as a request."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from protos.common_pb2 import Passage, Record, Usage
from protos.retrieval_pb2 import Filter, Ranking, SearchReply, SearchRequest
from services.gateway.identity.principal import Principal
from services.gateway.metering.estimate import of_texts
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway
from services.gateway.runs.questions import Questions
from services.gateway.runs.reranking import Reranking
from services.gateway.stores.retrieval.client import RetrievalClient
from services.gateway.stores.retrieval.joining import best_of, chunks_of, joined, put


def searched_by(retrieval: RetrievalClient, chosen: str) -> tuple[str, str]:
    """The name of the embedding model by which a store that has chosen this one is searched, empty
    for the installation's; and what a client should know of it."""
    if chosen in ("", retrieval.embedding_model):
        return "", ""
    if retrieval.has(chosen):
        return chosen, ""
    return "", f"the embedding model '{chosen}' is not there: its files are found by words alone"


class Search(NamedTuple):
    """What is searched for."""

    store: str  # its id
    queries: Sequence[str]
    limit: int  # chunks, of all queries together
    threshold: float  # 0 to 1; of passages with a lower score none
    filter: Filter | None = None
    ranking: Ranking | None = None


class Found(NamedTuple):
    passages: Sequence[Passage]  # best first
    warning: str  # what is not searched; empty: nothing
    tokens: int  # of the queries
    cost: Cost | None
    headers: Mapping[str, str]
    age_s: float  # since the search was made; 0: for this request
    reranking: Reranking


async def search(
    gateway: Gateway, request_id: str, route: str, principal: Principal, asked: Search
) -> Found:
    """Raises NOT_FOUND for a store of others, and what limits and retrieval raise."""
    unready = await gateway.stores.searched(principal.tenant, [asked.store])
    model = await gateway.retrieval.model()
    chosen = unready.models.get(asked.store, "")
    embedder, no_model = searched_by(gateway.retrieval, chosen)
    model = embedder or model
    reranking, questions = Reranking(gateway, asked.ranking), Questions(gateway, embedder)
    requests = [
        SearchRequest(
            caller=principal.caller(request_id),
            collections=[asked.store],
            query=query,
            limit=asked.limit,
            score_threshold=asked.threshold,
            judged=True,
            filter=asked.filter,
            ranking=asked.ranking,
            max_age_s=unready.max_age_s,
            similar_at_least=unready.similar_at_least,
            embedder=embedder,
        )
        for query in asked.queries
    ]
    principal.authorize_embedding(model)
    expected = (of_texts(asked.queries), 0)
    with gateway.telemetry.lone_span("search", request_id=request_id) as span:
        async with gateway.meter.run(principal, request_id, route, model, expected) as metered:
            await questions.embed(principal, metered, requests, span, Record())
            searches = [
                asyncio.create_task(
                    gateway.retrieval.search(reranking.widened(request), span, Record())
                )
                for request in requests
            ]
            try:
                replies = await asyncio.gather(*searches)
            finally:
                for one in searches:
                    one.cancel()
            no_vectors = questions.settle(replies)
            used = usage_of(replies)
            metered.usage = lambda: used
            found = list(zip(requests, replies, strict=True))
            await reranking.rank(principal, metered, found, span, Record())
            await gateway.meter.settle(metered)
    age_s = max(reply.age_s for reply in replies)
    stale = any(reply.stale for reply in replies)
    warnings = [
        unready.warning(),
        no_model,
        no_vectors,
        stale_warning(age_s) if stale else "",
        *model_warnings(replies),
    ]
    return Found(
        joined(best_of(replies, asked.limit)),
        "; ".join(filter(None, warnings)),
        used.prompt_tokens,
        metered.cost,
        metered.headers,
        age_s,
        reranking,
    )


def model_warnings(replies: Sequence[SearchReply]) -> Iterator[str]:
    """What a client should know of what an earlier embedding model indexed."""
    if ids := ", ".join(sorted({store for reply in replies for store in reply.by_words})):
        yield (
            f"files of {ids} were indexed by an earlier embedding model and are found by their "
            "words alone until they are indexed anew"
        )
    if any(reply.incomplete for reply in replies):
        yield (
            "some of what an earlier embedding model indexed cannot be read: files that are not "
            "found are to be attached again"
        )


def fused(replies: Sequence[SearchReply], limit: int) -> SearchReply:
    """Searches by several embedding models as one. Their scores are of several kinds, so chunks
    come in turns, each model's best first."""
    if len(replies) == 1:
        return replies[0]
    ranked = [(rank, one) for reply in replies for rank, one in enumerate(chunks_of(reply))]
    ranked.sort(key=lambda placed: placed[0])
    made = SearchReply(
        tokens=sum(reply.tokens for reply in replies),
        by_words={store for reply in replies for store in reply.by_words},
        age_s=max(reply.age_s for reply in replies),
        stale=any(reply.stale for reply in replies),
        cached=all(reply.cached for reply in replies),
        incomplete=any(reply.incomplete for reply in replies),
    )
    put((chunk for _, chunk in ranked[:limit]), made)
    return made


def usage_of(replies: Iterable[SearchReply]) -> Usage:
    """A query that was embedded before is charged as what the prefix cache has of a prompt."""
    told = [(reply.tokens, reply.tokens if reply.cached else 0) for reply in replies]
    tokens, cached = map(sum, zip(*told, strict=True))
    return Usage(prompt_tokens=tokens, cached_tokens=cached)


def stale_warning(age_s: float) -> str:
    return f"the vector stores are away: passages are of a search {max(1, round(age_s))} s ago"
