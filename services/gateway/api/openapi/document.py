"""The OpenAPI document, made from the models that requests are read with (decision 0048)."""

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from services.gateway.api.openapi.operation import Form, Operation, Raw
from services.gateway.api.openapi.operations.table import OPERATIONS
from services.gateway.api.rest.lasting import KEY, LAST
from services.gateway.api.schema import Body
from services.gateway.identity.permissions import NEEDS

_REFERENCES = "#/components/schemas/{model}"
_ABOUT = """
OpenAI's REST API, and Anthropic's `/v1/messages`. What is not described is refused, by its name.
Answers have an `x-request-id`, by which `/v1/requests/{id}` tells of the request.
"""
_SECURITY = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "an API key, `psk-…`, or a token of the OIDC issuer",
    },
    "x-api-key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "the same, as Anthropic's clients send it",
    },
}
_STREAM = (
    "With `stream`: server-sent events, the `data` of each of which is JSON as `x-event` has it"
)
_HEADERS = {
    KEY: "The answer outlives the connection, and a retry with this key gets the same one",
    LAST: "The number of the last event that the client has: it gets those behind",
}


class _Generator(GenerateJsonSchema):
    """Answers hold nothing else than their types say; fields need no titles beside their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def normalize_name(self, name: str) -> str:
        return super().normalize_name(name.replace("[", "").replace("]", ""))

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        return {**super().typed_dict_schema(schema), "additionalProperties": False}

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Null says no more than that a field may be left out."""
        if schema.get("default", ...) is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        """Of a form, where it comes as it is."""
        return {"type": "string", "format": "binary"}


@functools.cache
def document() -> dict[str, Any]:
    """Blocking: some 0.1 s, once."""
    schemas = _Schemas()
    paths: dict[str, dict[str, Any]] = {}
    for endpoint, operation in OPERATIONS.items():
        method, path = endpoint.split()
        told = _operation(endpoint, operation, schemas)
        paths.setdefault(_plain(path), {})[method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": metadata.version("penstock"),
            "description": _ABOUT.strip(),
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": _SECURITY},
    }


class _Schemas:
    """Of all models and answers, made together: so each has one name."""

    def __init__(self) -> None:
        kinds = {repr(kind): kind for one in OPERATIONS.values() for kind in _kinds(one)}
        asked: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
            (name, "validation", TypeAdapter(kind)) for name, kind in kinds.items()
        ]
        self._of, told = TypeAdapter.json_schemas(
            asked, ref_template=_REFERENCES, schema_generator=_Generator
        )
        self.components: dict[str, Any] = told["$defs"]

    def of(self, kind: Any) -> dict[str, Any]:
        return dict(self._of[repr(kind), "validation"])

    def fields(self, kind: Any) -> tuple[Mapping[str, Any], list[str]]:
        """An object's properties, and which of them must be there."""
        told = self.of(kind)
        told = self.components[told["$ref"].rpartition("/")[2]]
        return told["properties"], told.get("required", [])


def _kinds(operation: Operation) -> Iterator[Any]:
    kinds = (operation.answer, operation.body, operation.query, operation.events, operation.error)
    for kind in (*kinds, *operation.others.values()):
        if kind is not None and not isinstance(kind, Raw):
            yield kind


def _operation(endpoint: str, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    method, path = endpoint.split()
    needs = NEEDS[endpoint]
    told: dict[str, Any] = {
        "operationId": _id(method, path),
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": [*_parameters(path, operation, schemas)],
        "responses": _responses(operation, schemas),
    }
    if needs is None:
        told["security"] = []
    else:
        told["description"] = f"Needs the permission `{needs.value}`."
        if path.startswith("/v1/messages"):
            told["security"] = [{"bearer": []}, {"x-api-key": []}]
    if operation.body is not None:
        content = _body(operation.body, operation.example, schemas)
        told["requestBody"] = {"required": True, "content": content}
    return told


def _body(body: type[Body], example: Mapping[str, Any], schemas: _Schemas) -> dict[str, Any]:
    if issubclass(body, Form):
        return {"multipart/form-data": {"schema": schemas.of(body)}}
    content = {"schema": schemas.of(body), "example": dict(example)}
    return {"application/json": content}


def _parameters(path: str, operation: Operation, schemas: _Schemas) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)", path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    if operation.query is not None:
        fields, required = schemas.fields(operation.query)
        for name, schema in fields.items():
            told = {"name": name, "in": "query", "required": name in required, "schema": schema}
            yield told | ({"style": "deepObject"} if schema.get("type") == "object" else {})
    headers = (KEY,) if operation.lasting else ()
    for name in (*headers, *((LAST,) if operation.resumes else ())):
        schema = {"type": "string"}
        yield {"name": name, "in": "header", "schema": schema, "description": _HEADERS[name]}


def _responses(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    def json(description: str, kind: Any) -> dict[str, Any]:
        content: dict[str, Any]
        if isinstance(kind, Raw):
            content = {kind.media: {"schema": {"type": "string"}}}
        else:
            content = {"application/json": {"schema": schemas.of(kind)}}
        return {"description": description, "content": content}

    whole = json("The answer", operation.answer)
    if operation.events is not None:
        # No schema: OpenAPI 3.1 would mean the whole stream by it, and its readers mean an event.
        whole["content"]["text/event-stream"] = {"x-event": schemas.of(operation.events)}
        whole["description"] = f"{whole['description']}. {_STREAM}"
    told = {"200": whole}
    for status, kind in operation.others.items():
        told[str(status)] = json("Likewise", kind)
    told["4XX"] = json("The request is at fault: `param` names the field", operation.error)
    told["5XX"] = json("A part of the platform is: `stage` names it", operation.error)
    return told


def _id(method: str, path: str) -> str:
    """POST /v1/chat/completions → post_chat_completions."""
    words = re.findall(r"\w+", _plain(path).removeprefix("/v1"))
    return "_".join([method.lower(), *words])


def _plain(path: str) -> str:
    """Without Starlette's own notation."""
    return path.replace(":path}", "}")
