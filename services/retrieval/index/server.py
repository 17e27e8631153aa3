"""A Qdrant server, of one or several hosts, that all replicas of retrieval share."""

import re
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from services.retrieval.index.conditions import as_filter
from services.retrieval.index.fusing import Place, fused
from services.retrieval.index.layout import Layout
from services.retrieval.index.points import (
    BOTH,
    DENSE,
    INTEGERS,
    KEYWORDS,
    SCOPE,
    SPARSE,
    TENANT,
    TOKENS,
    Condition,
    Found,
    Hit,
    Point,
    Question,
    StoreAwayError,
    StoreFailedError,
    best_of,
)
from services.retrieval.index.scopes import publish_unscoped

_LOOKED_AT_S = 600.0  # for what replicas of another model, or of an earlier version, stored since

# As in the embedded store (shard.py).
_SHORT = models.TurboQuantization(
    turbo=models.TurboQuantQuantizationConfig(bits=models.TurboQuantBitSize.BITS4, always_ram=True)
)
_APPROXIMATE = models.SearchParams(
    quantization=models.QuantizationSearchParams(rescore=True, oversampling=2.0)
)
_NO_TOKENS = models.PayloadSelectorExclude(exclude=[TOKENS])


class ServerPoints:
    """See `Points`. Made and checked at the first call that finds the server there."""

    kind = "server"
    threads = 8

    def __init__(
        self,
        layouts: Sequence[Layout],
        url: str,
        api_key: str | None,
        ca: Path | None,
        timeout_s: float,
    ) -> None:
        """`layouts`: one for each model, one at least."""
        self._layouts = {layout.fingerprint: layout for layout in layouts}
        self._first = layouts[0]
        self._url = url
        self._api_key = api_key
        self._ca = ca
        self._timeout_s = max(1, round(timeout_s))
        self._client: QdrantClient | None = None
        self._look_again = 0.0  # monotonic
        self._earlier: list[str] = []  # collections of other models
        self._opening = threading.Lock()

    def open(self) -> None:
        with self._ready():
            pass

    def search(self, question: Question, model: str = "") -> Found:
        by_words, its = replace(question, dense=None, weights=BOTH, closely=0), self._name(model)
        with self._ready() as client:
            own = _found(client, its, question)
            others = (name for name in self._all() if name != its)
            earlier = [_found(client, name, by_words) for name in others]
        return Found(own, best_of(earlier, question.limit))

    def put(self, points: Sequence[Point], model: str = "") -> None:
        made = [_point(point) for point in points]
        with self._ready() as client:
            client.upsert(self._name(model), made, wait=True)

    def change(self, where: Condition, payload: Mapping[str, Any]) -> None:
        with self._ready() as client:
            for name in self._all():
                _Collection(client, name).change(where, payload)

    def delete(self, ids: Sequence[str]) -> None:
        with self._ready() as client:
            for name in self._all():
                client.delete(name, models.PointIdsList(points=list(ids)), wait=True)

    def ids(self, where: Condition, limit: int) -> list[str]:
        selected = as_filter(where, models)
        found: list[str] = []
        with self._ready() as client:
            # By what is deleted: so also of a model that another replica was started with since.
            self._earlier = self._others(client)
            for name in self._all():
                if left := limit - len(found):
                    records, _ = client.scroll(name, selected, limit=left, with_payload=False)
                    found += (str(record.id) for record in records)
        return found

    def payloads(
        self, where: Condition, limit: int, keys: Sequence[str], model: str = ""
    ) -> list[dict[str, Any]]:
        with self._ready() as client:
            return _Collection(client, self._name(model)).payloads(where, limit, keys)

    def count(self, where: Condition, model: str = "") -> int:
        with self._ready() as client:
            return client.count(self._name(model), as_filter(where, models), exact=True).count

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    @contextmanager
    def _ready(self) -> Iterator[QdrantClient]:
        """The client, with the collection made and checked."""
        try:
            with self._opening:
                if self._client is None:
                    self._client = self._connect()
                if time.monotonic() >= self._look_again:
                    for layout in self._layouts.values():
                        _make(self._client, layout)
                    self._earlier = self._others(self._client)
                    for name in self._all():
                        publish_unscoped(_Collection(self._client, name))
                    self._look_again = time.monotonic() + _LOOKED_AT_S
            yield self._client
        except (ResponseHandlingException, httpx.HTTPError, OSError) as error:
            raise StoreAwayError(type(error).__name__) from error
        except UnexpectedResponse as error:
            self._look_again = 0.0  # the collection may be gone: look again at the next call
            raise StoreFailedError(f"status {error.status_code}") from error

    def _connect(self) -> QdrantClient:
        return QdrantClient(
            url=self._url,
            api_key=self._api_key,
            timeout=self._timeout_s,
            check_compatibility=False,
            verify=ssl.create_default_context(cafile=self._ca) if self._ca else True,
        )

    def _all(self) -> list[str]:
        return [*(layout.collection for layout in self._layouts.values()), *self._earlier]

    def _name(self, model: str) -> str:
        """Of its collection."""
        return self._layouts[model].collection if model else self._first.collection

    def _others(self, client: QdrantClient) -> list[str]:
        """Collections of other models. An empty one stays: a replica may be about to write to
        it."""
        of_a_model = re.compile(rf"{re.escape(self._first.earlier)}-[0-9a-f]+")  # not of a longer
        own = {layout.collection for layout in self._layouts.values()}
        names = (found.name for found in client.get_collections().collections)
        return [name for name in names if of_a_model.fullmatch(name) and name not in own]


