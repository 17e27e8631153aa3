"""Filters by attributes: what the store selects is what they say."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from protos.common_pb2 import AttributeValue
from protos.retrieval_pb2 import Filter
from services.retrieval.index import attributes
from services.retrieval.index.points import Every, Is, Point, Sparse
from tests.support.shards import DIMENSION, Here, layout, memory_folder

Values = Mapping[str, str | float | bool]

KEYS = ("kind", "a.b c", "größe", "")
SOURCES: list[Values] = [
    {},
    {"kind": "report", "a.b c": 1.0, "größe": True},
    {"kind": "true", "a.b c": 2.5, "größe": False},
    {"kind": "1", "a.b c": -3.0},
    {"kind": 1.0, "größe": "report"},
    {"kind": True, "": "report"},
    {"kind": 2.5, "a.b c": "1", "größe": 1.0},
    {"a.b c": True, "": False},
    {"kind": -0.0},
]
VALUES = st.sampled_from(["report", "true", "1", "", 1.0, 2.5, -3.0, 0.0, True, False])
TESTS = {
    Filter.EQ: lambda held, wanted: held == wanted,
    Filter.GT: lambda held, wanted: held > wanted,
    Filter.GTE: lambda held, wanted: held >= wanted,
    Filter.LT: lambda held, wanted: held < wanted,
    Filter.LTE: lambda held, wanted: held <= wanted,
}


def value(one: str | float | bool) -> AttributeValue:
    if isinstance(one, bool):
        return AttributeValue(flag=one)
    return AttributeValue(text=one) if isinstance(one, str) else AttributeValue(number=one)


def values(given: Values) -> dict[str, AttributeValue]:
    return {key: value(one) for key, one in given.items()}


def comparison(key: str, operator: "Filter.Operator", *wanted: str | float | bool) -> Filter:
    held = [value(one) for one in wanted]
    return Filter(comparison=Filter.Comparison(key=key, operator=operator, values=held))


def compound(any_of: bool, filters: list[Filter]) -> Filter:
    return Filter(compound=Filter.Compound(any=any_of, filters=filters))


COMPARISONS = st.one_of(
    st.builds(comparison, st.sampled_from(KEYS), st.sampled_from([Filter.EQ, Filter.NE]), VALUES),
    st.builds(
        comparison,
        st.sampled_from(KEYS),
        st.sampled_from([Filter.GT, Filter.GTE, Filter.LT, Filter.LTE]),
        st.sampled_from([-3.0, 0.0, 1.0, 2.5]),
    ),
    st.builds(
        lambda key, operator, wanted: comparison(key, operator, *wanted),
        st.sampled_from(KEYS),
        st.sampled_from([Filter.IN, Filter.NIN]),
        st.lists(VALUES, min_size=1, max_size=3),
    ),
)
FILTERS = st.recursive(
    COMPARISONS,
    lambda inner: st.builds(compound, st.booleans(), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)


def selects(where: Filter, held: Values) -> bool:
    """In plain Python; values of two types are never equal."""
    if where.WhichOneof("kind") == "compound":
        inner = [selects(one, held) for one in where.compound.filters]
        return any(inner) if where.compound.any else all(inner)
    told, operator = where.comparison, where.comparison.operator
    wanted = [getattr(one, one.WhichOneof("kind") or "") for one in told.values]
    mine = held.get(told.key)
    alike = [one for one in wanted if type(one) is type(mine)]
    if operator in (Filter.NE, Filter.NIN):
        return mine not in alike
    test = TESTS.get(operator, TESTS[Filter.EQ])
    return mine is not None and any(test(mine, one) for one in alike)


@pytest.fixture(scope="module")
def points() -> Iterator[Here]:
    with memory_folder() as folder:
        made = Here(layout(folder))
        made.open()
        made.put([_point(n, "t", held) for n, held in enumerate(SOURCES)])
        made.put([_point(n + 100, "rival", held) for n, held in enumerate(SOURCES)])
        yield made
        made.close()


def _point(number: int, tenant: str, held: Values) -> Point:
    payload = {"tenant": tenant, "n": number, **attributes.stored(values(held))}
    return Point(f"{number:032x}", np.ones(DIMENSION, np.float32), Sparse([1], [1.0]), payload)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FILTERS)
@example(comparison("kind", Filter.EQ, 0.0))  # one source has -0.0
def test_the_store_selects_what_plain_python_does(points: Here, where: Filter) -> None:
    ours = Every((Is("tenant", ("t",)), attributes.condition(where)))
    found = {payload["n"] for payload in points.payloads(ours, 999, ("n",))}
    assert found == {n for n, held in enumerate(SOURCES) if selects(where, held)}


def test_what_is_stored_is_told_again() -> None:
    for held in SOURCES:
        told = attributes.told(attributes.stored(values(held)))
        assert told == values(held)
    assert attributes.told({}) == {}
