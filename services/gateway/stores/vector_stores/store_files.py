"""A file in a vector store: what is kept of it there, and what is told of those not ready."""

import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import grpc
from pydantic import BaseModel, Field

from protos.common_pb2 import AttributeValue
from services.common.errors import PenstockError

_SHOWN_CHARS = 60  # of a file's name in a warning
_ERROR_CHARS = 160

State = Literal["in_progress", "completed", "failed", "cancelled"]
ErrorCode = Literal["server_error", "unsupported_file", "invalid_file"]  # as OpenAI has them
Attributes = Mapping[str, bool | int | float | str]
NO_ATTRIBUTES: Attributes = MappingProxyType({})


class Attachment(BaseModel):
    """Which file, where. What else a task tells may be unknown to this version; this never is."""

    store: str
    file: str
    attachment: str
    request_id: str = ""


class Chunking(BaseModel):
    """How a file is cut, where its attachment says so."""

    max_tokens: int
    overlap_tokens: int


class Progress(BaseModel):
    done: int
    chunks: int


class AttachedFile(BaseModel):
    """A file in a store. records.lua reads `state`, `attachment`, `bytes`, `batch`, `embedder` and
    `refused_by`."""

    id: str
    store: str
    filename: str
    created_at: int
    bytes: int
    attachment: str = Field(default_factory=lambda: secrets.token_hex(8))
    state: State = "in_progress"
    error: str = ""
    error_code: ErrorCode = "server_error"
    attributes: Attributes = {}
    chunking: Chunking | None = None
    batch: str = ""
    progress: Progress | None = None  # while it is indexed
    note: str = ""  # of what its owner should know, in words that go on behind "the file"
    embedder: str = ""  # whose vectors searches find it by; empty: not known
    refused_by: str = ""  # the embedder that it could not be indexed anew for; `note` says why

    def fail(self, error: PenstockError | str) -> None:
        """INVALID_ARGUMENT is the file's own fault, anything else the service's."""
        self.state = "failed"
        if isinstance(error, PenstockError):
            self.error = error.message
            if error.code == grpc.StatusCode.INVALID_ARGUMENT:
                known = error.reason == "unsupported_file"
                self.error_code = "unsupported_file" if known else "invalid_file"
        else:
            self.error = error

    def as_json(self) -> dict[str, Any]:
        status, cut = self.state, self.chunking
        return {
            "id": self.id,
            "object": "vector_store.file",
            "created_at": self.created_at,
            "vector_store_id": self.store,
            "status": status,
            "usage_bytes": self.bytes if status == "completed" else 0,
            "last_error": {"code": self.error_code, "message": self.error}
            if status == "failed"
            else None,
            "attributes": dict(self.attributes),
            "penstock": self._extras(),
            "chunking_strategy": {
                "type": "static",
                "static": {
                    "max_chunk_size_tokens": cut.max_tokens,
                    "chunk_overlap_tokens": cut.overlap_tokens,
                },
            }
            if cut is not None
            else {"type": "other"},  # OpenAI's name for what is not told: retrieval's own
        }

    def _extras(self) -> dict[str, Any]:
        """What OpenAI does not have."""
        progress = {"progress": self.progress.model_dump()} if self.progress else {}
        return {**progress, **({"note": f"the file {self.note}"} if self.note else {})}

    def as_attachment(self) -> Attachment:
        return Attachment(store=self.store, file=self.id, attachment=self.attachment)

    def is_due(self, embedder: str) -> bool:
        """Whether this embedder is to index it anew."""
        return self.state == "completed" and embedder not in (self.embedder, self.refused_by)

    def why_unready(self) -> str:
        name = self.filename
        name = name if len(name) <= _SHOWN_CHARS else name[: _SHOWN_CHARS - 1] + "…"
        if self.state == "failed":
            return f"{name} ({self.id}) failed: {self.error[:_ERROR_CHARS]}"
        if self.state == "cancelled":
            return f"{name} ({self.id}) was cancelled"
        return f"{name} ({self.id}) is still being indexed"


class Unready(NamedTuple):
    """Files that a search of some stores cannot find: some of them, and how many in all; and which
    earlier searches do for it, by the strictest of them (None: as the operator has set)."""

    files: Sequence[AttachedFile] = ()
    total: int = 0
    max_age_s: float | None = None
    similar_at_least: float | None = None
    aged: Sequence[str] = ()  # ids of those of the stores that are to be embedded anew
    models: Mapping[str, str] = {}  # of those of the stores that have chosen an embedding model

    def warning(self) -> str:
        """For the answer; empty when there is none."""
        told = [file.why_unready() for file in self.files if file.state != "completed"]
        more = self.total - len(told)
        if more > 0:
            told.append(f"and {more} more")
        return f"not searched: {'; '.join(told)}" if told else ""


def attribute_values(attributes: Attributes) -> dict[str, AttributeValue]:
    """As retrieval takes them."""
    return {key: attribute_value(value) for key, value in attributes.items()}


def told_attributes(
    attributes: Mapping[str, AttributeValue],
) -> dict[str, bool | int | float | str]:
    """As clients have them."""
    return {key: _told(one) for key, one in attributes.items()}


def _told(value: AttributeValue) -> bool | int | float | str:
    """A whole number as one, as its file's record tells it: JSON has 3 and 3.0 for the same."""
    told: bool | float | str = getattr(value, value.WhichOneof("kind") or "text")
    return int(told) if isinstance(told, float) and told.is_integer() else told


def attribute_value(value: bool | int | float | str) -> AttributeValue:
    if isinstance(value, bool):
        return AttributeValue(flag=value)
    return AttributeValue(text=value) if isinstance(value, str) else AttributeValue(number=value)
