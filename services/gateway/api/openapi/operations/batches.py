"""Batches."""

from services.gateway.api.openapi.answers.batches import Batch
from services.gateway.api.openapi.answers.common import PageOf
from services.gateway.api.openapi.operation import Operation
from services.gateway.api.resources.batches import CreateBatch
from services.gateway.api.resources.pages import PageQuery

_TAG = "Batches"

OPERATIONS: dict[str, Operation] = {
    "GET /v1/batches": Operation(_TAG, "All batches", PageOf[Batch], query=PageQuery),
    "POST /v1/batches": Operation(
        _TAG,
        "Answers a file of requests, line by line",
        Batch,
        CreateBatch,
        {
            "input_file_id": "file-…",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    ),
    "GET /v1/batches/{batch}": Operation(_TAG, "How far a batch is", Batch),
    "POST /v1/batches/{batch}/cancel": Operation(
        _TAG, "Ends a batch; what of it is under way ends as usual", Batch
    ),
}
