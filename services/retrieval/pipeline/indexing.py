"""Index: a document is read, looked at, cut, embedded and stored, with news of how far it is."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence

import grpc
import numpy as np

from protos import retrieval_pb2 as pb
from services.common.errors import PenstockError, unavailable
from services.common.policy import Policy
from services.common.telemetry.spans import Span
from services.common.text.titles import titled
from services.retrieval import metrics, requests, token_vectors
from services.retrieval.documents import loading
from services.retrieval.documents.chunkers import CutDocument, Loaded
from services.retrieval.index.draft import Draft
from services.retrieval.pipeline.judging import (
    check_meaning,
    looks_at_meaning,
    may_refuse,
    policy_of,
)
from services.retrieval.pipeline.parts import Parts
from services.retrieval.pipeline.reading import blob_of, check_owner, load
from services.retrieval.served_model import ServedModel
from services.retrieval.token_vectors import packed

_STORED_AT_ONCE = 64  # chunks: what waits for the model is bounded, and what a kill does again
_FOR_NOW = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})

Tell = Callable[[pb.IndexNews], Awaitable[object]]
Ask = Callable[[Sequence[str]], Awaitable[pb.TextVectors]]
"""A served model's vectors of some texts."""


async def index(
    parts: Parts, request: pb.IndexRequest, span: Span, tell: Tell, ask: Ask | None = None
) -> None:
    """Until the last step is done, searches find the document's earlier text, beside what is stored
    of the new one. What is broken off (a killed service, a client that is gone, something away or
    full for now, a time that is over where others are computed first) stays stored, for who asks
    again; what fails is taken back. `ask`: who asks for it tells a served model's vectors."""
    parts = parts.of_model(request.embedder)
    if (ask is None) == isinstance(parts.model, ServedModel):
        raise _asked_otherwise(parts.model.name, is_told=ask is not None)
    reader, own, tenant = parts.model.reader, parts.settings, request.caller.tenant
    requests.check_index(request, reader.max_tokens - reader.special_tokens)
    check_owner(parts, tenant, request.blob)
    policy, cut = policy_of(parts, request.policy), request.chunking
    chunking = own.chunk_tokens, own.chunk_overlap_tokens
    if cut.max_tokens:
        chunking = cut.max_tokens, cut.overlap_tokens
    place, embedder = (request.collection, request.source_id), parts.model.fingerprint
    if request.reindexing and (chunks := await parts.store.whole(tenant, *place)):
        span.set_attribute("stored", "before")
        await tell(pb.IndexNews(reply=pb.IndexReply(chunks=chunks, embedder=embedder)))
        return
    digest = await _digest(parts, request, policy, chunking)
    draft = await parts.store.draft(tenant, *place, digest, request.revision, request.attributes)
    if draft.complete:
        span.set_attribute("stored", "before")
        chunks = len(draft.stored)
        await parts.store.publish(draft, chunks)
        await tell(pb.IndexNews(reply=pb.IndexReply(chunks=chunks, embedder=embedder)))
        return
    try:
        loaded, document = await _read(parts, request, policy, chunking, span)
        async with asyncio.timeout(own.index_timeout_s):
            tokens = await _store(
                parts, policy, draft, document, span, tell, ask, low=request.reindexing
            )
    except PenstockError as error:
        if error.code not in _FOR_NOW:
            parts.store.discard(draft)
        raise
    except TimeoutError:
        if ask is None and not request.reindexing:  # these wait behind others, and are gone on with
            parts.store.discard(draft)
        raise
    chunks = len(document.chunks)
    await parts.store.publish(draft, chunks)
    reply = pb.IndexReply(chunks=chunks, tokens=tokens, note=loaded.note, embedder=embedder)
    await tell(pb.IndexNews(reply=reply))


