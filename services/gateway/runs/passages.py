"""What a prompt's vector stores have on its question."""

import asyncio
from collections.abc import Sequence

from protos.common_pb2 import Caller, Searched
from protos.retrieval_pb2 import SearchReply, SearchRequest
from services.common.errors import PenstockError
from services.common.telemetry.spans import Span
from services.gateway import metrics
from services.gateway.identity.principal import Principal
from services.gateway.metering.estimate import of_texts
from services.gateway.metering.meter import Metered
from services.gateway.metering.refusals import LimitError
from services.gateway.parts import Gateway
from services.gateway.runs.prompt import Prompt
from services.gateway.runs.questions import Questions
from services.gateway.runs.records import Journal
from services.gateway.runs.reranking import Reranking
from services.gateway.runs.rewriting.asking import whole_question
from services.gateway.stores.retrieval.client import is_outage
from services.gateway.stores.retrieval.joining import chunks_of, joined
from services.gateway.stores.retrieval.searching import (
    fused,
    model_warnings,
    searched_by,
    stale_warning,
    usage_of,
)
from services.gateway.stores.vector_stores.store_files import Unready

ROUTE = "search"  # in the ledger


async def retrieve(
    gateway: Gateway,
    principal: Principal,
    caller: Caller,
    prompt: Prompt,
    files: Unready,
    metered: Metered,
    warnings: list[str],
    journal: Journal,
) -> None:
    """Adds passages to the prompt, or says in the warnings why there are none. `files`: of its
    stores. Raises PERMISSION_DENIED where he may not use the embedding model, and what limits
    raise."""
    query = await whole_question(gateway, principal, prompt, metered, journal)
    request = SearchRequest(
        caller=caller,
        collections=prompt.stores,
        query=query.text,
        limit=prompt.max_chunks,
        score_threshold=prompt.score_threshold,
        filter=prompt.filter,
        ranking=prompt.ranking,
        max_age_s=files.max_age_s,
        similar_at_least=files.similar_at_least,
    )
    reranking = Reranking(gateway, prompt.ranking)
    wide = reranking.widened(request)
    with gateway.telemetry.span("retrieve", stores=len(prompt.stores)) as searching:
        try:
            reply = await _search(
                gateway, principal, metered, wide, files, warnings, searching, journal
            )
        except LimitError:
            raise
        except PenstockError as error:
            if not is_outage(error):
                raise
            cause = error.reason or error.code.name.lower()
            metrics.retrieval_skipped.labels(error.code.name.lower()).inc()
            journal.decide("retrieval", "skipped", cause=cause, message=error.message)
            warnings.append(f"answered without the vector stores: {error.message}")
            return
        found = [(request, reply)]
        await reranking.rank(principal, metered, found, searching, journal.below)
        passages = joined(chunks_of(reply))
        searching.set_attributes({"chunks": len(reply.passages), "passages": len(passages)})
    prompt.search = Searched(
        query=query.text,
        rewritten=query.by,
        tokens=reply.tokens,
        age_s=reply.age_s,
        stale=reply.stale,
        reranked=reranking.by,
        not_reranked=reranking.failed,
    )
    if reply.stale:
        warnings.append(stale_warning(reply.age_s))
    warnings.extend(model_warnings([reply]))
    best = passages[0].score if passages else 0.0
    told = {"age_s": reply.age_s} if reply.age_s else {}
    how = "stale" if reply.stale else "told again" if reply.age_s else "searched"
    journal.decide("retrieval", how, passages=len(passages), best_score=best, **told)
    if reranking.by:
        journal.decide("passages", "reranked", model=reranking.by)
    elif reranking.failed:
        journal.decide("passages", "left", model=reranking.model, why=reranking.failed)
    prompt.request.chat.passages.extend(passages)
    prompt.request.chat.searched = True


async def _search(
    gateway: Gateway,
    principal: Principal,
    metered: Metered,
    request: SearchRequest,
    files: Unready,
    warnings: list[str],
    span: Span,
    journal: Journal,
) -> SearchReply:
    """Of stores with several embedding models one for each of these, told as one. What of them
    cannot be searched a warning says; raises what the first does where none can."""
    await gateway.retrieval.model(gateway.settings.retrieval.timeout_s)
    of_models: dict[str, list[str]] = {}
    for store in request.collections:
        embedder, missing = searched_by(gateway.retrieval, files.models.get(store, ""))
        of_models.setdefault(embedder, []).append(store)
        warnings.extend([f"{store}: {missing}"] if missing else [])

    async def of(number: int, embedder: str, stores: Sequence[str]) -> SearchReply | PenstockError:
        one = SearchRequest(embedder=embedder)
        one.MergeFrom(request)
        del one.collections[:]
        one.collections.extend(stores)
        part = f":{number}" if number else ""
        try:
            return await _search_one(
                gateway, principal, metered, one, part, warnings, span, journal
            )
        except PenstockError as error:
            if isinstance(error, LimitError) or not is_outage(error):
                raise
            return error

    each = [of(number, *one) for number, one in enumerate(of_models.items())]
    try:
        async with asyncio.TaskGroup() as group:
            searches = [group.create_task(one) for one in each]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    outcomes = [one.result() for one in searches]
    replies = [one for one in outcomes if isinstance(one, SearchReply)]
    failures = [one for one in outcomes if isinstance(one, PenstockError)]
    if not replies:
        raise failures[0]
    for stores, outcome in zip(of_models.values(), outcomes, strict=True):
        if isinstance(outcome, PenstockError):
            warnings.append(f"answered without {', '.join(stores)}: {outcome.message}")
    return fused(replies, request.limit)


async def _search_one(
    gateway: Gateway,
    principal: Principal,
    metered: Metered,
    request: SearchRequest,
    part: str,
    warnings: list[str],
    span: Span,
    journal: Journal,
) -> SearchReply:
    """At the embedding model's price, under its own line in the ledger."""
    model = request.embedder or gateway.retrieval.embedding_model
    questions = Questions(gateway, request.embedder)
    principal.authorize_embedding(model)
    most = (of_texts([request.query]), 0)
    async with gateway.meter.beside(metered, principal, ROUTE, model, most, part) as beside:
        await questions.embed(principal, beside, [request], span, journal.below)
        reply = await gateway.retrieval.search_for_chat(request, span, journal.below)
        warnings.extend(filter(None, [questions.settle([reply])]))
        beside.usage = lambda: usage_of([reply])
    return reply
