"""Prometheus metrics of retrieval."""

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry.metrics import from_zero

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

REQUESTS = Counter(
    "penstock_retrieval_requests_total", "Calls by method and outcome", ["method", "code"]
)
REQUEST_SECONDS = Histogram(
    "penstock_retrieval_request_seconds", "Duration of a call", ["method"], buckets=_SECONDS
)
CHUNKING_SECONDS = Histogram(
    "penstock_retrieval_chunking_seconds",
    "Duration of reading a document (load), and of cutting it (cut)",
    ["step"],
    buckets=_SECONDS,
)
CHUNKERS_LOST = Counter(
    "penstock_retrieval_chunkers_lost_total",
    "Chunking processes that a document ended, by the limit it passed, or as a library crashed",
    ["cause"],
)
EMBED_BATCH_TEXTS = Histogram(
    "penstock_retrieval_embed_batch_texts",
    "Texts in one forward pass of the embedding model",
    buckets=(1, 2, 4, 8, 16, 32),
)
EMBED_BATCH_SECONDS = Histogram(
    "penstock_retrieval_embed_batch_seconds", "Duration of one forward pass", buckets=_SECONDS
)
EMBED_WAITING_TEXTS = Gauge(
    "penstock_retrieval_embed_waiting_texts", "Texts that wait for the embedding model"
)
STORE_SECONDS = Histogram(
    "penstock_retrieval_store_seconds",
    "Duration of one call to the vector store, waiting for its turn included",
    ["operation"],
    buckets=_SECONDS,
)
STORE_FAILURES = Counter(
    "penstock_retrieval_store_failures_total",
    "Calls to the vector store that failed or were too slow",
    ["operation", "reason"],
)
SEARCH_PASSAGES = Histogram(
    "penstock_retrieval_search_passages",
    "Chunks that a search brought",
    buckets=(0, 1, 2, 4, 8, 16, 32, 50),
)
CACHE_LOOKS = from_zero(
    Counter(
        "penstock_retrieval_cache_looks_total",
        "Searches by what the cache had: exact, of the same query; similar, of one like it; stale, "
        "told because the store or the model was away; missed; unusable, for a write was under way "
        "or Redis did not tell of writes",
        ["outcome"],
    ),
    ("exact", "similar", "stale", "missed", "unusable"),
)
CACHE_SAVED_SECONDS = Counter(
    "penstock_retrieval_cache_saved_seconds_total",
    "What searches took whose results were told again, less what that took",
)
CACHE_BYTES = Gauge("penstock_retrieval_cache_bytes", "Of kept results")
CACHE_ENTRIES = Gauge("penstock_retrieval_cache_entries", "Kept results")
INDEXED_CHUNKS = Counter("penstock_retrieval_indexed_chunks_total", "Chunks stored")
