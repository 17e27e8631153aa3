"""What retrieval does for each of its four calls, step by step; each step is a span."""

import asyncio
from dataclasses import dataclass

from opentelemetry.trace import Span

from protos import retrieval_pb2 as pb
from services.common.config import RetrievalSettings
from services.common.errors import invalid
from services.common.telemetry import Telemetry
from services.retrieval import metrics, requests
from services.retrieval.chunking import Chunk, chunk
from services.retrieval.embedder import Embedder
from services.retrieval.embedding_model import EmbeddingModel
from services.retrieval.qdrant import Qdrant
from services.retrieval.store import Store
from services.retrieval.text_reader import Tokens


@dataclass(frozen=True)
class Parts:
    """What the calls work with. Tokenizing and chunking run in threads, off the event loop."""

    settings: RetrievalSettings
    telemetry: Telemetry
    model: EmbeddingModel
    embedder: Embedder
    qdrant: Qdrant
    store: Store


async def embed(parts: Parts, request: pb.EmbedRequest, span: Span) -> pb.EmbedReply:
    """A text longer than the model's window is refused, never embedded in part."""
    requests.check_embed(request)
    reader = parts.model.reader
    texts = await asyncio.to_thread(lambda: [reader.text(t) for t in request.texts])
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
    vectors = await parts.embedder.embed([text.ids for text in texts])
    return pb.EmbedReply(
        model=parts.model.name, vectors=[pb.Vector(values=v) for v in vectors], tokens=tokens
    )


async def search(parts: Parts, request: pb.SearchRequest, span: Span) -> pb.SearchReply:
    """A question longer than the window is embedded by its two ends; the span says so."""
    requests.check_search(request)
    with parts.telemetry.span("embed", span) as step:
        query = await asyncio.to_thread(parts.model.reader.query, request.query)
        step.set_attributes({"tokens": len(query.ids), "tokens_cut": query.cut})
        (vector,) = await parts.embedder.embed([query.ids])
    with parts.telemetry.span("store", span, kind=parts.qdrant.kind) as step:
        passages = await parts.store.search(
            request.caller.tenant,
            request.collections,
            vector,
            request.limit,
            request.score_threshold,
        )
        step.set_attribute("passages", len(passages))
        if passages:
            step.set_attribute("best_score", round(passages[0].score, 4))
    metrics.SEARCH_PASSAGES.observe(len(passages))
    return pb.SearchReply(passages=passages)


async def index(parts: Parts, request: pb.IndexRequest, span: Span) -> pb.IndexReply:
    """Until the last step is done, searches find the document's earlier text."""
    requests.check_index(request, parts.settings.max_document_chars)
    with parts.telemetry.span("chunk", span) as step:
        chunks, texts = await asyncio.to_thread(_chunk, parts, request)
        if len(chunks) > parts.settings.max_document_chunks:
            raise invalid(
                f"text makes {len(chunks)} chunks, at most {parts.settings.max_document_chunks} "
                "are taken",
                "text",
                stage="retrieval",
            )
        step.set_attributes({"chunks": len(chunks), "chunks_cut": sum(t.cut > 0 for t in texts)})
    tokens = sum(len(text.ids) for text in texts)
    with parts.telemetry.span("embed", span, texts=len(texts), tokens=tokens):
        vectors = await parts.embedder.embed([text.ids for text in texts])
    with parts.telemetry.span("store", span, kind=parts.qdrant.kind):
        await parts.store.replace(
            request.caller.tenant, request.collection, request.source_id, chunks, vectors
        )
    metrics.INDEXED_CHUNKS.inc(len(chunks))
    return pb.IndexReply(chunks=len(chunks), tokens=tokens)


async def remove(parts: Parts, request: pb.RemoveRequest, span: Span) -> pb.RemoveReply:
    requests.check_remove(request)
    with parts.telemetry.span("store", span, kind=parts.qdrant.kind) as step:
        chunks = await parts.store.remove(
            request.caller.tenant, request.collection, request.source_id
        )
        step.set_attribute("chunks", chunks)
    return pb.RemoveReply(chunks=chunks)


def _chunk(parts: Parts, request: pb.IndexRequest) -> tuple[list[Chunk], list[Tokens]]:
    size, overlap = parts.settings.chunk_tokens, parts.settings.chunk_overlap_tokens
    encoding = parts.model.reader.plain(request.text)
    chunks = chunk(request.text, encoding, request.title, size, overlap)
    return chunks, [parts.model.reader.passage(one.title, one.text) for one in chunks]
