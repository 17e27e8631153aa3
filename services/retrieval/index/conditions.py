"""Conditions as either of Qdrant's libraries takes them: their classes have the same names."""

from types import ModuleType
from typing import Any

from services.retrieval.index.points import Condition, Either, Every, Is, Not, Within


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
        if len(condition.values) == 1:
            match = library.MatchValue(value=condition.values[0])
        else:
            match = library.MatchAny(any=list(condition.values))
        return library.FieldCondition(key=condition.key, match=match)
    if isinstance(condition, Within):
        of_numbers = getattr(library, "RangeFloat", None) or library.Range
        bounds = of_numbers(gt=condition.gt, gte=condition.gte, lt=condition.lt, lte=condition.lte)
        return library.FieldCondition(key=condition.key, range=bounds)
    return as_filter(condition, library)
