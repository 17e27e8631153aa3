"""What retrieval does for each of its calls, step by step; each step is a span."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from protos import common_pb2
from protos import retrieval_pb2 as pb
from services.common.blobs import Blobs, NoBlobError
from services.common.config import RetrievalSettings
from services.common.errors import PenstockError, invalid, unavailable
from services.common.fair_threads import FairThreads
from services.common.policy import Policy, PolicyFile, Subject
from services.common.policy.metrics import VERDICTS
from services.common.spans import Span
from services.common.telemetry import Telemetry
from services.retrieval import metrics, requests
from services.retrieval.cache.searches import Embedded, Searches
from services.retrieval.documents import loading
from services.retrieval.documents.chunkers import Chunkers, CutDocument, Loaded
from services.retrieval.embedder import Embedder
from services.retrieval.embedding_model import EmbeddingModel
from services.retrieval.index import attributes
from services.retrieval.index.calls import Calls
from services.retrieval.index.points import Found
from services.retrieval.index.store import Draft, Store
from services.retrieval.prototypes import Prototypes
from services.retrieval.search.passages import passages_of
from services.retrieval.search.ranking import Ranked, Weights, beside, by_both, by_meaning

_FETCHED = 24  # passages at least, by meaning and by words
_STORED_AT_ONCE = 64  # chunks: what waits for the model is bounded, and what a kill does again
_CHECKED_CHARS = 500_000  # of a document, by the policy at once
_EMBEDDING_SHARE = 0.5  # of a search's time, at most: the store is to have some, too


@dataclass(frozen=True)
class Parts:
    """What the calls work with."""

    settings: RetrievalSettings
    blobs: Blobs
    telemetry: Telemetry
    model: EmbeddingModel
    chunkers: Chunkers
    embedder: Embedder
    calls: Calls
    store: Store
    policy: PolicyFile
    prototypes: Prototypes
    searches: Searches
    # A search's question is tokenized in a millisecond, thousands of texts to embed in seconds.
    questions: FairThreads = field(default_factory=lambda: FairThreads(1, "question"))
    texts: FairThreads = field(default_factory=lambda: FairThreads(1, "texts"))


async def embed(parts: Parts, request: pb.EmbedRequest, span: Span) -> pb.EmbedReply:
    """A text longer than the model's window is refused, never embedded in part."""
    requests.check_embed(request)
    reader = parts.model.reader
    tenant, policy, given = request.caller.tenant, _policy(parts, request.policy), [*request.texts]
    for i, one in enumerate(given):
        if reader.hopeless(one):  # what is refused anyway costs the policy nothing
            raise _too_long(i, reader.max_tokens)
    if policy.texts.has("input"):
        subjects = [Subject(f"texts[{i}]", "input", t, "user") for i, t in enumerate(given)]
        given = await _checked(parts, policy, tenant, subjects, span)
    texts = await parts.texts.run(tenant, lambda: [reader.text(t) for t in given])
    for i, text in enumerate(texts):
        if text.cut:
            raise _too_long(i, reader.max_tokens)
    tokens = sum(len(text.ids) for text in texts)
    span.set_attributes({"texts": len(texts), "tokens": tokens})
    vectors = await parts.embedder.embed(tenant, [text.ids for text in texts])
    return pb.EmbedReply(
        model=parts.model.name, vectors=[pb.Vector(values=v) for v in vectors], tokens=tokens
    )


def _too_long(number: int, window: int) -> PenstockError:
    return invalid(
        f"texts[{number}] is longer than the model's window of {window} tokens",
        f"texts[{number}]",
        reason="context_length_exceeded",
        stage="retrieval",
    )


async def search(
    parts: Parts, request: pb.SearchRequest, span: Span, within_s: float
) -> pb.SearchReply:
    """What is found, or was found before (cache/searches.py). Within `within_s` it is found or
    not."""
    requests.check_search(request)
    tenant, policy = request.caller.tenant, _policy(parts, request.policy)
    if request.judged and policy.texts.has("input"):
        subjects = [Subject("query", "input", request.query, "user")]
        (request.query,) = await _checked(parts, policy, tenant, subjects, span)
    until = time.monotonic() + within_s
    reply = await parts.searches.find(
        request,
        lambda: _embedded(parts, request, span, within_s * _EMBEDDING_SHARE),
        lambda query: _looked_up(parts, request, query, span, until - time.monotonic()),
        span,
    )
    if request.judged and policy.texts.has("retrieved"):
        await _check_passages(parts, policy, tenant, [*reply.passages], span)
    metrics.SEARCH_PASSAGES.observe(len(reply.passages))
    return reply


