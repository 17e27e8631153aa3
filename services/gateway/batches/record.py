"""A batch: what was asked, and how far it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import BaseModel

from services.gateway.identity.standing import Grantee

Ending = Literal["failed", "expired", "cancelled"]
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class BatchRecord(BaseModel):
    """What was asked; it does not change."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    who: Grantee
    output_file_id: str
    error_file_id: str
    output_expires_s: int | None = None  # how long these two stay; batches.lua reads it


class Fault(BaseModel):
    """What is wrong with an input file, or ended its batch. `line`: from 1 on."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Batch:
    record: BatchRecord
    state: Mapping[str, str]  # as batches.lua has it

    @property
    def status(self) -> str:
        return self.state["status"]

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def into(self) -> str:
        """What it will end as, or has; empty while it goes on."""
        return self.status if self.ended else self.state.get("into", "")

    def as_json(self) -> dict[str, Any]:
        """As OpenAI has it. The files are told of once they are whole."""
        own = self.record
        errors = self.state.get("errors")
        return {
            "id": own.id,
            "object": "batch",
            "endpoint": own.endpoint,
            "errors": {"object": "list", "data": orjson.loads(errors)} if errors else None,
            "input_file_id": own.input_file_id,
            "completion_window": own.completion_window,
            "status": self.status,
            "output_file_id": own.output_file_id if self._has("output") else None,
            "error_file_id": own.error_file_id if self._has("error") else None,
            "created_at": own.created_at,
            "expires_at": own.expires_at,
            **{f"{name}_at": self._number(f"{name}_at") for name in _TIMES},
            "request_counts": {
                name: self._number(name) or 0 for name in ("total", "completed", "failed")
            },
            "metadata": own.metadata,
        }

    def _has(self, what: str) -> bool:
        return self.ended and bool(self._number(what))

    def _number(self, name: str) -> int | None:
        told = self.state.get(name)
        return int(told) if told else None
