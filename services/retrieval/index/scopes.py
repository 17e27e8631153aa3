"""What a search looks in: the published chunks of one collection of a tenant.

Each point's `scope` names both, and is empty while its document is a draft. It is the only
condition of a search without a filter: one is looked up in its index, a second is asked of every
point that the first one leaves (20 ms of processor time for 100,000, decision 0050).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from services.retrieval.index.points import SCOPE, TENANT, Condition, Every, Is, Missing

DRAFT = ""

_AT_ONCE = 1024


def scope_of(tenant: str, collection: str) -> str:
    return json.dumps([tenant, collection], ensure_ascii=False)


class Changeable(Protocol):
    """Of `Points`, for one model's."""

    def payloads(
        self, where: Condition, limit: int, keys: Sequence[str]
    ) -> list[dict[str, Any]]: ...

    def change(self, where: Condition, payload: Mapping[str, Any]) -> None: ...


def publish_unscoped(points: Changeable) -> None:
    """Those of versions that knew no scopes, of which searches found all."""
    unscoped, keys = Missing(SCOPE), (TENANT, "collection")
    while some := points.payloads(unscoped, _AT_ONCE, keys):
        for whose in {tuple(one.get(key) for key in keys) for one in some}:
            each = zip(keys, whose, strict=True)
            alike = (Missing(key) if one is None else Is(key, (one,)) for key, one in each)
            scope = scope_of(*(one or "" for one in whose))
            points.change(Every((unscoped, *alike)), {SCOPE: scope})