async def _embedded(
    parts: Parts, request: pb.SearchRequest, span: Span, within_s: float
) -> Embedded:
    """A question longer than the window is embedded by its two ends; the span says so."""
    tenant = request.caller.tenant
    with parts.telemetry.span("embed", span) as step:
        async with stage("the embedding model", "embedder_slow", within_s):
            query = await parts.questions.run(
                tenant, lambda: parts.model.reader.query(request.query)
            )
            step.set_attributes({"tokens": len(query.ids), "tokens_cut": query.cut})
            (vector,) = await parts.embedder.embed(tenant, [query.ids])
    return Embedded(vector, len(query.ids))


async def _looked_up(
    parts: Parts, request: pb.SearchRequest, query: Embedded, span: Span, within_s: float
) -> pb.SearchReply:
    with parts.telemetry.span("store", span, kind=parts.calls.kind) as step:
        async with stage("the vector store", "store_slow", within_s):
            found = await parts.store.search(
                request.caller.tenant,
                request.collections,
                query.vector,
                request.query,
                _fetched(request.limit),
                attributes.condition(request.filter) if request.HasField("filter") else None,
            )
        by_words = len(found.sparse) + len(found.earlier)
        step.set_attributes({"by_meaning": len(found.dense), "by_words": by_words})
    with parts.telemetry.span("rank", span) as step:
        ranked = _ranked(found, query.vector, request.ranking)
        passages = passages_of(ranked, request.score_threshold, request.limit)
        step.set_attribute("passages", len(passages))
        if passages:
            step.set_attribute("best_score", round(passages[0].score, 4))
    by_words_alone = sorted({hit.payload["collection"] for hit in found.earlier})
    return pb.SearchReply(passages=passages, by_words=by_words_alone)


@asynccontextmanager
async def stage(what: str, reason: str, within_s: float) -> AsyncIterator[None]:
    """One step of a search, which ends in time for another to do without it. Raises UNAVAILABLE."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        why = f"{what} did not answer within {max(0.0, within_s):.2g} s"
        raise unavailable(why, stage="retrieval", reason=reason) from None


def _fetched(limit: int) -> int:
    """More than are wanted, for what ranks best by both to be among them."""
    return max(_FETCHED, 4 * limit)


def _ranked(found: Found, question: np.ndarray, ranking: pb.Ranking) -> list[Ranked]:
    if ranking.ranker == pb.Ranking.NONE:
        return beside(by_meaning(found.dense), found.earlier)
    given = Weights(ranking.embedding_weight, ranking.text_weight)
    weights = given if given.embedding + given.text else Weights()
    return beside(by_both(found, question, weights), found.earlier)


Tell = Callable[[pb.IndexNews], Awaitable[object]]


async def index(parts: Parts, request: pb.IndexRequest, span: Span, tell: Tell) -> None:
    """Until the last step is done, searches find the document's earlier text, beside what is stored
    of the new one. What is broken off (a killed service, a client that is gone) stays stored, for
    who asks again; what fails is taken back."""
    reader, own, tenant = parts.model.reader, parts.settings, request.caller.tenant
    requests.check_index(request, reader.max_tokens - reader.special_tokens)
    if not request.blob.startswith(parts.blobs.key(tenant, "")):
        raise _no_blob()
    policy, cut = _policy(parts, request.policy), request.chunking
    chunking = own.chunk_tokens, own.chunk_overlap_tokens
    if cut.max_tokens:
        chunking = cut.max_tokens, cut.overlap_tokens
    digest = await _digest(parts, request, policy, chunking)
    place = request.collection, request.source_id
    draft = await parts.store.draft(tenant, *place, digest, request.revision, request.attributes)
    if draft.complete:
        span.set_attribute("stored", "before")
        chunks = len(draft.stored)
        await parts.store.publish(draft, chunks)
        await tell(pb.IndexNews(reply=pb.IndexReply(chunks=chunks)))
        return
    try:
        loaded, document = await _read(parts, request, policy, chunking, span)
        async with asyncio.timeout(own.index_timeout_s):
            await _store(parts, policy, draft, document, span, tell)
    except (PenstockError, TimeoutError):
        parts.store.discard(draft)
        raise
    chunks, tokens = len(document.chunks), sum(map(len, document.texts))
    await parts.store.publish(draft, chunks)
    reply = pb.IndexReply(chunks=chunks, tokens=tokens, note=loaded.note)
    await tell(pb.IndexNews(reply=reply))


async def _digest(
    parts: Parts, request: pb.IndexRequest, policy: Policy, chunking: tuple[int, int]
) -> str:
    """Of all that the document's chunks are made from."""
    made_from = (loading.VERSION, chunking, parts.model.fingerprint, policy.digest, request.title)
    digest = hashlib.sha256(repr(made_from).encode())
    async for piece in _blob(parts, request.blob):
        digest.update(piece)
    return digest.hexdigest()


