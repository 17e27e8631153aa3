"""Reading bodies and query strings as models, and lists in pages."""

import json
import re
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

import grpc
import pytest
from pydantic import Field

from protos.common_pb2 import Passage, Range
from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.gateway.api.resources.pages import PageQuery, page
from services.gateway.api.resources.ranking import RankingOptions
from services.gateway.api.rest.queries import page_query
from services.gateway.api.schema import (
    Body,
    Metadata,
    at_most,
    parse,
    parse_body,
    read_aside,
    validated,
)
from services.gateway.faults import spelt
from services.gateway.runs.citations import annotations, filename, place


class Part(Body):
    text: str


class Sample(Body):
    NEUTRAL: ClassVar = {"n": (1,), "bias": ({},), "mode": ("auto", False)}

    name: str
    count: int | None = None
    share: float | None = None
    parts: Annotated[list[Part], at_most("max_messages")] | None = None
    metadata: Metadata | None = None


def refusal(fields: Any, limits: GatewaySettings | None = None) -> PenstockError:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    with pytest.raises(PenstockError) as refused:
        parse(Sample, body, limits)
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
    return refused.value


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({}, "name", "missing_required_parameter"),
        ({"name": 3}, "name", "invalid_value"),
        ({"name": "a", "count": "3"}, "count", "invalid_value"),
        ({"name": "a", "count": True}, "count", "invalid_value"),
        ({"name": "a", "count": 3.5}, "count", "invalid_value"),
        ({"name": "a", "odd": None}, "odd", "unknown_parameter"),
        ({"name": "a", "o" * 70: 1}, "o" * 64, "unknown_parameter"),
        ({"name": "a", "parts": [{"text": "x"}, {"text": 3}]}, "parts[1].text", "invalid_value"),
        ({"name": "a", "parts": [{"text": "x", "u": 1}]}, "parts[0].u", "unknown_parameter"),
        ({"name": "a", "parts": [{}]}, "parts[0].text", "missing_required_parameter"),
        ({"name": "a", "n": 2}, "n", "unsupported_parameter"),
        ({"name": "a", "n": True}, "n", "unsupported_parameter"),
        ({"name": "a", "bias": {"5": 1}}, "bias", "unsupported_parameter"),
        ({"name": "a", "mode": 0}, "mode", "unsupported_parameter"),
        ({"name": "a", "metadata": {"k": 3}}, "metadata.k", "invalid_value"),
        ({"name": "a", "metadata": {"k": "v" * 513}}, "metadata.k", "invalid_value"),
        ({"name": "a", "metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value"),
        (b'{"name": "a", "share": NaN}', "", "invalid_json"),
        (b'{"name": "a", "share": Infinity}', "", "invalid_json"),
        (b'{"name": "a", "share": 1e999}', "share", "invalid_value"),
        (b'{"name": "a", "name": "a"}', "name", ""),
        (b'{"name": "a", "parts": [{"text": "x", "te\\u0078t": "y"}]}', "text", ""),
        (b'{"name": "a", "metadata": {"\xc3\xb6": "", "\xc3\xb6": ""}}', "ö", ""),
        (b'"name"', "", "invalid_json"),
        (b"null", "", "invalid_json"),
        (b"", "", "invalid_json"),
    ],
)
def test_what_is_wrong_is_named(fields, param, reason):
    error = refusal(fields)
    assert (error.param, error.reason) == (param, reason)
    assert param in error.message
    assert error.stage == "gateway"


def test_a_name_that_is_there_twice_is_told_with_its_place():
    told = refusal(b'{"name": "a",\n "count": 1, "count": 2}').message
    assert told == "The parameter 'count' is there twice in one object (line 2 column 22)."
    each = [{"text": "x"}, {"text": "x"}]  # of two objects each has its own
    assert parse(Sample, json.dumps({"name": "a", "parts": each}).encode()).parts


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": 3}, "must be a text"),
        ({"name": "a", "count": 3.5}, "must be a whole number"),
        ({"name": "a", "count": "3"}, "must be a whole number"),
        ({"name": "a", "share": "3"}, "must be a number"),
        ({"name": "a", "parts": {}}, "must be a list"),
        ({"name": "a", "parts": ["x"]}, "must be an object"),
        ({"name": "a", "metadata": []}, "must be an object"),
        ({"name": "a", "metadata": {"k": "v" * 513}}, "must have at most 512 characters"),
        (b'{"name": "a", "share": 1e999}', "must be a finite number"),
    ],
)
def test_what_is_wrong_is_told_in_words(fields, words):
    error = refusal(fields)
    assert error.message == f"Invalid '{error.param}': {words}."


