"""The local store's filters: what the library's would select, without its price."""

import time
from typing import Any

import numpy as np
import pytest
from qdrant_client import models

from services.retrieval import local_filters
from services.retrieval.local_filters import payload_mask
from services.retrieval.store import _filter

PAYLOADS: list[dict[str, Any]] = [
    {"tenant": tenant, "collection": collection, "source_id": "s", "revision": revision}
    for tenant in ("a", "b")
    for collection in ("c", "d", "e")
    for revision in (1, 2, 3)
] + [{"tenant": "a"}]


def library(payloads: list[dict[str, Any]], where: models.Filter | None) -> np.ndarray:
    ids = [str(n) for n in range(len(payloads))]
    return local_filters._library(
        payloads=payloads, payload_filter=where, ids_inv=ids, deleted_per_vector={}
    )


@pytest.mark.parametrize(
    "where",
    [
        _filter("a"),
        _filter("nobody"),
        _filter("b", collection=["c", "e"]),
        _filter("b", collection=[]),
        _filter("a", collection="d", source_id="s"),
        _filter("a", revision=models.MatchValue(value=2)),
        _filter("a", revision=models.Range(lt=2)),
        _filter("a", revision=models.Range(gt=1, lte=2)),
        _filter("a", revision=models.Range(gte=3)),
    ],
)
def test_the_same_points_are_selected_without_the_library(monkeypatch, where):
    wanted = library(PAYLOADS, where)
    monkeypatch.setattr(local_filters, "_library", None)
    assert payload_mask(payloads=PAYLOADS, payload_filter=where).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "where",
    [
        None,
        models.Filter(must_not=_filter("a").must),
        models.Filter(must=[models.HasIdCondition(has_id=["3"])]),
        models.Filter(must=[models.FieldCondition(key="tenant", match=models.MatchText(text="b"))]),
    ],
)
def test_what_is_not_known_here_is_the_librarys(where):
    others = {"ids_inv": [str(n) for n in range(len(PAYLOADS))], "deleted_per_vector": {}}
    found = payload_mask(payloads=PAYLOADS, payload_filter=where, **others)
    assert found.tolist() == library(PAYLOADS, where).tolist()
    assert found.sum() > 0


def test_another_tenants_points_cost_next_to_nothing():
    theirs = [{"tenant": "flood", "collection": "c", "source_id": "s", "revision": 1}] * 20_000
    where = _filter("b", collection=["c"])

    def seconds(mask: Any) -> float:
        began = time.thread_time()
        mask()
        return time.thread_time() - began

    slow = seconds(lambda: library(theirs, where))
    fast = min(seconds(lambda: payload_mask(payloads=theirs, payload_filter=where)) for _ in "abc")
    assert fast < slow / 8
