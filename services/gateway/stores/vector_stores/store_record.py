"""A vector store, and a batch of files on their way into it: what is kept of them, and told."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

_DAY_S = 86_400
_STATES = ("in_progress", "completed", "failed", "cancelled")
Facts = Mapping[str, str]
"""Of a store, as records.lua keeps them beside its record."""


class StoreCache(BaseModel):
    """Which earlier searches do for one of a store; None: as the operator has set."""

    max_age_s: float | None = None  # 0: none
    similar_at_least: float | None = None  # cosine of another query; 0: none but the same


class StoreRecord(BaseModel):
    """What whoever owns a store says of it. records.lua reads `cache` and `embedding_model`."""

    id: str
    name: str
    created_at: int
    metadata: dict[str, str] = {}
    description: str = ""
    expires_days: int | None = None  # after it was used last
    cache: StoreCache | None = None
    embedding_model: str = ""  # by its name; empty: the installation's


class Store(NamedTuple):
    """With what has become of it."""

    record: StoreRecord
    facts: Facts

    @property
    def last_active_at(self) -> int:
        return int(self.facts.get("active", self.record.created_at))

    @property
    def expires_at(self) -> int | None:
        days = self.record.expires_days
        return None if days is None else self.last_active_at + days * _DAY_S

    @property
    def expired(self) -> bool:
        return "expired" in self.facts

    def reindexing(self, embedder: str) -> dict[str, Any] | None:
        """How far its files are on their way to this embedder, which has to be known; None: all are
        there, and were all the time."""
        facts = self.facts
        files, done, failed = (
            int(facts.get(field, 0)) for field in ("completed", f"by:{embedder}", f"by:-{embedder}")
        )
        due = max(0, files - done - failed)
        begun = facts.get("reindex:embedder") == embedder
        if not embedder or not (due or begun):
            return None
        state = facts["reindex:state"] if begun else "pending"
        if not due:
            state = "completed"
        elif state == "completed":  # a version before this one has indexed more since
            state = "pending"
        counts = {"in_progress": due, "completed": done, "failed": failed, "cancelled": 0}
        why = facts.get("reindex:why") if begun and due else None
        return {"status": state, "reason": why or None, "file_counts": {**counts, "total": files}}

    def as_json(self, embedding_model: str = "", embedder: str = "") -> dict[str, Any]:
        """`embedding_model`, `embedder`: the present one's name and fingerprint; empty: not known
        yet."""
        record, counts = self.record, _counts(self.facts)
        status = "in_progress" if counts["in_progress"] else "completed"
        days = record.expires_days
        return {
            "id": record.id,
            "object": "vector_store",
            "created_at": record.created_at,
            "last_active_at": self.last_active_at,
            "name": record.name,
            "description": record.description or None,
            "metadata": record.metadata,
            "status": "expired" if self.expired else status,
            "file_counts": counts,
            "usage_bytes": int(self.facts.get("bytes", 0)),
            "expires_after": {"anchor": "last_active_at", "days": days} if days else None,
            "expires_at": self.expires_at,
            "cache": record.cache.model_dump(exclude_none=True) if record.cache else None,
            "embedding_model": embedding_model or None,
            "reindexing": self.reindexing(embedder),
        }


class FileBatch(BaseModel):
    """Files that were attached by one call."""

    id: str
    store: str
    created_at: int
    cancelled: bool = False

    def as_json(self, facts: Facts) -> dict[str, Any]:
        """`facts`: the store's. What was taken out before its end counts as cancelled."""
        counts = _counts(facts, f"{self.id}:")
        status = "in_progress" if counts["in_progress"] else "completed"
        if counts["failed"] == counts["total"] > 0:
            status = "failed"
        return {
            "id": self.id,
            "object": "vector_store.files_batch",
            "created_at": self.created_at,
            "vector_store_id": self.store,
            "status": "cancelled" if self.cancelled else status,
            "file_counts": counts,
        }


def _counts(facts: Facts, prefix: str = "") -> dict[str, int]:
    counts = {state: int(facts.get(prefix + state, 0)) for state in _STATES}
    return {**counts, "total": sum(counts.values())}
