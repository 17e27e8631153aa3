"""One model's points in the embedded store: an EdgeShard in a folder.

Of `Points`, the calls that its process answers. The library's errors go through as they are.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import qdrant_edge as library

from services.retrieval.index.conditions import as_filter
from services.retrieval.index.fusing import Place, fused
from services.retrieval.index.layout import Layout
from services.retrieval.index.points import (
    DENSE,
    INTEGERS,
    KEYWORDS,
    SCOPE,
    SPARSE,
    TENANT,
    TOKENS,
    Condition,
    Hit,
    Point,
    Question,
)

MADE_BY = "made_by.json"  # written last: a folder without it was never whole

_RESERVE = 64 * 2**20  # bytes of the disk, for deletions and marks

# All of a collection is looked at, by four bits of each number; of the best, twice as many as are
# asked for, the vectors themselves say which are the nearest (decision 0050).
_SHORT = library.TurboQuantQuantizationConfig(bits=library.TurboQuantBitSize.Bits4, always_ram=True)
_APPROXIMATE = library.SearchParams(
    quantization=library.QuantizationSearchParams(rescore=True, oversampling=2.0)
)
_EXACT = library.SearchParams(quantization=library.QuantizationSearchParams(ignore=True))
_NO_TOKENS = library.PayloadSelector.Exclude([TOKENS])


class Shard:
    """Made where it is not there."""

    def __init__(self, layout: Layout) -> None:
        self._folder = layout.folder
        self._shard = _opened(layout)
        for key in (SCOPE, *KEYWORDS):
            if key not in self._shard.info().payload_schema:  # a version before this one made it
                _index(self._shard, key)

    def search(self, question: Question) -> list[Hit]:
        """Best first. Payloads are read of those alone: of a passage, all else takes less time."""
        where = as_filter(question.where, library)
        ways = _ways(question)
        asked = [_nearest(vector, name, where, question.limit, how) for name, vector, how in ways]
        answers = self._shard.query_batch(library.QueryBatchRequest(asked))
        found: dict[str, dict[Any, float]] = {DENSE: {}, SPARSE: {}}
        for (name, *_), hits in zip(ways, answers, strict=True):
            found[name] = {hit.id: hit.score for hit in hits}
        by_words_alone = {*found[SPARSE]} - {*found[DENSE]}
        if question.dense is not None and by_words_alone:
            found[DENSE] |= self._cosines(question.dense, by_words_alone)
        places = fused(found[DENSE], found[SPARSE], question)
        return self._read(places, question.closely)

    def _cosines(self, vector: np.ndarray, ids: set[Any]) -> dict[Any, float]:
        these = library.Filter(must=[library.HasIdCondition(ids)])
        asked = _nearest(vector, DENSE, these, len(ids), _EXACT)
        return {hit.id: hit.score for hit in self._shard.query(asked)}

    def _read(self, places: Sequence[Place], closely: int) -> list[Hit]:
        best, rest = ([place.id for place in part] for part in (places[:closely], places[closely:]))
        records = self._shard.retrieve(best, with_payload=True, with_vector=False)
        records += self._shard.retrieve(rest, with_payload=_NO_TOKENS, with_vector=False)
        payloads = {record.id: record.payload or {} for record in records}
        return [Hit(payloads[place.id], *place[1:]) for place in places]

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

    def vacuum(self) -> None:
        """Gives back what deleted points took, where that is a fifth; some 20 µs a point left. Not
        where a second copy has no room: the library ends with the process then.
        """
        taken = sum(file.stat().st_blocks * 512 for file in self._folder.rglob("*"))
        if has_room(self._folder, taken):
            self._shard.optimize()
        self._shard.flush()

    def close(self) -> None:
        self._shard.flush()
        self._shard.close()


def _nearest(vector: Any, name: str, where: Any, limit: int, how: Any) -> library.QueryRequest:
    """Ids and scores."""
    nearest = library.Query.Nearest(vector, using=name)
    return library.QueryRequest(
        query=nearest, filter=where, limit=limit, params=how, with_payload=False
    )


def _ways(question: Question) -> list[tuple[str, Any, Any]]:
    """Name, vector and parameters of each way in which it is asked."""
    ways: list[tuple[str, Any, Any]] = []
    if question.dense is not None:
        ways.append((DENSE, question.dense, _APPROXIMATE))
    if question.weights.text and question.sparse is not None and question.sparse.indices:
        corpus = library.IdfParams(corpus=as_filter(question.corpus, library))
        vector = library.SparseVector(*question.sparse)
        ways.append((SPARSE, vector, library.SearchParams(idf=corpus)))
    return ways


def _opened(layout: Layout) -> library.EdgeShard:
    made_by = layout.folder / MADE_BY
    if made_by.exists():
        return library.EdgeShard.load(str(layout.folder / "shard"), _config(layout))
    shutil.rmtree(layout.folder, ignore_errors=True)
    shard = _create(layout)
    _write(made_by, {"embedding_model": layout.model})
    return shard


def _create(layout: Layout) -> library.EdgeShard:
    folder = layout.folder / "shard"
    folder.mkdir(parents=True)
    shard = library.EdgeShard.create(str(folder), _config(layout))
    tenants = library.KeywordIndexParams(is_tenant=True)
    shard.update(library.UpdateOperation.create_field_index(TENANT, tenants))
    for key in (SCOPE, *KEYWORDS):
        _index(shard, key)
    for key in INTEGERS:
        numbers = library.IntegerIndexParams(lookup=True, range=True, enable_hnsw=False)
        shard.update(library.UpdateOperation.create_field_index(key, numbers))
    shard.flush()
    return shard


def _index(shard: library.EdgeShard, key: str) -> None:
    words = library.KeywordIndexParams(enable_hnsw=False)
    shard.update(library.UpdateOperation.create_field_index(key, words))


def _config(layout: Layout) -> library.EdgeConfig:
    """Of one that is there without a dimension its own, by which it is searched by words."""
    dense = library.EdgeVectorParams(
        layout.dimension, library.Distance.Cosine, quantization_config=_SHORT
    )
    sparse = library.EdgeSparseVectorParams(modifier=library.Modifier.Idf)
    return library.EdgeConfig(
        vectors={DENSE: dense} if layout.dimension else None,
        sparse_vectors={SPARSE: sparse},
        max_search_threads=1,  # the cores are the engine's
        # No graph of the nearest is built: that takes minutes in which nothing is answered.
        optimizers=library.EdgeOptimizersConfig(indexing_threshold=0, default_segment_number=1),
    )


def has_room(folder: Path, needed: int) -> bool:
    """On its disk, in bytes, and for what comes beside it."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize >= needed + _RESERVE


def _write(path: Path, content: dict[str, str]) -> None:
    """Whole, or not at all."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)
