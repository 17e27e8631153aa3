"""A schema closed for writing: what it takes, the client's takes, too."""

from typing import Any

import jsonschema
import pytest

from services.common.text.json_schema import closed

X = {"type": "object", "properties": {"x": {"type": "integer"}}}
OPEN: dict[str, Any] = {
    "says so": X | {"additionalProperties": True},
    "other names": X | {"patternProperties": {"^y": {}}},
    "put together": {"allOf": [X, {"properties": {"y": {}}, "required": ["y"]}]},
    "with a reference": {"$defs": {"a": X}, "$ref": "#/$defs/a", "properties": {"y": {}}},
    "one of": X | {"anyOf": [{"required": ["y"]}, {"required": ["x"]}]},
    "needs another": X | {"required": ["y"]},
    "so many": X | {"minProperties": 2},
    "no object": {"enum": [{"properties": {"y": 1}}]},
}
CLOSED: dict[str, Any] = {
    "plain": X,
    "in a list": {"type": "array", "items": X},
    "in a property": {"properties": {"properties": X, "b": X}},
    "either": {"anyOf": [X, {"type": "null"}]},
    "by a reference": {"$defs": {"a": X}, "properties": {"b": {"$ref": "#/$defs/a"}}},
}
VALUES: list[Any] = [{}, {"x": 1}, {"x": 1, "y": 2}, None, [{"x": 1}], [{"z": 1}], {"b": {"y": 1}}]


@pytest.mark.parametrize("name", OPEN)
def test_what_may_need_other_properties_stays_as_it_is(name: str) -> None:
    assert closed(OPEN[name]) == OPEN[name]


@pytest.mark.parametrize("name", CLOSED)
def test_other_properties_are_not_written(name: str) -> None:
    before, after = CLOSED[name], closed(CLOSED[name])
    taken = [
        [value for value in VALUES if jsonschema.Draft202012Validator(one).is_valid(value)]
        for one in (before, after)
    ]
    assert all(value in taken[0] for value in taken[1])
    assert len(taken[1]) < len(taken[0])
