"""Lists as OpenAI pages them: newest first, `limit`, `after`, `order`."""

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import Field

from services.common.errors import invalid
from services.gateway.api.schema import Body


class PageQuery(Body):
    """What is asked of a list; anything else is refused."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


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
