"""What is kept of an upload that comes in parts."""

import time
from typing import Any, Literal

from pydantic import BaseModel

from services.gateway.stores.files.file_record import FileRecord, Purpose

LASTS_S = 3600  # as OpenAI's


class UploadRecord(BaseModel):
    """uploads.lua reads `state` and `bytes`."""

    id: str
    filename: str
    bytes: int  # of all its parts together
    created_at: int
    purpose: Purpose
    state: Literal["pending", "completed", "cancelled"] = "pending"
    file_expires_s: int | None = None  # seconds that its file stays; None: until it is deleted
    file: str = ""  # what it has become

    @property
    def expires_at(self) -> int:
        return self.created_at + LASTS_S

    @property
    def expired(self) -> bool:
        return time.time() >= self.expires_at

    def as_json(self, file: FileRecord | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "upload",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": self.state,
            "expires_at": self.expires_at,
            "file": file.as_json() if file is not None else None,
        }


class Part(BaseModel):
    id: str
    upload: str
    created_at: int

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "upload.part",
            "created_at": self.created_at,
            "upload_id": self.upload,
        }
