"""Points that versions before the embedded store kept in the client library's local one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from services.retrieval.index import words
from services.retrieval.index.layout import Layout
from services.retrieval.index.points import Point, StoreUnusableError

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

_AT_ONCE = 256


@contextmanager
def earlier_points(layout: Layout) -> Iterator[tuple[Layout, Iterator[list[Point]]]]:
    """In batches, and where those of their model belong; none where there is nothing. What was read
    is deleted at the end, unless that comes by an exception. Raises StoreUnusableError for a store
    that is in use.
    """
    if not (layout.earlier_folder / "meta.json").exists():
        yield layout, iter(())
        return
    from qdrant_client import QdrantClient  # a second long

    try:
        client = QdrantClient(path=str(layout.earlier_folder))
    except RuntimeError as error:
        raise StoreUnusableError(
            f"{layout.earlier_folder} is in use by a process of an earlier version: stop it",
            "store_locked",
        ) from error
    try:
        if client.collection_exists(layout.earlier):
            yield _theirs(client, layout), _batches(client, layout.earlier)
            client.delete_collection(layout.earlier)
        else:
            yield layout, iter(())
        left = client.get_collections().collections
    finally:
        client.close()
    if not left:
        shutil.rmtree(layout.earlier_folder)


def _batches(client: "QdrantClient", name: str) -> Iterator[list[Point]]:
    offset: Any = None
    while True:
        records, offset = client.scroll(name, limit=_AT_ONCE, offset=offset, with_vectors=True)
        yield [_point(record) for record in records]
        if offset is None:
            return


def _point(record: Any) -> Point:
    payload = record.payload
    return Point(
        id=str(record.id),
        dense=np.asarray(record.vector, np.float32),
        sparse=words.of_passage(f"{payload['title']}\n{payload['text']}"),
        payload=payload,
    )


def _theirs(client: "QdrantClient", layout: Layout) -> Layout:
    config = client.get_collection(layout.earlier).config
    made_by = config.metadata or {}
    vectors: Any = config.params.vectors
    return layout._replace(
        fingerprint=made_by.get("fingerprint", "unknown"),
        model=made_by.get("embedding_model", "unknown"),
        dimension=vectors.size,
    )