class Ranges(Body):
    above: Annotated[float, Field(gt=0, lt=2)] | None = None
    whole: Annotated[int, Field(ge=1, le=2**53)] | None = None
    wide: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    code: Annotated[str, spelt("^[a-z]+$", "small letters")] | None = None
    listed: Annotated[list[str], Field(min_length=1, max_length=2)] | None = None
    named: Annotated[str, Field(min_length=1)] | None = None
    which: Literal["a", "b"] | None = None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("above", 0, "must be above 0"),
        ("above", 2.5, "must be below 2"),
        ("whole", 0, "must be at least 1"),
        ("whole", 2**53 + 1, "must be at most 9007199254740992"),
        ("wide", 2**70, "must be below 18446744073709551616"),
        ("wide", -(2**70), "must be at least -9223372036854775808"),
        ("above", 1e30, "must be below 2"),
        ("code", "A", "must be small letters"),
        ("listed", [], "must not be empty"),
        ("listed", ["x"] * 3, "must have at most 2 entries"),
        ("named", "", "must not be empty"),
        ("which", "c", "must be 'a' or 'b'"),
    ],
)
def test_a_bound_is_told_with_its_figure(field, value, words):
    with pytest.raises(PenstockError) as refused:
        validated(Ranges, {field: value})
    assert refused.value.message == f"Invalid '{field}': {words}."


def test_no_model_of_requests_tells_of_pythons_types():
    """Each is given what it cannot take, in each of its fields."""
    for name in ("admin", "rest"):
        import_module(f"services.gateway.api.{name}.routes")
    odd = (None, True, 1.5, -1, 10**30, "", "x" * 70_000, [], [1], [{}], {}, {"a": 1})
    told = set()
    for model in _models(Body):
        for name, field in model.model_fields.items():
            for value in odd:
                try:
                    validated(model, {field.alias or name: value}, GatewaySettings())
                except PenstockError as error:
                    told.add(error.message)
    assert len(told) > 100
    assert not [one for one in told if re.search("Input should|valid dict|instance of|should", one)]


def _models(of: type[Body]) -> Iterator[type[Body]]:
    for model in of.__subclasses__():
        if model.__module__.startswith("services.") and "openapi" not in model.__module__:
            yield model
        yield from _models(model)


def test_a_body_may_have_every_field():
    every = {"name": "a", "count": 3, "share": 1, "parts": [{"text": "x"}], "metadata": {"k": "v"}}
    read = parse(Sample, json.dumps(every).encode())
    assert read.model_dump() == every
    for odd in ("odd", "odd2"):
        assert refusal({**every, odd: 1}).param == odd


def test_a_metadata_key_has_its_limit():
    assert refusal({"name": "a", "metadata": {"k" * 65: ""}}).param.startswith("metadata.kkk")


def test_what_asks_for_nothing_is_accepted_and_gone():
    for fields in ({"n": 1}, {"n": 1.0}, {"n": None}, {"bias": {}}, {"mode": "auto"}):
        read = parse(Sample, json.dumps({"name": "a", **fields}).encode())
        assert read.model_dump(exclude_defaults=True) == {"name": "a"}
    told = refusal({"name": "a", "mode": "fast"}).message
    assert '"auto" or false or null' in told


def test_limits_are_up_to_and_with():
    largest = {f"{n:064}": "v" * 512 for n in range(16)}
    read = parse(Sample, json.dumps({"name": "a", "metadata": largest}).encode())
    assert read.metadata == largest
    two, three = ([{"text": "x"}] * n for n in (2, 3))
    limits = GatewaySettings(max_messages=2)
    assert validated(Sample, {"name": "a", "parts": two}, limits).parts == [Part(text="x")] * 2
    assert validated(Sample, {"name": "a", "parts": three}).parts == [Part(text="x")] * 3
    error = refusal({"name": "a", "parts": three}, limits)
    assert (error.param, "at most 2" in error.message) == ("parts", True)


