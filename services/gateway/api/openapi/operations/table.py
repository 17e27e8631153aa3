"""All of them. A gateway serves what is here and in permissions.py, and nothing else (decision
0048)."""

from services.gateway.api.openapi.operation import Operation
from services.gateway.api.openapi.operations import (
    about,
    batches,
    files,
    generation,
    numbers,
    responses,
    vector_stores,
)

_PARTS = (generation, responses, numbers, files, vector_stores, batches, about)
OPERATIONS: dict[str, Operation] = {
    endpoint: operation for part in _PARTS for endpoint, operation in part.OPERATIONS.items()
}
