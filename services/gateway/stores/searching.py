"""A search of one vector store by itself, metered as a request."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protos.common_pb2 import Passage, Record, Usage
from protos.retrieval_pb2 import SearchRequest
from services.gateway.identity.principal import Principal
from services.gateway.metering.estimate import of_texts
from services.gateway.metering.prices import Cost
from services.gateway.parts import Gateway


class Search(NamedTuple):
    """What is searched for."""

    store: str  # its id
    query: str
    limit: int  # passages
    threshold: float  # 0 to 1; of less similar passages none


class Found(NamedTuple):
    passages: Sequence[Passage]  # best first
    warning: str  # what is not searched; empty: nothing
    tokens: int  # of the query
    cost: Cost | None
    headers: Mapping[str, str]


async def search(
    gateway: Gateway, request_id: str, route: str, principal: Principal, asked: Search
) -> Found:
    """Raises NOT_FOUND for a store of others, and what limits and retrieval raise."""
    unready = await gateway.stores.unready(principal.tenant, asked.store)
    request = SearchRequest(
        caller=principal.caller(request_id),
        collections=[asked.store],
        query=asked.query,
        limit=asked.limit,
        score_threshold=asked.threshold,
        judged=True,
    )
    model = await gateway.retrieval.model()
    principal.authorize_embedding(model)
    expected = (of_texts([asked.query]), 0)
    with gateway.telemetry.lone_span("search", request_id=request_id) as span:
        async with gateway.meter.run(principal, request_id, route, model, expected) as metered:
            reply = await gateway.retrieval.search(request, span, Record())
            metered.usage = lambda: Usage(prompt_tokens=reply.tokens)
            await gateway.meter.settle(metered)
    return Found(reply.passages, unready.warning(), reply.tokens, metered.cost, metered.headers)
