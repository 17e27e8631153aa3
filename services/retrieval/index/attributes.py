"""A source's attributes on its points, and filters by them.

They lie apart by type, `attributes.number.<key>`, so that the text "1", the number 1 and true stay
three; a key is told in hex, because a path takes few characters as they are; a flag is 0 or 1,
because the embedded store matches no booleans.
"""

from collections.abc import Mapping
from typing import Any

from protos.common_pb2 import AttributeValue
from protos.retrieval_pb2 import Filter
from services.retrieval.index.points import Condition, Either, Every, Is, Not, Within

_BOUNDS = {Filter.GT: "gt", Filter.GTE: "gte", Filter.LT: "lt", Filter.LTE: "lte"}


def stored(attributes: Mapping[str, AttributeValue]) -> dict[str, dict[str, Any]]:
    """As a point's payload holds them."""
    kinds: dict[str, dict[str, Any]] = {}
    for key, value in attributes.items():
        kind = value.WhichOneof("kind") or "text"
        told = getattr(value, kind)
        kinds.setdefault(kind, {})[_name(key)] = int(told) if kind == "flag" else told
    return kinds


def told(payload: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """Those of a point."""
    found = {}
    for kind, values in payload.get("attributes", {}).items():
        for name, value in values.items():
            given: dict[str, Any] = {kind: bool(value) if kind == "flag" else value}
            found[bytes.fromhex(name[1:]).decode()] = AttributeValue(**given)
    return found


def condition(where: Filter) -> Condition:
    if where.WhichOneof("kind") == "compound":
        parts = tuple(map(condition, where.compound.filters))
        return Either(parts) if where.compound.any else Every(parts)
    key, operator = where.comparison.key, where.comparison.operator
    values = where.comparison.values
    if operator in _BOUNDS:
        return Within(_path("number", key), **{_BOUNDS[operator]: values[0].number})
    equals = Either(tuple(_equals(key, value) for value in values))
    return Not(equals) if operator in (Filter.NE, Filter.NIN) else equals


def _equals(key: str, value: AttributeValue) -> Condition:
    kind = value.WhichOneof("kind") or "text"
    path = _path(kind, key)
    if kind == "number":
        return Within(path, gte=value.number, lte=value.number)
    return Is(path, (int(value.flag) if kind == "flag" else value.text,))


def _path(kind: str, key: str) -> str:
    return f"attributes.{kind}.{_name(key)}"


def _name(key: str) -> str:
    return f"k{key.encode().hex()}"
