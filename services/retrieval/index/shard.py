"""The embedded store: one EdgeShard in a folder that one process has for itself.

Of `Points`, the calls that its process answers. The library's errors go through as they are.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import qdrant_edge as library

from services.retrieval.index.conditions import as_filter
from services.retrieval.index.earlier import earlier_points
from services.retrieval.index.layout import Layout
from services.retrieval.index.points import (
    DENSE,
    INTEGERS,
    KEYWORDS,
    SPARSE,
    TENANT,
    Condition,
    Found,
    Hit,
    Point,
    Question,
    StoreUnusableError,
    another_model,
)

_LOCK_S = 3.0  # for an earlier process to end, whose service was killed
_MADE_BY = "made_by.json"  # written last: a folder without it was never whole


class Shard:
    """Raises StoreUnusableError: in use by another process, another model's."""

    def __init__(self, layout: Layout) -> None:
        self._lock = _lock(layout.root)
        _refuse_another_model(layout)
        with earlier_points(layout) as batches:
            self._shard = _opened(layout)
            self.moved = 0  # points that versions before this one stored
            for points in batches:
                self.put(points)
                self.moved += len(points)
            self._shard.flush()

    def search(self, question: Question) -> Found:
        asked = [
            library.QueryRequest(
                query=library.Query.Nearest(vector, using=name),
                filter=as_filter(question.where, library),
                limit=question.limit,
                with_payload=True,
                params=params,
            )
            for name, vector, params in _ways(question)
        ]
        hits = [
            [Hit(str(hit.id), hit.score, hit.payload or {}) for hit in way]
            for way in self._shard.query_batch(library.QueryBatchRequest(asked))
        ]
        by_way = dict(zip((name for name, *_ in _ways(question)), hits, strict=True))
        return Found(by_way.get(DENSE, []), by_way.get(SPARSE, []))

    def put(self, points: Sequence[Point]) -> None:
        made = [
            library.Point(
                point.id,
                {DENSE: cast(Any, point.dense), SPARSE: library.SparseVector(*point.sparse)},
                point.payload,
            )
            for point in points
        ]
        self._shard.update(library.UpdateOperation.upsert_points(made))

    def change(self, where: Condition, payload: Mapping[str, Any]) -> None:
        selected = as_filter(where, library)
        self._shard.update(library.UpdateOperation.set_payload_by_filter(selected, dict(payload)))

    def delete(self, ids: Sequence[str]) -> None:
        self._shard.update(library.UpdateOperation.delete_points(list(ids)))

    def ids(self, where: Condition, limit: int) -> list[str]:
        request = library.ScrollRequest(
            filter=as_filter(where, library), limit=limit, with_payload=False
        )
        return [str(record.id) for record in self._shard.scroll(request)[0]]

    def payloads(self, where: Condition, limit: int, keys: Sequence[str]) -> list[dict[str, Any]]:
        request = library.ScrollRequest(
            filter=as_filter(where, library), limit=limit, with_payload=list(keys)
        )
        return [record.payload or {} for record in self._shard.scroll(request)[0]]

    def count(self, where: Condition) -> int:
        return self._shard.count(library.CountRequest(filter=as_filter(where, library)))

    def flush(self) -> None:
        self._shard.flush()

    def close(self) -> None:
        self._shard.flush()
        self._shard.close()
        os.close(self._lock)


def _ways(question: Question) -> list[tuple[str, Any, Any]]:
    """Name, vector and parameters of each way in which it is asked."""
    ways: list[tuple[str, Any, Any]] = []
    if question.dense is not None:
        ways.append((DENSE, question.dense, None))
    if question.sparse is not None and question.sparse.indices:
        corpus = library.IdfParams(corpus=as_filter(question.corpus, library))
        vector = library.SparseVector(*question.sparse)
        ways.append((SPARSE, vector, library.SearchParams(idf=corpus)))
    return ways


def _opened(layout: Layout) -> library.EdgeShard:
    made_by = layout.folder / _MADE_BY
    if made_by.exists():
        return library.EdgeShard.load(str(layout.folder / "shard"))
    shutil.rmtree(layout.folder, ignore_errors=True)
    shard = _create(layout)
    _write(made_by, {"embedding_model": layout.model})
    return shard


def _create(layout: Layout) -> library.EdgeShard:
    folder = layout.folder / "shard"
    folder.mkdir(parents=True)
    dense = library.EdgeVectorParams(layout.dimension, library.Distance.Cosine)
    sparse = library.EdgeSparseVectorParams(modifier=library.Modifier.Idf)
    shard = library.EdgeShard.create(
        str(folder),
        library.EdgeConfig(
            vectors={DENSE: dense},
            sparse_vectors={SPARSE: sparse},
            max_search_threads=1,  # the cores are the engine's
        ),
    )
    tenants = library.KeywordIndexParams(is_tenant=True)
    shard.update(library.UpdateOperation.create_field_index(TENANT, tenants))
    for key in KEYWORDS:
        words = library.KeywordIndexParams(enable_hnsw=False)
        shard.update(library.UpdateOperation.create_field_index(key, words))
    for key in INTEGERS:
        numbers = library.IntegerIndexParams(lookup=True, range=True, enable_hnsw=False)
        shard.update(library.UpdateOperation.create_field_index(key, numbers))
    shard.flush()
    return shard


def _lock(root: Path) -> int:
    """Held until this process ends, however it does."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() > until:
                raise StoreUnusableError(
                    f"the embedded vector store in {root} is in use by another process: stop it, "
                    "set another PENSTOCK_DATA_DIR, or run a Qdrant server and set QDRANT_URL",
                    "store_locked",
                ) from None
            time.sleep(0.05)


def _refuse_another_model(layout: Layout) -> None:
    """Until documents can be indexed anew by the present one."""
    if (layout.folder / _MADE_BY).exists():
        return
    for found in layout.root.glob(f"*/{_MADE_BY}"):
        theirs = json.loads(found.read_text())["embedding_model"]
        raise another_model(found.parent.name, theirs, layout.model)


def _write(path: Path, content: dict[str, str]) -> None:
    """Whole, or not at all."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)
