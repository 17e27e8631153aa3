"""Which endpoint needs what: the one table, for REST, gRPC and the admin listener alike. What is
not in it is not served."""

from services.gateway.identity.principal import Permission, Principal

OPEN = None
"""Asks nobody who he is: health, and which version this is."""

NEEDS: dict[str, Permission | None] = {
    # The public API, REST.
    "POST /v1/chat/completions": Permission.INFERENCE,
    "GET /v1/chat/completions/{completion}": Permission.INFERENCE,
    "POST /v1/completions": Permission.INFERENCE,
    "POST /v1/responses": Permission.INFERENCE,
    "GET /v1/responses/{response}": Permission.INFERENCE,
    "DELETE /v1/responses/{response}": Permission.INFERENCE,
    "POST /v1/responses/{response}/cancel": Permission.INFERENCE,
    "GET /v1/responses/{response}/input_items": Permission.INFERENCE,
    "POST /v1/messages": Permission.INFERENCE,
    "POST /v1/messages/count_tokens": Permission.INFERENCE,
    "POST /tokenize": Permission.INFERENCE,
    "POST /detokenize": Permission.INFERENCE,
    "POST /v1/embeddings": Permission.INFERENCE,
    "POST /v1/score": Permission.INFERENCE,
    "POST /v1/rerank": Permission.INFERENCE,
    "POST /v2/rerank": Permission.INFERENCE,
    "POST /v1/classify": Permission.INFERENCE,
    "POST /v1/moderations": Permission.INFERENCE,
    "GET /v1/models": Permission.MODELS_READ,
    "GET /v1/models/{model:path}": Permission.MODELS_READ,
    "GET /v1/requests/{request}": Permission.REQUESTS_READ,
    "GET /v1/files": Permission.FILES_READ,
    "POST /v1/files": Permission.FILES_WRITE,
    "GET /v1/files/{file}": Permission.FILES_READ,
    "DELETE /v1/files/{file}": Permission.FILES_WRITE,
    "GET /v1/files/{file}/content": Permission.FILES_READ,
    "GET /v1/vector_stores": Permission.STORES_READ,
    "POST /v1/vector_stores": Permission.STORES_WRITE,
    "GET /v1/vector_stores/{store}": Permission.STORES_READ,
    "DELETE /v1/vector_stores/{store}": Permission.STORES_WRITE,
    "POST /v1/vector_stores/{store}/search": Permission.STORES_SEARCH,
    "GET /v1/vector_stores/{store}/files": Permission.STORES_READ,
    "POST /v1/vector_stores/{store}/files": Permission.STORES_WRITE,
    "GET /v1/vector_stores/{store}/files/{file}": Permission.STORES_READ,
    "DELETE /v1/vector_stores/{store}/files/{file}": Permission.STORES_WRITE,
    "GET /v1/batches": Permission.REQUESTS_READ,
    "POST /v1/batches": Permission.INFERENCE,
    "GET /v1/batches/{batch}": Permission.REQUESTS_READ,
    "POST /v1/batches/{batch}/cancel": Permission.INFERENCE,
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "GET /health": OPEN,
    "GET /version": OPEN,
    "GET /openapi.json": OPEN,
    "GET /docs": OPEN,
    "GET /docs/{asset}": OPEN,
    # The public API, gRPC.
    "/penstock.v1.Inference/Chat": Permission.INFERENCE,
    "/penstock.v1.Inference/Complete": Permission.INFERENCE,
    "/penstock.v1.Inference/Embed": Permission.INFERENCE,
    "/penstock.v1.Inference/Score": Permission.INFERENCE,
    "/penstock.v1.Inference/Rerank": Permission.INFERENCE,
    "/penstock.v1.Inference/Classify": Permission.INFERENCE,
    "/penstock.v1.Inference/Moderate": Permission.INFERENCE,
    "/penstock.v1.Inference/Tokenize": Permission.INFERENCE,
    "/penstock.v1.Inference/Detokenize": Permission.INFERENCE,
    "/penstock.v1.Inference/SearchStore": Permission.STORES_SEARCH,
    "/penstock.v1.Inference/GetRecord": Permission.REQUESTS_READ,
    "/penstock.v1.Inference/ListModels": Permission.MODELS_READ,
    # The admin listener. What is an administrator's own asks for more (api/admin/keys.py).
    "GET /admin/v1/tenants": Permission.TENANTS_READ,
    "POST /admin/v1/tenants": Permission.TENANTS_WRITE,
    "GET /admin/v1/tenants/{tenant}": Permission.TENANTS_READ,
    "PATCH /admin/v1/tenants/{tenant}": Permission.TENANTS_WRITE,
    "PUT /admin/v1/tenants/{tenant}/limits": Permission.LIMITS_WRITE,
    "GET /admin/v1/keys": Permission.KEYS_READ,
    "POST /admin/v1/keys": Permission.KEYS_WRITE,
    "GET /admin/v1/keys/{key}": Permission.KEYS_READ,
    "PATCH /admin/v1/keys/{key}": Permission.KEYS_WRITE,
    "DELETE /admin/v1/keys/{key}": Permission.KEYS_WRITE,
    "POST /admin/v1/keys/{key}/rotate": Permission.KEYS_WRITE,
    "PUT /admin/v1/keys/{key}/limits": Permission.LIMITS_WRITE,
    "GET /admin/v1/revoked-tokens": Permission.KEYS_READ,
    "POST /admin/v1/revoked-tokens": Permission.KEYS_WRITE,
    "GET /admin/v1/models": Permission.MODELS_READ,
    "GET /admin/v1/audit": Permission.AUDIT_READ,
    "GET /admin/v1/jobs/dead": Permission.AUDIT_READ,
    "GET /admin/healthz": OPEN,
}


def admit(principal: Principal, endpoint: str) -> Principal:
    """Raises PERMISSION_DENIED where it needs what the caller does not have."""
    needed = NEEDS[endpoint]
    if needed is not None:
        principal.require(needed)
    return principal
