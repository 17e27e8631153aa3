"""JSON schemas as what a model is to write."""

from typing import Any

_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
_VALUES = {"enum", "const", "default", "examples"}
_COMBINED = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref"}


def closed(schema: Any) -> Any:
    """The same schema, but that objects have only the properties which it names, where it does not
    say `additionalProperties` itself: a model, and a small one above all, goes on with properties
    of its own for ever. What matches it matches the schema. One whose objects are put together of
    several schemas stays as it is: each would forbid the others' properties."""
    return schema if _puts_together(schema) else _closed(schema)


def _closed(value: Any) -> Any:
    match value:
        case dict():
            made = {k: v if k in _VALUES else _closed(v) for k, v in value.items()}
            if _names_all(made):
                made["additionalProperties"] = False
            return made
        case list():
            return [_closed(one) for one in value]
    return value


def _names_all(schema: dict[str, Any]) -> bool:
    """It is an object's, and one of the properties that it names can be written."""
    named, needed = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(needed, list) or schema.keys() & _OPEN:
        return False
    return all(name in named for name in needed)


def _puts_together(value: Any) -> bool:
    match value:
        case dict():
            if "allOf" in value or ("properties" in value and value.keys() & _COMBINED):
                return True
            return any(_puts_together(one) for one in value.values())
        case list():
            return any(map(_puts_together, value))
    return False
