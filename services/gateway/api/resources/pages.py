"""Lists as OpenAI pages them: newest first, `limit`, `after`, `order`."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from operator import itemgetter
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import Field, model_validator

from services.gateway.api.schema import Body, refuse
from services.gateway.ids import no_such_item

_AT_ONCE = 100  # that are looked at for a page
Item = dict[str, Any]
T = TypeVar("T")


class PageQuery(Body):
    """What is asked of a list; anything else is refused."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


class StorePage(PageQuery):
    """With pages that end before an item."""

    before: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "StorePage":
        if self.before is not None and self.after is not None:
            raise refuse("before", "goes with no 'after'")
        return self


def page(
    items: Iterable[Item], query: PageQuery, key: Callable[[Item], Any] = itemgetter("id")
) -> Item:
    """One page of `items`. Ids sort by the time they were made (ids.py)."""
    ordered = sorted(items, key=key, reverse=query.order == "desc")
    if query.after is not None:
        ordered = _behind(query.after, "after", [item["id"] for item in ordered], ordered)
    return told_page(ordered[: query.limit], len(ordered) > query.limit)


async def page_of(
    ids: Iterable[str],
    query: PageQuery,
    look: Callable[[Sequence[str]], Awaitable[Iterable[Item]]],
) -> Item:
    """One page of what the ids are of. `look`: at some of them, in their order; what it leaves out
    is not in the list. So of a long list no more is looked at than is told."""
    ordered = sorted(ids, reverse=query.order == "desc")
    before = query.before if isinstance(query, StorePage) else None
    back = before is not None
    if back:
        ordered.reverse()
    if (cursor := before if back else query.after) is not None:
        ordered = _behind(cursor, "before" if back else "after", ordered, ordered)
    found: list[Item] = []
    at, some = 0, query.limit + 1  # enough, if all are in the list
    while at < len(ordered) and len(found) <= query.limit:
        found += await look(ordered[at : at + some])
        at, some = at + some, _AT_ONCE
    shown = found[: query.limit]
    return told_page(shown[::-1] if back else shown, len(found) > query.limit)


def _behind(cursor: str, param: str, ids: Sequence[str], items: Sequence[T]) -> list[T]:
    if cursor not in ids:
        raise no_such_item(cursor, param)
    return list(items[ids.index(cursor) + 1 :])


def told_page(shown: list[Item], more: bool) -> Item:
    """`more`: there are, behind these."""
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": more,
    }


def page_json(listed: Item) -> bytes:
    """JSON of a page whose items are ids and what is `told` of each: JSON, which is not parsed."""
    return orjson.dumps(
        {**listed, "data": [orjson.Fragment(one["told"]) for one in listed["data"]]}
    )