async def _read(
    parts: Parts,
    request: pb.IndexRequest,
    policy: Policy,
    chunking: tuple[int, int],
    span: Span,
) -> tuple[Loaded, CutDocument]:
    tenant, title = request.caller.tenant, request.title
    with parts.telemetry.span("load", span) as step:
        try:
            size = await parts.blobs.size(request.blob)
        except NoBlobError:
            raise _no_blob() from None
        step.set_attribute("bytes", size)
        loaded = await parts.chunkers.load(title, size, _blob(parts, request.blob))
        sections = loaded.sections
        if policy.texts.has("uploads"):
            title, sections = await _check_document(parts, policy, tenant, title, sections, step)
    with parts.telemetry.span("chunk", span) as step:
        document = await parts.chunkers.cut(title, sections, *chunking)
        step.set_attributes({"chunks": len(document.chunks), "chunks_cut": document.shortened})
    return loaded, document


async def _store(
    parts: Parts, policy: Policy, draft: Draft, document: CutDocument, span: Span, tell: Tell
) -> None:
    """Those chunks of it that are not stored; each batch is written as a whole, or not."""
    chunks, texts = document.chunks, document.texts

    async def vectors(positions: Sequence[int]) -> np.ndarray:
        made = await parts.embedder.embed(draft.tenant, [[*texts[n]] for n in positions])
        await _check_meaning(parts, policy, made, span)
        return made

    with parts.telemetry.span("embed and store", span, kind=parts.calls.kind, texts=len(texts)):
        batches = {
            at: [n for n in range(len(chunks))[at : at + _STORED_AT_ONCE] if n not in draft.stored]
            for at in range(0, len(chunks), _STORED_AT_ONCE)
        }
        # Searches find what is stored: of what may be refused nothing is before all is judged.
        judged = await _may_refuse(parts, policy)
        ahead = {at: await vectors(some) for at, some in batches.items() if some and judged}
        for at, some in batches.items():
            progress = pb.IndexProgress(done=at, chunks=len(chunks))
            await tell(pb.IndexNews(progress=progress))
            if not some:
                continue
            made = ahead[at] if judged else await vectors(some)
            await parts.store.put(draft, some, [chunks[n] for n in some], made, len(chunks))
            metrics.INDEXED_CHUNKS.inc(len(some))


async def _blob(parts: Parts, key: str) -> AsyncIterator[bytes]:
    try:
        async for piece in parts.blobs.read(key):
            yield piece
    except NoBlobError:
        raise _no_blob() from None


def _no_blob() -> PenstockError:
    return invalid("the file is gone", "file", reason="invalid_file", stage="retrieval")


async def _check_document(
    parts: Parts,
    policy: Policy,
    tenant: str,
    title: str,
    sections: Sequence[pb.Section],
    span: Span,
) -> tuple[str, Sequence[pb.Section]]:
    """As the policy lets them be. A long document is looked at piece by piece: each has what the
    policy may spend, and others have their turn in between."""
    (title,) = await _checked(parts, policy, tenant, [Subject("title", "uploads", title)], span)
    told: list[pb.Section] = []
    for some in _runs(sections):
        fields = [[*section.headings, section.text] for section in some]
        subjects = [Subject("file", "uploads", text) for texts in fields for text in texts]
        left = iter(await _checked(parts, policy, tenant, subjects, span))
        for section, texts in zip(some, fields, strict=True):
            *headings, text = islice(left, len(texts))
            row, page = section.row, section.page
            told.append(pb.Section(headings=headings, text=text, page=page, row=row))
    return title, told


def _runs(sections: Sequence[pb.Section]) -> Iterator[list[pb.Section]]:
    """Of so much text at most that the policy looks at it in one go, or of one."""
    some, size = list[pb.Section](), 0
    for section in sections:
        size += len(section.text)
        if some and size > _CHECKED_CHARS:
            yield some
            some, size = [], len(section.text)
        some.append(section)
    if some:
        yield some