async def test_only_a_large_body_is_read_in_a_thread():
    def reader() -> int:
        return threading.get_ident()

    assert await read_aside(65_536, reader) == threading.get_ident()
    assert await read_aside(65_537, reader) != threading.get_ident()
    large = {"name": "x" * 70_000}
    assert (await parse_body(Sample, json.dumps(large).encode())).name == large["name"]


# ---- pages --------------------------------------------------------------------------------------

ITEMS = [{"id": f"x{n:03}"} for n in (3, 0, 4, 1, 2)]


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({}, "43210", False),
        ({"order": "asc"}, "01234", False),
        ({"limit": "2"}, "43", True),
        ({"limit": "5"}, "43210", False),
        ({"limit": "100"}, "43210", False),
        ({"limit": "1", "after": "x002"}, "1", True),
        ({"limit": "2", "after": "x002"}, "10", False),
        ({"limit": "2", "after": "x002", "order": "asc"}, "34", False),
        ({"after": "x000"}, "", False),
    ],
)
def test_a_page(query, ids, more):
    told = page(ITEMS, page_query(query))
    assert [item["id"] for item in told["data"]] == [f"x{n:0>3}" for n in ids]
    first, last = (f"x{ids[at]:0>3}" if ids else None for at in (0, -1))
    assert (told["object"], told["has_more"]) == ("list", more)
    assert (told["first_id"], told["last_id"]) == (first, last)


def test_without_a_limit_a_page_has_twenty():
    many = [{"id": f"x{n:03}"} for n in range(30)]
    assert len(page(many, page_query({}))["data"]) == 20


def test_after_what_is_not_listed():
    with pytest.raises(PenstockError) as refused:
        page(ITEMS, PageQuery(after="x" * 1000))
    assert (refused.value.code, refused.value.param) == (grpc.StatusCode.INVALID_ARGUMENT, "after")
    assert len(refused.value.message) < 200


# ---- citations ----------------------------------------------------------------------------------


def test_a_citation_names_the_document_without_its_headings():
    nested = Passage(title="guide.md › Harbour › Hours", source_id="file-1")
    assert filename(nested) == "guide.md"
    assert filename(Passage(title="a > b")) == "a > b"
    assert filename(Passage(title="a › b")) == "a › b", "the client's own has no headings"
    own = Passage(title="Policy ›› 2026.txt › Hours", source_id="file-2")
    assert filename(own) == "Policy › 2026.txt"
    (cited,) = annotations("at six [1]", [nested])
    assert cited == {
        "type": "file_citation",
        "index": 7,
        "file_id": "file-1",
        "filename": "guide.md",
    }


def test_marks_of_four_digits_are_none():
    assert annotations("[0001]", [Passage(title="a")]) == []
    hundred = [Passage(title=str(n)) for n in range(1, 101)]
    assert [cited["filename"] for cited in annotations("[100][101]", hundred)] == ["100"]


def test_what_a_model_says_itself_is_told_alone():
    weights = {"embedding_weight": 0, "text_weight": 0}
    with pytest.raises(PenstockError, match="'hybrid_search': one of embedding"):
        validated(RankingOptions, {"hybrid_search": weights})


def test_weights_are_refused_where_they_count_for_nothing() -> None:
    weights = {"embedding_weight": 1, "text_weight": 1}
    with pytest.raises(PenstockError) as refused:
        validated(RankingOptions, {"ranker": "none", "hybrid_search": weights})
    assert refused.value.param == "hybrid_search"
    for one in ({"ranker": "none"}, {"ranker": "auto", "hybrid_search": weights}):
        validated(RankingOptions, one)


def test_a_passages_place_is_told_where_it_has_one():
    paged = Passage(title="a.pdf", pages=Range(first=2, last=3))
    assert place(paged) == {"pages": {"first": 2, "last": 3}}
    assert place(Passage(title="a.csv", rows=Range(first=1, last=1))) == {
        "rows": {"first": 1, "last": 1}
    }
    assert place(Passage(title="a.md")) == {}
