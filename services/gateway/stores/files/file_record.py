"""What is kept of an uploaded file besides its bytes."""

import time
from typing import Any, Literal

from pydantic import BaseModel

Purpose = Literal["assistants", "batch", "user_data", "batch_output"]
PURPOSES: tuple[Purpose, ...] = ("assistants", "batch", "user_data")
"""Of what may be uploaded."""
INDEXED: tuple[Purpose, ...] = ("assistants", "user_data")
"""Of what may go into vector stores."""


class FileRecord(BaseModel):
    id: str
    filename: str
    bytes: int
    created_at: int
    purpose: Purpose = "assistants"
    blob: str = ""  # its key in the blob store; empty: Redis holds it
    expires_at: int | None = None  # Unix seconds; None: never

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": self.expires_at,
        }
