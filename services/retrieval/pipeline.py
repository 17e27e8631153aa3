"""What retrieval does for each of its four calls, step by step; each step is a span."""

from dataclasses import dataclass, field

import numpy as np
from opentelemetry.trace import Span

from protos import common_pb2
from protos import retrieval_pb2 as pb
from services.common.config import RetrievalSettings
from services.common.errors import invalid
from services.common.fair_threads import FairThreads
from services.common.telemetry import Telemetry
from services.retrieval import metrics, requests
from services.retrieval.chunkers import Chunkers
from services.retrieval.embedder import Embedder
from services.retrieval.embedding_model import EmbeddingModel
from services.retrieval.qdrant import Qdrant
from services.retrieval.store import Store

_EMBED_AT_ONCE = 256  # of a document's texts: what waits for the model is bounded over all callers
_MAX_PASSAGE_BYTES = 256 * 2**10  # in one answer


@dataclass(frozen=True)
class Parts:
    """What the calls work with."""

    settings: RetrievalSettings
    telemetry: Telemetry
    model: EmbeddingModel
    chunkers: Chunkers
    embedder: Embedder
    qdrant: Qdrant
    store: Store
    # A search's question is tokenized in a millisecond, thousands of texts to embed in seconds.
    questions: FairThreads = field(default_factory=lambda: FairThreads(1, "question"))
    texts: FairThreads = field(default_factory=lambda: FairThreads(1, "texts"))


async def embed(parts: Parts, request: pb.EmbedRequest, span: Span) -> pb.EmbedReply:
    """A text longer than the model's window is refused, never embedded in part."""
    requests.check_embed(request)
    reader = parts.model.reader
    tenant = request.caller.tenant
    texts = await parts.texts.run(tenant, lambda: [reader.text(t) for t in request.texts])
    for i, text in enumerate(texts):
        if text.cut:
            raise invalid(
                f"texts[{i}] is longer than the model's window of {reader.max_tokens} tokens",
                f"texts[{i}]",
                reason="context_length_exceeded",
                stage="retrieval",
            )
    tokens = sum(len(text.ids) for text in texts)
    span.set_attributes({"texts": len(texts), "tokens": tokens})
    vectors = await parts.embedder.embed(tenant, [text.ids for text in texts])
    return pb.EmbedReply(
        model=parts.model.name, vectors=[pb.Vector(values=v) for v in vectors], tokens=tokens
    )


async def search(parts: Parts, request: pb.SearchRequest, span: Span) -> pb.SearchReply:
    """A question longer than the window is embedded by its two ends; the span says so."""
    requests.check_search(request)
    tenant = request.caller.tenant
    with parts.telemetry.span("embed", span) as step:
        query = await parts.questions.run(tenant, lambda: parts.model.reader.query(request.query))
        step.set_attributes({"tokens": len(query.ids), "tokens_cut": query.cut})
        (vector,) = await parts.embedder.embed(tenant, [query.ids])
    with parts.telemetry.span("store", span, kind=parts.qdrant.kind) as step:
        passages = _bounded(
            await parts.store.search(
                tenant,
                request.collections,
                vector,
                request.limit,
                request.score_threshold,
            )
        )
        step.set_attribute("passages", len(passages))
        if passages:
            step.set_attribute("best_score", round(passages[0].score, 4))
    metrics.SEARCH_PASSAGES.observe(len(passages))
    return pb.SearchReply(passages=passages, tokens=len(query.ids))


async def index(parts: Parts, request: pb.IndexRequest, span: Span) -> pb.IndexReply:
    """Until the last step is done, searches find the document's earlier text."""
    requests.check_index(request, parts.settings.max_document_chars)
    with parts.telemetry.span("chunk", span) as step:
        document = await parts.chunkers.cut(request.title, request.text)
        step.set_attributes({"chunks": len(document.chunks), "chunks_cut": document.shortened})
    tenant, tokens = request.caller.tenant, sum(map(len, document.texts))
    with parts.telemetry.span("embed", span, texts=len(document.texts), tokens=tokens):
        vectors = [
            await parts.embedder.embed(tenant, document.texts[at : at + _EMBED_AT_ONCE])
            for at in range(0, len(document.texts), _EMBED_AT_ONCE)
        ]
    with parts.telemetry.span("store", span, kind=parts.qdrant.kind):
        await parts.store.replace(
            tenant,
            request.collection,
            request.source_id,
            document.chunks,
            np.concatenate(vectors),
        )
    metrics.INDEXED_CHUNKS.inc(len(document.chunks))
    return pb.IndexReply(chunks=len(document.chunks), tokens=tokens)


async def remove(parts: Parts, request: pb.RemoveRequest, span: Span) -> pb.RemoveReply:
    requests.check_remove(request)
    with parts.telemetry.span("store", span, kind=parts.qdrant.kind) as step:
        chunks = await parts.store.remove(
            request.caller.tenant, request.collection, request.source_id
        )
        step.set_attribute("chunks", chunks)
    return pb.RemoveReply(chunks=chunks)


def _bounded(passages: list[common_pb2.Passage]) -> list[common_pb2.Passage]:
    """The best ones that fit an answer; the first in any case."""
    size = 0
    for number, passage in enumerate(passages):
        size += passage.ByteSize()
        if number and size > _MAX_PASSAGE_BYTES:
            return passages[:number]
    return passages
