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
    while some := points.payloads(unscoped, 1, keys):
        whose = some[0]
        alike = (Is(key, (whose[key],)) if key in whose else Missing(key) for key in keys)
        scope = scope_of(*(whose.get(key, "") for key in keys))
        points.change(Every((unscoped, *alike)), {SCOPE: scope})
