"""Chunks of documents in Qdrant, apart by tenant.

One Qdrant collection holds the chunks of all tenants, as Qdrant's multitenancy guide advises: every
point carries its tenant, the index is built per tenant, and every call here filters by a tenant
that its caller must name. A document's chunks carry a revision. Replacing writes the new revision
beside the old one and then removes what is older, so there is no moment without the document, and
of two writers at once the newer revision remains, whole. Points are written and removed in small
batches, between which searches have their turn:

    revision = max(the stored one + 1, clock in µs: exact in the floats that Qdrant compares)
    write all chunks of `revision`, then remove the document's chunks of older revisions,
    then, if a newer one is there, remove `revision` again: it has been overtaken
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from qdrant_client import QdrantClient, models

from protos import common_pb2
from services.common.errors import PenstockError
from services.retrieval.documents.chunks import Chunk
from services.retrieval.qdrant import Qdrant

log = logging.getLogger(__name__)

_POINTS_PER_WRITE = 64  # or removed
_POINTS_PER_READ = 1024

_Whose = tuple[str, str, str, int]  # tenant, collection, source id, revision


class Store:
    """Every method raises PenstockError UNAVAILABLE while the store is away or too slow."""

    def __init__(self, qdrant: Qdrant) -> None:
        self._run = qdrant.run
        self._write = qdrant.write
        self._name = qdrant.name
        self._cleaning: set[asyncio.Task[None]] = set()

    async def finish(self) -> None:
        """Returns when nothing of this object is under way in Qdrant any more."""
        if self._cleaning:
            await asyncio.wait(self._cleaning)

    async def search(
        self,
        tenant: str,
        collections: Sequence[str],
        vector: np.ndarray,
        limit: int,
        score_threshold: float = 0.0,
    ) -> list[common_pb2.Passage]:
        """The nearest chunks by cosine similarity, best first. A threshold of 0 is none."""
        where = _filter(tenant, collection=list(collections))

        def query(client: QdrantClient) -> Any:
            return client.query_points(
                self._name,
                query=vector.tolist(),
                query_filter=where,
                limit=limit,
                score_threshold=score_threshold or None,
                with_payload=["title", "text", "source_id", "position"],
            )

        found = await self._run("search", tenant, query)
        return [_passage(point) for point in found.points]

    async def replace(
        self,
        tenant: str,
        collection: str,
        source_id: str,
        chunks: Sequence[Chunk],
        vectors: np.ndarray,
    ) -> None:
        """Stores a document's chunks (vectors: [chunks, dimension]) instead of its earlier ones.

        When writing fails or is cancelled, the earlier ones stay and the new ones are taken back;
        when only removing the earlier ones fails, both stay until the document is stored again.
        """
        source = {"collection": collection, "source_id": source_id}
        stored = await self._run("revision", tenant, lambda c: self._a_revision(c, tenant, source))
        revision = max(stored + 1, time.time_ns() // 1000)
        whose = (tenant, collection, source_id, revision)
        own = _filter(tenant, **source, revision=models.MatchValue(value=revision))
        try:
            for at in range(0, len(chunks), _POINTS_PER_WRITE):
                to = at + _POINTS_PER_WRITE
                await self._put(whose, at, chunks[at:to], vectors[at:to])
        except BaseException:
            self._take_back(tenant, own)
            raise
        await self._delete(tenant, _filter(tenant, **source, revision=models.Range(lt=revision)))
        newer = _filter(tenant, **source, revision=models.Range(gt=revision))
        if await self._count(tenant, newer):
            await self._delete(tenant, own)

    async def remove(self, tenant: str, collection: str, source_id: str = "") -> int:
        """Deletes a source, or the whole collection; returns how many chunks there were."""
        named = {"collection": collection} | ({"source_id": source_id} if source_id else {})
        where = _filter(tenant, **named)
        count = await self._count(tenant, where)
        if count:
            await self._delete(tenant, where)
        return count

    def _a_revision(self, client: QdrantClient, tenant: str, source: dict[str, Any]) -> int:
        points, _ = client.scroll(
            self._name, _filter(tenant, **source), limit=1, with_payload=["revision"]
        )
        return int((points[0].payload or {})["revision"]) if points else 0

    async def _put(
        self, whose: _Whose, at: int, chunks: Sequence[Chunk], vectors: np.ndarray
    ) -> None:
        """Writes chunks from position `at` on."""

        def put(client: QdrantClient) -> None:
            each = enumerate(zip(chunks, vectors, strict=True), at)
            points = [_point(whose, position, chunk, vector) for position, (chunk, vector) in each]
            client.upsert(self._name, points, wait=True)

        await self._write("write", whose[0], put)

    async def _delete(self, tenant: str, where: models.Filter) -> None:
        while ids := await self._run("select", tenant, lambda client: self._ids(client, where)):
            for at in range(0, len(ids), _POINTS_PER_WRITE):
                batch = models.PointIdsList(points=ids[at : at + _POINTS_PER_WRITE])
                await self._write("delete", tenant, _deletion(self._name, batch))

    def _ids(self, client: QdrantClient, where: models.Filter) -> list[Any]:
        points, _ = client.scroll(self._name, where, limit=_POINTS_PER_READ, with_payload=False)
        return [point.id for point in points]

    async def _count(self, tenant: str, where: models.Filter) -> int:
        counted = await self._run("count", tenant, lambda c: c.count(self._name, where, exact=True))
        return counted.count

    def _take_back(self, tenant: str, where: models.Filter) -> None:
        async def delete() -> None:
            try:
                await self._delete(tenant, where)
            except PenstockError as error:
                log.warning("an unfinished document stays until it is indexed again: %s", error)

        task = asyncio.create_task(delete(), name="take back an unfinished document")
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)


def _deletion(name: str, points: models.PointIdsList) -> Callable[[QdrantClient], Any]:
    return lambda client: client.delete(name, points, wait=True)


def _point(whose: _Whose, position: int, chunk: Chunk, vector: np.ndarray) -> models.PointStruct:
    tenant, collection, source_id, revision = whose
    return models.PointStruct(
        # The id follows from what the point is: a write that is repeated adds nothing.
        id=str(uuid.uuid5(uuid.NAMESPACE_OID, repr((*whose, position)))),
        vector=vector.tolist(),
        payload={
            "tenant": tenant,
            "collection": collection,
            "source_id": source_id,
            "revision": revision,
            "position": position,
            "title": chunk.title,
            "text": chunk.text,
            "start": chunk.start,
            "end": chunk.end,
        },
    )


def _filter(tenant: str, **fields: Any) -> models.Filter:
    """Points of this tenant whose fields hold the given values; lists mean any of them."""
    conditions: list[Any] = [_condition("tenant", tenant)]
    conditions += [_condition(key, wanted) for key, wanted in fields.items()]
    return models.Filter(must=conditions)


def _condition(key: str, wanted: Any) -> models.FieldCondition:
    if isinstance(wanted, models.Range):
        return models.FieldCondition(key=key, range=wanted)
    if isinstance(wanted, list):
        return models.FieldCondition(key=key, match=models.MatchAny(any=wanted))
    if isinstance(wanted, str):
        wanted = models.MatchValue(value=wanted)
    return models.FieldCondition(key=key, match=wanted)


def _passage(point: models.ScoredPoint) -> common_pb2.Passage:
    payload = point.payload or {}
    return common_pb2.Passage(
        title=payload["title"],
        text=payload["text"],
        score=point.score,
        source_id=payload["source_id"],
        position=payload["position"],
    )
