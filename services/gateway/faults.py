"""What is wrong with a value, in words for whoever sent it: pydantic's speak of Python's types."""

from typing import Any

from pydantic import Field
from pydantic_core import ErrorDetails

_WORDS = {
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have {min_length} characters or more",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have {min_length} entries or more",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}
_OF_PATTERN: dict[str, str] = {}


def spelt(pattern: str, words: str) -> Any:
    """A field whose texts match `pattern`; what others are told goes on behind "must be"."""
    _OF_PATTERN[pattern] = words
    return Field(pattern=pattern)


def words_of(error: ErrorDetails) -> str:
    """To stand behind the field's name."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "string_pattern_mismatch" and context["pattern"] in _OF_PATTERN:
        return f"must be {_OF_PATTERN[context['pattern']]}"
    if _is_empty(kind, context):
        return "must not be empty"
    if kind in _WORDS:
        return _WORDS[kind].format_map({name: _figure(v) for name, v in context.items()})
    return error["msg"].removeprefix("Value error, ")


def _figure(value: Any) -> Any:
    """Whole numbers in all their digits; of others those that a float tells apart."""
    return f"{value:.16g}" if isinstance(value, float) else value


def _is_empty(kind: str, context: dict[str, Any]) -> bool:
    return kind in ("string_too_short", "too_short") and context["min_length"] == 1
