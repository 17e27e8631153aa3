"""Models, records, health, this document."""

from typing import Any

from services.gateway.api.openapi.answers.common import (
    Health,
    ListOf,
    Model,
    Readiness,
    RequestRecord,
    Version,
)
from services.gateway.api.openapi.operation import Operation, Raw

_TAG = "Models, records, health"

OPERATIONS: dict[str, Operation] = {
    "GET /v1/models": Operation(_TAG, "The models that the key may use", ListOf[Model]),
    "GET /v1/models/{model:path}": Operation(_TAG, "A model", Model),
    "GET /v1/requests/{request}": Operation(
        _TAG, "A request's record: what took how long, and why it went as it did", RequestRecord
    ),
    "GET /healthz": Operation(_TAG, "The process lives", Health),
    "GET /readyz": Operation(
        _TAG, "Whether a request has a way", Readiness, others={503: Readiness}
    ),
    "GET /health": Operation(
        _TAG, "The same, as other servers call it", Readiness, others={503: Readiness}
    ),
    "GET /version": Operation(_TAG, "Which version this is", Version),
    "GET /openapi.json": Operation(_TAG, "This document", dict[str, Any]),
    "GET /docs": Operation(_TAG, "This document as a page", Raw("text/html")),
    "GET /docs/{asset}": Operation(_TAG, "What the page is made of", Raw("*/*")),
}
