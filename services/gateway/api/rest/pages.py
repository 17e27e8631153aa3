"""Lists as OpenAI pages them: newest first, `limit`, `after`, `order`."""

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.datastructures import QueryParams

from services.common.errors import invalid
from services.gateway.api.schema import Body, validated


class PageQuery(Body):
    """The query string of a list; anything else in it is refused."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


def page_query(query: Mapping[str, Any], model: type[PageQuery] = PageQuery) -> Any:
    """Reads a query string as `model`. Raises INVALID_ARGUMENT that names the parameter."""
    fields: dict[str, Any] = dict(query)
    if fields.get("limit", "").isdecimal():
        fields["limit"] = int(fields["limit"][:9])
    return validated(model, fields)


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


def page(
    items: Iterable[dict[str, Any]],
    query: PageQuery,
    key: Callable[[dict[str, Any]], Any] = itemgetter("id"),
) -> dict[str, Any]:
    """One page of `items`. Ids sort by the time they were made (ids.py)."""
    ordered = sorted(items, key=key, reverse=query.order == "desc")
    if query.after is not None:
        ids = [item["id"] for item in ordered]
        if query.after not in ids:
            raise invalid(f"No item '{query.after[:100]}' in this list.", "after", stage="gateway")
        ordered = ordered[ids.index(query.after) + 1 :]
    shown = ordered[: query.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(ordered) > len(shown),
    }
