"""Attributes of files in vector stores, and filters of searches by them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from protos import retrieval_pb2 as pb
from services.gateway.api.schema import INVALID, Body, missing, refuse
from services.gateway.faults import spelt
from services.gateway.stores.vector_stores.store_files import attribute_value

MAX_ATTRIBUTES = 16
MAX_VALUES = 100  # of one comparison
MAX_FILTERS = 100  # in one search, those within others included
MAX_FILTER_DEPTH = 8
_MAX_CHARS = 512  # of a value
_MAX_NUMBER = 2**53  # up to here each whole number is one of its own everywhere
_COMPARED = ("gt", "gte", "lt", "lte")
_OF_MANY = ("in", "nin")
_OF_ALL = ("and", "or")
_MESSAGE = "{message}"

Scalar = bool | int | float | str


def _scalar(value: Scalar) -> Scalar:
    if isinstance(value, str):
        if len(value) > _MAX_CHARS:
            raise _wrong(f"must have at most {_MAX_CHARS} characters")
    elif not isinstance(value, bool | int | float):
        raise _wrong("must be a text, a number or a boolean")
    elif not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise _wrong("a number must be within -2^53 and 2^53")
    return value


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError(INVALID, _MESSAGE, {"message": message})


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_ATTRIBUTES:
        raise _wrong(f"there may be at most {MAX_ATTRIBUTES}")
    return value


_Text = Annotated[str, Field(max_length=_MAX_CHARS)]
_Number = Annotated[float, Field(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]
_Scalar = Annotated[Scalar, PlainValidator(_scalar, json_schema_input_type=bool | _Number | _Text)]
# Quotes would end a key's name where it is a part of a path.
Key = Annotated[
    str,
    spelt(
        r'^[^"\\\x00-\x1f\x7f]{1,64}$',
        "1 to 64 characters without quotes, backslashes and control characters",
    ),
]
_Pairs = dict[Key, _Scalar]
Attributes = Annotated[
    _Pairs,
    BeforeValidator(
        _few, json_schema_input_type=Annotated[_Pairs, Field(max_length=MAX_ATTRIBUTES)]
    ),
]


def _scalars(value: Any) -> Scalar | list[Scalar]:
    if not isinstance(value, list):
        return _scalar(value)
    if not 1 <= len(value) <= MAX_VALUES:
        raise _wrong(f"must have 1 to {MAX_VALUES} entries")
    return [_scalar(one) for one in value]


_Values = Annotated[
    Scalar | list[Scalar],
    PlainValidator(
        _scalars,
        json_schema_input_type=bool
        | _Number
        | _Text
        | Annotated[list[bool | _Number | _Text], Field(min_length=1, max_length=MAX_VALUES)],
    ),
]


class Filter(Body):
    """A comparison of one attribute, or several filters together."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "and", "or"]
    key: Key | None = None
    value: _Values | None = None
    filters: Annotated[list["Filter"], Field(min_length=1, max_length=MAX_FILTERS)] | None = None

    @model_validator(mode="after")
    def _of_its_type(self) -> "Filter":
        of_all = self.type in _OF_ALL
        for field, goes in (("key", not of_all), ("value", not of_all), ("filters", of_all)):
            if goes and getattr(self, field) is None:
                raise missing(field)
            if not goes and getattr(self, field) is not None:
                raise refuse(field, f"a filter of type {self.type!r} has none")
        if not of_all and (self.type in _OF_MANY) != isinstance(self.value, list):
            needs = "a list" if self.type in _OF_MANY else "one value, not a list"
            raise refuse("value", f"{self.type!r} takes {needs}")
        if self.type in _COMPARED and (
            isinstance(self.value, bool) or not isinstance(self.value, int | float)
        ):
            raise refuse("value", f"{self.type!r} compares numbers")
        return self

    def told(self) -> pb.Filter:
        """As retrieval takes it."""
        if self.filters is not None:
            each = [one.told() for one in self.filters]
            return pb.Filter(compound=pb.Filter.Compound(any=self.type == "or", filters=each))
        values = self.value if isinstance(self.value, list) else [self.value]
        return pb.Filter(
            comparison=pb.Filter.Comparison(
                key=self.key,
                operator=self.type.upper(),
                values=[attribute_value(one) for one in values if one is not None],
            )
        )


def _bounded(value: Any) -> Any:
    """Looked at before it is read: each level is a call there."""
    level, count = [value], 1
    for _ in range(MAX_FILTER_DEPTH):
        level = [inner for one in level for inner in _within(one)]
        count += len(level)
        if count > MAX_FILTERS:
            raise _wrong(f"there may be at most {MAX_FILTERS} filters")
    if level:
        raise _wrong(f"may be nested at most {MAX_FILTER_DEPTH} deep")
    return value


def _within(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping) and isinstance(value.get("filters"), list):
        yield from value["filters"]


Filters = Annotated[Filter, BeforeValidator(_bounded, json_schema_input_type=Filter)]
