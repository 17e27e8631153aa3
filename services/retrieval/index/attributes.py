"""A source's attributes on its points, and filters by them.

They lie apart by type, `attributes.number.<key>`, so that the text "1", the number 1 and true stay
three; a key is told in hex, because a path takes few characters as they are; a flag is 0 or 1,
because the embedded store matches no booleans. What is equal to something is looked up in the index
of `marks`, a digest of each attribute's key and value: keys are the tenants' own, and have no index
each. What is more or less than a number is asked of each point.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from protos.common_pb2 import AttributeValue
from protos.retrieval_pb2 import Filter
from services.retrieval.index.points import MARKS, Condition, Either, Every, Is, Not, Within

_BOUNDS = {Filter.GT: "gt", Filter.GTE: "gte", Filter.LT: "lt", Filter.LTE: "lte"}


def stored(attributes: Mapping[str, AttributeValue]) -> dict[str, Any]:
    """What of a point's payload holds them."""
    kinds: dict[str, dict[str, Any]] = {}
    for key, value in attributes.items():
        kind, told = _told(value)
        kinds.setdefault(kind, {})[_name(key)] = told
    return {"attributes": kinds, MARKS: [_mark(*one) for one in attributes.items()]}


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
        return Within(f"attributes.number.{_name(key)}", **{_BOUNDS[operator]: values[0].number})
    equals = Is(MARKS, tuple(_mark(key, value) for value in values))
    return Not(equals) if operator in (Filter.NE, Filter.NIN) else equals


def _mark(key: str, value: AttributeValue) -> str:
    kind, told = _told(value)
    whole = json.dumps([kind, key, told + 0.0 if kind == "number" else told])  # of -0.0 0.0
    return blake2b(whole.encode(), digest_size=12).hexdigest()


def _told(value: AttributeValue) -> tuple[str, Any]:
    kind = value.WhichOneof("kind") or "text"
    told = getattr(value, kind)
    return kind, int(told) if kind == "flag" else told


def _name(key: str) -> str:
    return f"k{key.encode().hex()}"
