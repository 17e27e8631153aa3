"""Query strings: of lists, of what takes none, and with a parameter twice."""

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import QueryParams

from services.common.errors import invalid
from services.gateway.api.resources.pages import PageQuery
from services.gateway.api.schema import Body, validated


def page_query(query: Mapping[str, Any], model: type[PageQuery] = PageQuery) -> Any:
    """Reads a query string as `model`. Raises INVALID_ARGUMENT that names the parameter."""
    fields: dict[str, Any] = dict(query)
    if fields.get("limit", "").isdecimal():
        fields["limit"] = int(fields["limit"][:9])
    return validated(model, fields)


def included(query: QueryParams, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Its `fields`, if they are not its texts alone, with `include` as a list; OpenAI's client
    writes `include[]`."""
    names, read = ("include", "include[]"), query if fields is None else fields
    told = {name: value for name, value in read.items() if name not in names}
    if values := [value for name in names for value in query.getlist(name)]:
        told["include"] = values
    return told


def refuse_query(query: Mapping[str, str]) -> None:
    """Of a path that takes none. Raises INVALID_ARGUMENT that names the first parameter."""
    if query:
        validated(Body, dict(query))


def refuse_twice(query: QueryParams) -> None:
    """Raises INVALID_ARGUMENT that names the first parameter that is there again: one of the two
    would be taken and the other ignored. A list (`include`, `include[]`) may be."""
    seen = set()
    for name, _ in query.multi_items():
        if name in seen and name.removesuffix("[]") != "include":
            raise invalid(
                f"The parameter '{name[:100]}' is there twice.", name[:100], stage="gateway"
            )
        seen.add(name)
