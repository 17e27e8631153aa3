"""Answers of batches."""

from typing import Literal

from typing_extensions import TypedDict


class BatchFault(TypedDict):
    """`line`: of the input file, from 1 on."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(TypedDict):
    object: Literal["list"]
    data: list[BatchFault]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class Batch(TypedDict):
    """Its files are told of once they are whole."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