def _policy(parts: Parts, digest: str) -> Policy:
    """The version that the caller judges by; where it names none, this replica's. Raises
    UNAVAILABLE ("other_policy") if it is not known here."""
    found = parts.policy.of(digest) if digest else parts.policy.current
    if found is None:
        why = "retrieval has another version of the content policy"
        raise unavailable(why, stage="retrieval", reason="other_policy")
    return found


async def _check_passages(
    parts: Parts, policy: Policy, tenant: str, passages: list[common_pb2.Passage], span: Span
) -> None:
    """Title and text of each as the policy lets them be."""
    fields = [(passage, name) for passage in passages for name in ("title", "text")]
    subjects = [
        Subject(f"data[{number // 2}]", "retrieved", getattr(passage, name))
        for number, (passage, name) in enumerate(fields)
    ]
    told = await _checked(parts, policy, tenant, subjects, span)
    for (passage, name), text in zip(fields, told, strict=True):
        setattr(passage, name, text)


async def _checked(
    parts: Parts, policy: Policy, tenant: str, subjects: list[Subject], span: Span
) -> list[str]:
    """The texts as the policy lets them be. Raises INVALID_ARGUMENT that names rule and field."""
    verdict = await parts.texts.run(tenant, lambda: parts.policy.check(policy, subjects))
    for (rule, action, place), times in verdict.hits.items():
        VERDICTS.labels(rule, action, place).inc(times)
        span.set_attribute("policy", f"{action}: {rule}")
    if verdict.refused is not None:
        raise _refusal(verdict.refused[0].name, verdict.refused[1])
    if verdict.routed is not None:  # another model's numbers say something else
        raise _refusal(verdict.routed.name, "model")
    return [verdict.edits.get(n, subject.text) for n, subject in enumerate(subjects)]


async def _may_refuse(parts: Parts, policy: Policy) -> bool:
    """Whether an upload may be refused for what it means."""
    rules = (prototype.rule for prototype in await parts.prototypes.of(policy))
    return any("uploads" in rule.where and rule.action == "refuse" for rule in rules)


async def _check_meaning(parts: Parts, policy: Policy, vectors: np.ndarray, span: Span) -> None:
    """The same of what an upload's chunks mean."""
    for prototype in await parts.prototypes.of(policy):
        rule = prototype.rule
        if "uploads" in rule.where and prototype.scores(vectors).max() >= prototype.at_least:
            VERDICTS.labels(rule.name, rule.action, "uploads").inc()
            span.set_attribute("policy", f"{rule.action}: {rule.name}")
            if rule.action == "refuse":
                raise _refusal(rule.name, "text")


def _refusal(rule: str, param: str) -> PenstockError:
    message = f"refused by the content policy, rule {rule!r}"
    return invalid(message, param, reason="content_policy", stage="retrieval")


async def judge(parts: Parts, request: pb.JudgeRequest, span: Span) -> pb.JudgeReply:
    """Of input alone, by the rules for it."""
    requests.check_judge(request)
    tenant, reader = request.caller.tenant, parts.model.reader
    prototypes = await parts.prototypes.of(_policy(parts, request.policy))
    texts = await parts.questions.run(
        tenant, lambda: [reader.query(one.text).ids for one in request.texts]
    )
    vectors = await parts.embedder.embed(tenant, texts)
    matches = []
    for prototype in prototypes:
        rule = prototype.rule
        if "input" not in rule.where:
            continue
        for number, score in enumerate(prototype.scores(vectors)):
            is_for = rule.roles is None or request.texts[number].role in rule.roles
            if is_for and score >= prototype.at_least:
                matches.append(pb.JudgeReply.Match(rule=rule.name, text=number, score=score))
    span.set_attributes({"texts": len(texts), "matches": len(matches)})
    return pb.JudgeReply(matches=matches)


async def remove(parts: Parts, request: pb.RemoveRequest, span: Span) -> pb.RemoveReply:
    requests.check_remove(request)
    with parts.telemetry.span("store", span, kind=parts.calls.kind) as step:
        chunks = await parts.store.remove(
            request.caller.tenant, request.collection, request.source_id, request.revision
        )
        step.set_attribute("chunks", chunks)
    return pb.RemoveReply(chunks=chunks)


async def set_attributes(
    parts: Parts, request: pb.SetAttributesRequest, span: Span
) -> pb.SetAttributesReply:
    requests.check_set_attributes(request)
    with parts.telemetry.span("store", span, kind=parts.calls.kind):
        await parts.store.set_attributes(
            request.caller.tenant, request.collection, request.source_id, request.attributes
        )
    return pb.SetAttributesReply()
