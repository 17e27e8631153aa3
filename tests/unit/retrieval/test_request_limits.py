"""What a request may be, to the last one: each refusal names its field."""

from typing import Any

import grpc
import pytest

from protos import retrieval_pb2 as pb
from protos.common_pb2 import AttributeValue, Caller
from services.common.errors import PenstockError
from services.retrieval import requests
from services.retrieval.requests import check_embed, check_index, check_remove, check_search

ME = Caller(tenant="acme")
EMBED = {"caller": ME, "texts": ["a"]}
SEARCH = {"caller": ME, "collections": ["c"], "query": "why", "limit": 1}
INDEX = {"caller": ME, "collection": "c", "source_id": "s", "blob": "b"}
REMOVE = {"caller": ME, "collection": "c"}
FIRST = "filter.compound.filters[0]"
NAN = float("nan")
LONGEST, MOST = "i" * requests.MAX_ID_CHARS, requests.MAX_COLLECTIONS


def compared(operator: str, *texts: str) -> pb.Filter:
    values = [AttributeValue(text=text) for text in texts]
    kind = pb.Filter.Operator.Value(operator)
    return pb.Filter(comparison=pb.Filter.Comparison(key="k", operator=kind, values=values))


def either(*filters: pb.Filter) -> pb.Filter:
    return pb.Filter(compound=pb.Filter.Compound(any=True, filters=filters))


def embed(**change: Any) -> None:
    check_embed(pb.EmbedRequest(**EMBED | change))


def search(**change: Any) -> None:
    check_search(pb.SearchRequest(**SEARCH | change))


def index(**change: Any) -> None:
    check_index(pb.IndexRequest(**INDEX | change), 100)


def remove(**change: Any) -> None:
    check_remove(pb.RemoveRequest(**REMOVE | change))


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (embed, {}),
        (embed, {"texts": ["a"] * requests.MAX_TEXTS}),
        (search, {}),
        (search, {"collections": [LONGEST] * MOST, "limit": requests.MAX_LIMIT}),
        (search, {"score_threshold": 1.0}),
        (index, {}),
        (index, {"title": "t" * requests.MAX_TITLE_CHARS, "blob": "b" * 1024}),
        (index, {"chunking": pb.Chunking(max_tokens=16, overlap_tokens=8)}),
        (index, {"chunking": pb.Chunking(max_tokens=100)}),
        (index, {"collection": LONGEST, "source_id": LONGEST}),
        (remove, {}),
        (remove, {"collection": LONGEST, "source_id": LONGEST}),
    ],
)
def test_what_is_within_its_limits_is_taken(check: Any, change: dict[str, Any]) -> None:
    check(**change)


@pytest.mark.parametrize("check", [embed, search, index, remove])
def test_nothing_is_done_for_nobody(check: Any) -> None:
    with pytest.raises(PenstockError) as refused:
        check(caller=Caller(request_id="r"))
    assert refused.value.param == "caller.tenant"


@pytest.mark.parametrize(
    ("check", "change", "param"),
    [
        (embed, {"texts": []}, "texts"),
        (embed, {"texts": ["a"] * (requests.MAX_TEXTS + 1)}, "texts"),
        (embed, {"texts": ["a", "\t\n"]}, "texts[1]"),
        (search, {"collections": []}, "collections"),
        (search, {"collections": ["c"] * (MOST + 1)}, "collections"),
        (search, {"collections": ["c", LONGEST + "i"]}, "collections[1]"),
        (search, {"query": " "}, "query"),
        (search, {"limit": 0}, "limit"),
        (search, {"limit": requests.MAX_LIMIT + 1}, "limit"),
        (search, {"score_threshold": -0.01}, "score_threshold"),
        (search, {"score_threshold": 1.01}, "score_threshold"),
        (search, {"ranking": pb.Ranking(text_weight=-1)}, "ranking.text_weight"),
        (search, {"ranking": pb.Ranking(embedding_weight=NAN)}, "ranking.embedding_weight"),
        (search, {"ranking": pb.Ranking(late_weight=-1)}, "ranking.late_weight"),
        (search, {"filter": pb.Filter()}, "filter"),
        (search, {"filter": either()}, "filter.compound.filters"),
        (
            search,
            {"filter": either(compared("EQ"))},
            "filter.compound.filters[0].comparison.values",
        ),
        (search, {"filter": compared("EQ", "a", "b")}, "filter.comparison.values"),
        (search, {"filter": compared("IN")}, "filter.comparison.values"),
        (search, {"filter": compared("GT", "a")}, "filter.comparison.values"),
        (index, {"collection": ""}, "collection"),
        (index, {"collection": LONGEST + "i"}, "collection"),
        (index, {"source_id": ""}, "source_id"),
        (index, {"source_id": LONGEST + "i"}, "source_id"),
        (index, {"title": "t" * (requests.MAX_TITLE_CHARS + 1)}, "title"),
        (index, {"blob": ""}, "blob"),
        (index, {"blob": "b" * 1025}, "blob"),
        (index, {"chunking": pb.Chunking(max_tokens=15)}, "chunking.max_tokens"),
        (index, {"chunking": pb.Chunking(max_tokens=101)}, "chunking.max_tokens"),
        (
            index,
            {"chunking": pb.Chunking(max_tokens=17, overlap_tokens=9)},
            "chunking.overlap_tokens",
        ),
        (remove, {"collection": ""}, "collection"),
        (remove, {"collection": LONGEST + "i"}, "collection"),
        (remove, {"source_id": LONGEST + "i"}, "source_id"),
    ],
)
def test_what_is_not_is_refused_by_its_field(
    check: Any, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(PenstockError) as refused:
        check(**change)
    error = refused.value
    assert (error.code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, param)
    assert error.message.startswith(param)
