"""Chunks of documents in the vector store, apart by tenant.

One collection holds the chunks of all tenants, as Qdrant's multitenancy guide advises: every point
carries its tenant, the index is built per tenant, and every call here is about a tenant that its
caller must name. A document's chunks carry a revision, and the digest of what they were made from.
A new revision is written beside the old one, which is then removed: there is no moment without the
document, none with a part of it, and of two writers at once the newer revision remains, whole.
Points are written and removed in small batches, between which searches have their turn:

    draft    a revision above the stored ones; chunks of the same digest that are stored are its own
    put      the chunks that are missing, which no search finds yet
    publish  has them found, and removes older revisions; or removes the draft's where a newer one
             was published meanwhile
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from protos.common_pb2 import AttributeValue
from services.common.errors import PenstockError, unavailable
from services.retrieval.cache.revisions import Revisions
from services.retrieval.documents.chunks import Chunk
from services.retrieval.index import effort, words
from services.retrieval.index.attributes import stored as stored_attributes
from services.retrieval.index.calls import Calls
from services.retrieval.index.draft import Draft, of_collection, point_of
from services.retrieval.index.points import (
    BOTH,
    SCOPE,
    Condition,
    Every,
    Found,
    Is,
    Not,
    Points,
    Question,
    Weights,
    Within,
    best_of,
)
from services.retrieval.index.scopes import scope_of

log = logging.getLogger(__name__)

_POINTS_PER_WRITE = 64  # or removed
_POINTS_PER_READ = 1024
_NONE: Mapping[str, AttributeValue] = {}
_MOST_CHUNKS = 65_536  # of a document, in all its revisions


class Store:
    """Every method raises PenstockError UNAVAILABLE while the store is away or too slow."""

    def __init__(self, calls: Calls, revisions: Revisions, model: str = "") -> None:
        """`revisions` hear of each write, for searches that are told again; `model`: by which what
        is put here was embedded, and is searched (points.py)."""
        self._calls = calls
        self._model = model
        self._revisions = revisions
        self._cleaning: set[asyncio.Task[None]] = set()

    async def finish(self) -> None:
        """Returns when nothing of this object is under way in the store any more."""
        if self._cleaning:
            await asyncio.wait(self._cleaning)

    async def search(
        self,
        tenant: str,
        collections: Sequence[str],
        vector: np.ndarray,
        text: str,
        limit: int,
        only: Condition | None = None,
        weights: Weights = BOTH,
        closely: int = 0,
    ) -> Found:
        """The best of the nearest chunks by cosine, and of those that share the rarest words with
        the text; how rare a word is does not depend on `only`. With an empty vector the latter
        alone. `closely`: of how many of them the tokens are told, too. Raises INVALID_ARGUMENT
        ("filters_too_costly").
        """
        corpus = Is(SCOPE, tuple(scope_of(tenant, one) for one in collections))
        where = Every((corpus, only)) if only is not None else corpus
        if only is not None and self._calls.kind == "embedded":
            await self._refuse_costly(tenant, corpus, only)
        sparse = words.of_question(text)
        question = Question(where, corpus, limit, vector, sparse, weights, closely)
        if not vector.size:
            question = Question(where, corpus, limit, None, sparse)
        found = await self._calls.read(
            "search", tenant, lambda points: points.search(question, self._model)
        )
        if vector.size:
            return found
        by_words = best_of([found.hits, found.earlier], limit)
        return Found([], by_words, found.incomplete)

    async def _refuse_costly(self, tenant: str, corpus: Condition, only: Condition) -> None:
        each = effort.of_each_chunk(only)
        if each < 1:
            return
        chunks = await self._calls.read(
            "count", tenant, lambda points: points.count(corpus, self._model)
        )
        if each * chunks > effort.MOST:
            raise effort.refusal(chunks)

    async def draft(
        self,
        tenant: str,
        collection: str,
        source_id: str,
        digest: str = "",
        revision: int = 0,
        attributes: Mapping[str, AttributeValue] = _NONE,
    ) -> Draft:
        """Begins a revision; 0: above those that are stored. One that a published one has overtaken
        already is complete. An empty digest is that of no other text.
        """
        document = (*of_collection(tenant, collection), Is("source_id", (source_id,)))
        held = stored_attributes(attributes)
        begun = Draft(tenant, collection, source_id, digest, revision, held, frozenset(), False)
        if not revision:
            found = await self._some_revision(tenant, Every(document))
            revision = max(found + 1, time.time_ns() // 1000)
            begun = replace(begun, revision=revision)
        elif await self._overtaken(begun):
            return replace(begun, complete=True)
        positions: frozenset[int] = frozenset()
        complete = False
        if digest:
            now = {"revision": revision, **held}
            async with self._revisions.writing(tenant, collection):
                positions, of = await self._adopt(tenant, document, digest, now)
            complete = bool(positions) and len(positions) == of
        return replace(begun, stored=positions, complete=complete)

    async def whole(self, tenant: str, collection: str, source_id: str) -> int:
        """How many chunks searches find by the present model of a document that it has whole, and
        that has left all earlier ones; else 0."""
        document = Every((*of_collection(tenant, collection), Is("source_id", (source_id,))))
        keys = (SCOPE, "revision", "position", "of")
        found = await self._calls.read(
            "select",
            tenant,
            lambda points: points.payloads(document, _MOST_CHUNKS, keys, self._model),
        )
        by_revision: dict[int, set[int]] = {}
        for payload in found:
            by_revision.setdefault(payload["revision"], set()).add(payload["position"])
        chunks = len(by_revision[max(by_revision)]) if by_revision else 0
        of_all = {(payload[SCOPE], payload["of"]) for payload in found}
        if len(by_revision) != 1 or of_all != {(scope_of(tenant, collection), chunks)}:
            return 0
        everywhere = await self._calls.read(
            "select", tenant, lambda points: points.ids(document, len(found) + 1)
        )
        return chunks if len(everywhere) == len(found) else 0

    async def put(
        self,
        draft: Draft,
        positions: Sequence[int],
        chunks: Sequence[Chunk],
        vectors: np.ndarray,
        of: int,
        tokens: Sequence[str] | None = None,
    ) -> None:
        """Writes these chunks, none of which is stored; `of`: how many the document has in all.
        `tokens`: each one's, packed (token_vectors.py); who has none is ranked without.
        """
        each = tokens or [""] * len(chunks)
        for start in range(0, len(chunks), _POINTS_PER_WRITE):
            part = slice(start, start + _POINTS_PER_WRITE)
            made = zip(positions[part], chunks[part], vectors[part], each[part], strict=True)
            await self._put(draft, [*made], of)

    async def publish(self, draft: Draft, chunks: int) -> None:
        """Instead of its earlier revisions. Raises UNAVAILABLE where not all `chunks` are there:
        another writer has changed them.
        """
        async with self._revisions.writing(draft.tenant, draft.collection, removes=True):
            whole = 0 < chunks == await self._count(draft.tenant, draft.own)
            overtaken = await self._overtaken(draft)
            if overtaken:
                await self._delete(draft.tenant, draft.own)
            elif whole:
                await self._show(draft)
        if not (overtaken or whole):
            words = "the document was changed by another call meanwhile"
            raise unavailable(words, stage="retrieval", reason="document_changed")

    def discard(self, draft: Draft) -> None:
        """In the background."""

        async def delete() -> None:
            try:
                async with self._revisions.writing(draft.tenant, draft.collection, removes=True):
                    await self._delete(draft.tenant, draft.own)
            except PenstockError as error:
                log.warning("an unfinished document stays until it is indexed again: %s", error)

        task = asyncio.create_task(delete(), name="take back an unfinished document")
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def remove(
        self, tenant: str, collection: str, source_id: str = "", revision: int = 0
    ) -> int:
        """Deletes a source, or the whole collection, where a revision is given up to that; returns
        how many chunks there were.
        """
        conditions = of_collection(tenant, collection)
        if source_id:
            conditions = (*conditions, Is("source_id", (source_id,)))
        if revision:
            conditions = (*conditions, Within("revision", lte=revision))
        async with self._revisions.writing(tenant, collection, removes=True):
            return await self._delete(tenant, Every(conditions))

    async def set_attributes(
        self,
        tenant: str,
        collection: str,
        source_id: str,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        """In place of those that the source has."""
        where = Every((*of_collection(tenant, collection), Is("source_id", (source_id,))))
        held = stored_attributes(attributes)
        async with self._revisions.writing(tenant, collection):
            await self._calls.write("change", tenant, lambda points: points.change(where, held))

    async def _adopt(
        self, tenant: str, document: tuple[Condition, ...], digest: str, now: Mapping[str, Any]
    ) -> tuple[frozenset[int], int]:
        """Gives the draft those chunks of the digest that are stored, under one revision up to its
        own, with what is so of them now; returns their positions, and how many there should be. A
        newer writer's stay his: what is so of them now he knows better.
        """
        alike = Every((*document, Is("digest", (digest,)), Within("revision", lte=now["revision"])))
        if not await self._count(tenant, alike):
            return frozenset(), 0
        keys = ("revision", "position", "of")
        found = await self._calls.read(
            "select", tenant, lambda points: points.payloads(alike, _MOST_CHUNKS, keys, self._model)
        )
        by_revision: dict[int, dict[int, int]] = {}
        doubled = set[int]()  # two writers were at once at a revision: its chunks cannot be told
        for payload in found:
            chunks = by_revision.setdefault(payload["revision"], {})
            if payload["position"] in chunks:
                doubled.add(payload["revision"])
            chunks[payload["position"]] = payload["of"]
        if not (whose := by_revision.keys() - doubled):
            return frozenset(), 0
        theirs = max(whose, key=lambda one: (one == now["revision"], len(by_revision[one])))
        where = Every((*alike.conditions, Is("revision", (theirs,))))
        await self._calls.write("change", tenant, lambda points: points.change(where, now))
        chunks = by_revision[theirs]
        return frozenset(chunks), max(chunks.values())

    async def _show(self, draft: Draft) -> None:
        """To searches, in place of its earlier revisions, whichever model embedded them."""
        shown = {SCOPE: draft.scope}
        await self._calls.write(
            "change", draft.tenant, lambda points: points.change(draft.own, shown)
        )
        earlier = Within("revision", lte=draft.revision), Not(draft.own)
        await self._delete(draft.tenant, Every((*draft.document, *earlier)))

    async def _overtaken(self, draft: Draft) -> bool:
        """Also by what another model embedded: replicas of two models serve while one takes the
        other's place."""
        newer = Is(SCOPE, (draft.scope,)), Within("revision", gt=draft.revision)
        where = Every((*draft.document, *newer))
        found = await self._calls.read("select", draft.tenant, lambda points: points.ids(where, 1))
        return bool(found)

    async def _some_revision(self, tenant: str, document: Condition) -> int:
        found = await self._calls.read(
            "revision",
            tenant,
            lambda points: points.payloads(document, 1, ("revision",), self._model),
        )
        return int(found[0]["revision"]) if found else 0

    async def _put(
        self, draft: Draft, made: Sequence[tuple[int, Chunk, np.ndarray, str]], of: int
    ) -> None:
        def put(points: Points) -> None:
            points.put([point_of(draft, *one, of) for one in made], self._model)

        await self._calls.write("write", draft.tenant, put)

    async def _delete(self, tenant: str, where: Condition) -> int:
        """Returns how many there were."""
        count = 0
        while ids := await self._calls.read(
            "select", tenant, lambda points: points.ids(where, _POINTS_PER_READ)
        ):
            for at in range(0, len(ids), _POINTS_PER_WRITE):
                batch = ids[at : at + _POINTS_PER_WRITE]
                await self._calls.write("delete", tenant, _deletion(batch))
            count += len(ids)
        return count

    async def _count(self, tenant: str, where: Condition) -> int:
        return await self._calls.read(
            "count", tenant, lambda points: points.count(where, self._model)
        )


def _deletion(ids: list[str]) -> Callable[[Points], None]:
    return lambda points: points.delete(ids)