async def _digest(
    parts: Parts, request: pb.IndexRequest, policy: Policy, chunking: tuple[int, int]
) -> str:
    """Of all that the document's chunks are made from."""
    versions = loading.VERSION, token_vectors.VERSION
    title = titled(request.title, ())
    made_from = (versions, chunking, parts.model.made_by, policy.digest, title)
    digest = hashlib.sha256(repr(made_from).encode())
    async for piece in blob_of(parts, request.blob):
        digest.update(piece)
    return digest.hexdigest()


async def _read(
    parts: Parts,
    request: pb.IndexRequest,
    policy: Policy,
    chunking: tuple[int, int],
    span: Span,
) -> tuple[Loaded, CutDocument]:
    tenant, place = request.caller.tenant, (request.blob, request.title)
    title, loaded = await load(parts, tenant, *place, policy, span)
    with parts.telemetry.span("chunk", span) as step:
        document = await parts.chunkers.cut(tenant, title, loaded.sections, *chunking)
        step.set_attributes({"chunks": len(document.chunks), "chunks_cut": document.shortened})
    return loaded, document


async def _store(
    parts: Parts,
    policy: Policy,
    draft: Draft,
    document: CutDocument,
    span: Span,
    tell: Tell,
    ask: Ask | None,
    *,
    low: bool,
) -> int:
    """Those chunks of it that are not stored; each batch is written as a whole, or not. Returns the
    tokens of all: of those that were stored as they are counted here."""
    chunks, texts = document.chunks, document.texts
    spent = sum(len(texts[n]) for n in draft.stored)

    async def told(positions: Sequence[int], its: list[list[int]]) -> np.ndarray:
        """A served model's vectors, of what may be stored."""
        nonlocal spent
        assert ask is not None
        assert isinstance(parts.model, ServedModel)
        if await looks_at_meaning(parts, policy):
            meant = await parts.embedder.read(draft.tenant, its, lambda one: one.vector, low=low)
            await check_meaning(parts, policy, np.stack(meant), span)
        answer = await ask([parts.model.reads(chunks[n]) for n in positions])
        spent += answer.tokens
        return parts.model.vectors(answer.vectors, len(positions))

    async def read(positions: Sequence[int]) -> tuple[np.ndarray, Sequence[str]]:
        """Vectors, and tokens'."""
        nonlocal spent
        its = [[*texts[n]] for n in positions]
        if ask is not None:
            return await told(positions, its), [""] * len(positions)
        spent += sum(map(len, its))
        made = await parts.embedder.read(
            draft.tenant, its, lambda one: (one.vector, packed(one.tokens)), low=low
        )
        vectors, tokens = np.stack([vector for vector, _ in made]), [token for _, token in made]
        await check_meaning(parts, policy, vectors, span)
        return vectors, tokens

    with parts.telemetry.span("embed and store", span, kind=parts.calls.kind, texts=len(texts)):
        batches = {
            at: [n for n in range(len(chunks))[at : at + _STORED_AT_ONCE] if n not in draft.stored]
            for at in range(0, len(chunks), _STORED_AT_ONCE)
        }
        # Searches find what is stored: of what may be refused nothing is before all is judged.
        judged = await may_refuse(parts, policy)
        ahead = {at: await read(some) for at, some in batches.items() if some and judged}
        for at, some in batches.items():
            paid = spent if ask is not None else 0
            progress = pb.IndexProgress(done=at, chunks=len(chunks), tokens=paid)
            await tell(pb.IndexNews(progress=progress))
            if not some:
                continue
            vectors, tokens = ahead[at] if judged else await read(some)
            its = [chunks[n] for n in some]
            await parts.store.put(draft, some, its, vectors, len(chunks), tokens)
            metrics.INDEXED_CHUNKS.inc(len(some))
    return spent


def _asked_otherwise(model: str, *, is_told: bool) -> PenstockError:
    """By a caller whose settings are others, or whose version is."""
    how = "is one of retrieval's own" if is_told else "is a served one, whose vectors nobody tells"
    why = f"the embedding model {model!r} {how}"
    return unavailable(why, stage="retrieval", reason="other_embedders")
