"""A document's revision while it is written, and its chunks as points."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from uuid import UUID

import numpy as np

from services.retrieval.documents.chunks import Chunk
from services.retrieval.index import words
from services.retrieval.index.points import SCOPE, TENANT, TOKENS, Condition, Every, Is, Point
from services.retrieval.index.scopes import DRAFT, scope_of


@dataclass(frozen=True)
class Draft:
    tenant: str
    collection: str
    source_id: str
    digest: str
    revision: int
    attributes: Mapping[str, Any]  # as a payload holds them
    stored: frozenset[int]  # positions of its chunks that need not be put
    complete: bool  # none needs to be

    @property
    def document(self) -> tuple[Condition, ...]:
        return (*of_collection(self.tenant, self.collection), Is("source_id", (self.source_id,)))

    @property
    def own(self) -> Every:
        """Not what another text of the same revision left."""
        of_this = Is("revision", (self.revision,)), Is("digest", (self.digest,))
        return Every((*self.document, *of_this))

    @property
    def scope(self) -> str:
        """Of its chunks, once it is published."""
        return scope_of(self.tenant, self.collection)


def of_collection(tenant: str, collection: str) -> tuple[Condition, ...]:
    return Is(TENANT, (tenant,)), Is("collection", (collection,))


def point_of(
    draft: Draft, position: int, chunk: Chunk, vector: np.ndarray, tokens: str, of: int
) -> Point:
    payload: dict[str, Any] = {
        SCOPE: DRAFT,
        TENANT: draft.tenant,
        "collection": draft.collection,
        "source_id": draft.source_id,
        "revision": draft.revision,
        "digest": draft.digest,
        **draft.attributes,
        "position": position,
        "of": of,
        "title": chunk.title,
        "text": chunk.text,
        "start": chunk.start,
        "end": chunk.end,
        "lead": chunk.lead,
        "pages": chunk.pages and [*chunk.pages],
        "rows": chunk.rows and [*chunk.rows],
        TOKENS: tokens,
    }
    return Point(
        id=_id_of(draft, position),
        dense=vector,
        sparse=words.of_passage(f"{chunk.title}\n{chunk.text}"),
        payload=payload,
    )


def _id_of(draft: Draft, position: int) -> str:
    """It follows from what the point is: a write that is repeated adds nothing. Those of a text's
    chunks follow on each other, so that a search knows without reading them what is beside what.
    """
    whose = draft.tenant, draft.collection, draft.source_id, draft.revision, draft.digest
    text = blake2b(repr(whose).encode(), digest_size=12).digest()
    return str(UUID(bytes=text + position.to_bytes(4)))
