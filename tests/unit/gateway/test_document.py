"""The OpenAPI document says no more than the parser takes: field by field."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from services.gateway.api.openapi.document import document
from services.gateway.api.schema import Body

SCHEMAS: dict[str, Any] = document()["components"]["schemas"]


def _models(of: type[Body] = Body) -> Iterator[type[Body]]:
    for model in of.__subclasses__():
        if model.__module__.startswith("services."):  # a test may have made one of the same name
            yield model
        yield from _models(model)


MODELS = {model.__name__: model for model in _models() if model.__name__ in SCHEMAS}


def _ends(schema: dict[str, Any]) -> Iterator[Any]:
    """Values that `schema` allows, such as it ends with: of what it lists all, of numbers and texts
    the least and the most."""
    if "$ref" in schema:
        return
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _ends(one)
    yield from schema.get("enum", ())
    if "const" in schema:
        yield schema["const"]
    if "enum" in schema or "const" in schema:
        return
    match schema.get("type"):
        case "null":
            yield None
        case "boolean":
            yield from (True, False)
        case "integer" | "number":
            yield from (schema[end] for end in ("minimum", "maximum") if end in schema)
        case "string" if not {"pattern", "format"} & schema.keys():
            yield "x" * max(1, schema.get("minLength", 0))
            yield "x" * schema.get("maxLength", 1)


@pytest.mark.parametrize("name", MODELS)
def test_what_the_document_allows_of_a_field_the_parser_takes(name: str) -> None:
    for field, schema in SCHEMAS[name].get("properties", {}).items():
        for value in _ends(schema):
            assert not _faults(MODELS[name], field, value), (field, value)


def _faults(model: type[Body], field: str, value: Any) -> list[Any]:
    """What the parser has against it; that other fields are not there is no matter."""
    try:
        model.model_validate({field: value})
    except ValidationError as error:
        return [
            told
            for told in error.errors()
            if field in (*told["loc"][:1], told.get("ctx", {}).get("field"))
            and told["type"] != "missing"
        ]
    return []


def test_the_models_of_requests_are_there() -> None:
    asking = {"ChatCompletionRequest", "TokenizeRequest", "SearchStore", "ResponsesRequest"}
    assert len(MODELS) > 40, sorted(MODELS)
    assert asking <= MODELS.keys(), sorted(MODELS)
