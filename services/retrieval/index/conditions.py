"""Conditions as either of Qdrant's libraries takes them: their classes have the same names."""

from types import ModuleType
from typing import Any

from services.retrieval.index.points import Condition, Either, Every, Is, Missing, Not, Within

_FEW = 16  # values, of which each is looked up by itself: half the time of a set of them


def as_filter(condition: Condition, library: ModuleType) -> Any:
    """`library`: qdrant_edge, or qdrant_client.models."""
    if isinstance(condition, Every):
        return library.Filter(must=[_part(one, library) for one in condition.conditions])
    if isinstance(condition, Either):
        return library.Filter(should=[_part(one, library) for one in condition.conditions])
    if isinstance(condition, Not):
        return library.Filter(must_not=[_part(condition.condition, library)])
    return library.Filter(must=[_part(condition, library)])


def _part(condition: Condition, library: ModuleType) -> Any:
    if isinstance(condition, Is):
        return _is(condition, library)
    if isinstance(condition, Missing):
        if hasattr(library, "PayloadField"):
            return library.IsEmptyCondition(is_empty=library.PayloadField(key=condition.key))
        return library.IsEmptyCondition(condition.key)
    if isinstance(condition, Within):
        of_numbers = getattr(library, "RangeFloat", None) or library.Range
        bounds = of_numbers(gt=condition.gt, gte=condition.gte, lt=condition.lt, lte=condition.lte)
        return library.FieldCondition(key=condition.key, range=bounds)
    return as_filter(condition, library)


def _is(condition: Is, library: ModuleType) -> Any:
    def part(match: Any) -> Any:
        return library.FieldCondition(key=condition.key, match=match)

    if not 0 < len(condition.values) <= _FEW:
        return part(library.MatchAny(any=list(condition.values)))
    each = [part(library.MatchValue(value=value)) for value in condition.values]
    return each[0] if len(each) == 1 else library.Filter(should=each)
