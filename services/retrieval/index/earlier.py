"""Points that versions before the embedded store kept in the client library's local one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from services.retrieval.index import words
from services.retrieval.index.layout import Layout
from services.retrieval.index.points import Point, StoreUnusableError, another_model

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

_AT_ONCE = 256


@contextmanager
def earlier_points(layout: Layout) -> Iterator[Iterator[list[Point]]]:
    """In batches; none where there is nothing. What was read is deleted at the end, unless that
    comes by an exception. Raises StoreUnusableError for another model's, or one that is in use.
    """
    if not (layout.earlier_folder / "meta.json").exists():
        yield iter(())
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
            _refuse_another_model(client, layout)
            yield _batches(client, layout.earlier)
            client.delete_collection(layout.earlier)
        else:
            yield iter(())
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


def _refuse_another_model(client: "QdrantClient", layout: Layout) -> None:
    found = client.get_collection(layout.earlier).config.metadata or {}
    if found.get("fingerprint") != layout.fingerprint:
        theirs = found.get("embedding_model", "an unknown one")
        raise another_model(str(layout.earlier_folder), theirs, layout.model)
