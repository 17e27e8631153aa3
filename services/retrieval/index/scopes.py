"""What a search looks in: the published chunks of one collection of a tenant.

Each point's `scope` names both, and is empty while its document is a draft. It is the only
condition of a search without a filter: one is looked up in its index, a second is asked of every
point that the first one leaves (20 ms of processor time for 100,000, decision 0050).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from services.retrieval.index.attributes import stored, told
from services.retrieval.index.points import SCOPE, TENANT, Condition, Every, Is, Missing

DRAFT = ""

_AT_ONCE = 1024
_DOCUMENT = (TENANT, "collection", "source_id", "revision")  # whose chunks have the same attributes


def scope_of(tenant: str, collection: str) -> str:
    return json.dumps([tenant, collection], ensure_ascii=False)


class Changeable(Protocol):
    """Of `Points`, for one model's."""

    def payloads(
        self, where: Condition, limit: int, keys: Sequence[str]
    ) -> list[dict[str, Any]]: ...

    def change(self, where: Condition, payload: Mapping[str, Any]) -> None: ...


def publish_unscoped(points: Changeable) -> None:
    """Those of versions that knew no scopes, nor marks, of which searches found all."""
    unscoped = Missing(SCOPE)
    while some := points.payloads(unscoped, _AT_ONCE, (*_DOCUMENT, "attributes")):
        for whose, one in {tuple(map(one.get, _DOCUMENT)): one for one in some}.items():
            each = zip(_DOCUMENT, whose, strict=True)
            alike = (Missing(key) if its is None else Is(key, (its,)) for key, its in each)
            scope = scope_of(one.get(TENANT, ""), one.get("collection", ""))
            now = {SCOPE: scope, **stored(told(one))}
            points.change(Every((unscoped, *alike)), now)