def _make(client: QdrantClient, layout: Layout) -> None:
    if not client.collection_exists(layout.collection):
        _create(client, layout)
    # In any case: who made it may have ended before that. What is there is left as it is.
    tenant = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=True)
    client.create_payload_index(layout.collection, TENANT, tenant)
    for key in (SCOPE, *KEYWORDS):
        client.create_payload_index(layout.collection, key, models.PayloadSchemaType.KEYWORD)
    for key in INTEGERS:
        client.create_payload_index(layout.collection, key, models.PayloadSchemaType.INTEGER)
    # Last: a collection without is built anew for it, with the graphs of its indexes.
    if client.get_collection(layout.collection).config.quantization_config is None:
        client.update_collection(layout.collection, quantization_config=_SHORT)


def _create(client: QdrantClient, layout: Layout) -> None:
    dense = models.VectorParams(size=layout.dimension, distance=models.Distance.COSINE)
    sparse = models.SparseVectorParams(modifier=models.Modifier.IDF)
    # One graph per tenant instead of a global one: every search names its tenant.
    graph = models.HnswConfigDiff(m=0, payload_m=16)
    try:
        client.create_collection(
            layout.collection,
            vectors_config={DENSE: dense},
            sparse_vectors_config={SPARSE: sparse},
            hnsw_config=graph,
            quantization_config=_SHORT,
            metadata={"embedding_model": layout.model},
        )
    except UnexpectedResponse as error:
        if error.status_code != 409:  # another replica was first
            raise


class _Collection:
    """See `Changeable`."""

    def __init__(self, client: QdrantClient, name: str) -> None:
        self._client = client
        self._name = name

    def payloads(self, where: Condition, limit: int, keys: Sequence[str]) -> list[dict[str, Any]]:
        records, _ = self._client.scroll(
            self._name, as_filter(where, models), limit=limit, with_payload=list(keys)
        )
        return [record.payload or {} for record in records]

    def change(self, where: Condition, payload: Mapping[str, Any]) -> None:
        selected = as_filter(where, models)
        self._client.set_payload(self._name, dict(payload), selected, wait=True)


def _found(client: QdrantClient, name: str, question: Question) -> list[Hit]:
    """Best first. Payloads are read of those alone."""
    asked = _requests(question)
    if not asked:
        return []
    answers = client.query_batch_points(name, list(asked.values()))
    found: dict[str, dict[Any, float]] = {DENSE: {}, SPARSE: {}}
    for way, answer in zip(asked, answers, strict=True):
        found[way] = {hit.id: hit.score for hit in answer.points}
        for hit in answer.points:
            if isinstance(hit.vector, dict) and question.dense is not None:
                cosine = np.asarray(hit.vector[DENSE], np.float32) @ question.dense
                found[DENSE].setdefault(hit.id, float(cosine))
    places = fused(found[DENSE], found[SPARSE], question)
    return _read(client, name, places, question.closely)


def _read(client: QdrantClient, name: str, places: list[Place], closely: int) -> list[Hit]:
    """Those that were not deleted since. Tokens are 5 KB of a passage, and are read of the best
    alone: a second call takes less than those of hundreds."""
    records = []
    for part, what in ((places[:closely], True), (places[closely:], _NO_TOKENS)):
        if ids := [place.id for place in part]:
            records += client.retrieve(name, ids, with_payload=what)
    payloads = {record.id: record.payload or {} for record in records}
    return [Hit(payloads[place.id], *place[1:]) for place in places if place.id in payloads]


def _requests(question: Question) -> dict[str, models.QueryRequest]:
    """By the way in which it is asked."""
    where = as_filter(question.where, models)
    asked = {}
    if question.dense is not None:
        asked[DENSE] = models.QueryRequest(
            query=question.dense.tolist(),
            using=DENSE,
            filter=where,
            limit=question.limit,
            with_payload=False,
            params=_APPROXIMATE,
        )
    if question.weights.text and question.sparse is not None and question.sparse.indices:
        indices, values = question.sparse
        corpus = models.IdfCorpusParams(corpus=as_filter(question.corpus, models))
        asked[SPARSE] = models.QueryRequest(
            query=models.SparseVector(indices=indices, values=values),
            using=SPARSE,
            filter=where,
            limit=question.limit,
            with_payload=False,
            with_vector=[DENSE] if question.dense is not None else None,
            params=models.SearchParams(idf=corpus),
        )
    return asked


def _point(point: Point) -> models.PointStruct:
    indices, values = point.sparse
    sparse = models.SparseVector(indices=indices, values=values)
    return models.PointStruct(
        id=point.id,
        vector={DENSE: point.dense.tolist(), SPARSE: sparse},
        payload=point.payload,
    )
