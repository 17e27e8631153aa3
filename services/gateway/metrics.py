"""What the gateway counts. Labels are few and bounded: models that are served, tenants up to a
number (`PENSTOCK_GATEWAY__TENANTS_IN_METRICS`), no request id, no raw path."""

from itertools import product

from prometheus_client import Counter, Gauge, Histogram

from services.common.telemetry.metrics import from_zero
from services.common.telemetry.tally import Tally

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)
_RATES = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000)

UNKNOWN = "unknown"  # the model of a request that ended before it was clear that there is such one
OUTCOMES = ("ok", "refused", "limited", "failed", "cancelled")

requests = Counter(
    "penstock_gateway_requests_total", "Answered requests; status as in HTTP", ["route", "status"]
)
duration = Histogram(
    "penstock_gateway_request_duration_seconds",
    "From the request's first line to the answer's last byte",
    ["route"],
    buckets=_SECONDS,
)
generations = Counter(
    "penstock_gateway_generations_total",
    "Ended generations of known keys by outcome: ok; refused, for what was asked; limited, for how "
    "much; failed, the platform's fault, also in the middle of a stream; cancelled by the client",
    ["model", "outcome"],
)
runs = Counter(
    "penstock_gateway_runs_total",
    "Runs that go on without their clients: begun; retried, by an idempotency key; taken over from "
    "another gateway; kept, of answers that are stored when they are whole",
    ["what"],
)
from_zero(runs, ("begun", "retried", "taken_over", "kept"))
jobs = Gauge(
    "penstock_gateway_jobs",
    "Durable jobs of all gateways, by kind: lines of batches, batches (their beginnings and ends), "
    "files to be indexed, or removed; waiting or running. Every gateway tells it",
    ["kind", "state"],
)
jobs_ended = Counter(
    "penstock_gateway_jobs_ended_total",
    "Jobs that this gateway had, by what became of them: done; retried, to be done later; released "
    "for another gateway; left, to one of a later version that can read it; dead, tried for the "
    "last time",
    ["kind", "outcome"],
)
from_zero(
    jobs_ended,
    product(
        ("line", "batch", "index", "remove"),
        ("done", "retried", "released", "left", "dead", "failed"),
    ),
)
reindexed_files = from_zero(
    Counter(
        "penstock_gateway_reindexed_files_total",
        "Files of vector stores that another embedding model had indexed, by what became of them: "
        "embedded anew, there already, or refused by the present model, by the policy or a limit",
        ["outcome"],
    ),
    ("embedded", "there", "refused"),
)
jobs_dead = Gauge(
    "penstock_gateway_jobs_dead", "Jobs that nobody will try again; every gateway tells it"
)
jobs_window = Gauge(
    "penstock_gateway_jobs_window", "How many lines of batches this gateway has under way at most"
)
batches = Counter(
    "penstock_gateway_batches_total", "Batches that ended here, by their states", ["state"]
)
from_zero(batches, ("completed", "failed", "expired", "cancelled"))
ttft = Histogram(
    "penstock_gateway_time_to_first_token_seconds",
    "From a generation's start to its first text",
    ["model"],
    buckets=_SECONDS,
)
itl = Tally(
    "penstock_gateway_inter_token_latency_seconds",
    "Mean gap between the tokens of one arrival and the arrival before",
    ["model"],
    buckets=_GAPS,
)
rate = Histogram(
    "penstock_gateway_output_tokens_per_second",
    "Of each whole answer: its tokens behind the first arrival, by the time that they took",
    ["model"],
    buckets=_RATES,
)
tokens = Counter(
    "penstock_gateway_tokens_total",
    "Of ended generations: prompt, cached (part of prompt), completion",
    ["model", "kind"],
)
tenant_tokens = Counter(
    "penstock_gateway_tenant_tokens_total",
    "The same by tenant; tenants past the bound are `other`",
    ["tenant", "kind"],
)
cost = Counter(
    "penstock_gateway_cost_total", "Of ended requests, in the price table's currency", ["model"]
)
tenant_cost = Counter(
    "penstock_gateway_tenant_cost_total",
    "The same by tenant; tenants past the bound are `other`",
    ["tenant"],
)
limited = from_zero(
    Counter(
        "penstock_gateway_limited_total",
        "Requests that a limit had no room for, by what it counts",
        ["of"],
    ),
    ("requests", "tokens", "concurrent", "cost"),
)
unchecked = from_zero(
    Counter(
        "penstock_gateway_limits_unchecked_total",
        "Requests that came while Redis was away, by what their limits say of that",
        ["outcome"],
    ),
    ("let_through", "refused"),
)
unsettled = Gauge(
    "penstock_gateway_unsettled_requests", "Ended, and not in the ledger yet: Redis is away"
)
unledgered = Counter(
    "penstock_gateway_unledgered_total", "Ended requests that are missing in the ledger for good"
)
unledgered_cost = Counter("penstock_gateway_unledgered_cost_total", "What those cost")
lapsed = Counter(
    "penstock_gateway_lapsed_total",
    "Requests whose gateway was lost, settled with what it had told of them",
)
ledger_cut = Counter(
    "penstock_gateway_ledger_cut_total", "The ledger's oldest entries, gone because it was full"
)
running = Gauge(
    "penstock_gateway_running_requests",
    "Under way: generations, embeddings, changes of files and stores",
)
refused = Counter(
    "penstock_gateway_refused_total", "Before the body, for what they would have taken", ["why"]
)
auth_failures = Counter("penstock_gateway_auth_failures_total", "Refused or unchecked", ["why"])
issuer_looks = from_zero(
    Counter(
        "penstock_gateway_issuer_looks_total", "For the OIDC issuer's keys: ok, failed", ["outcome"]
    ),
    ("ok", "failed"),
)
retrieval_skipped = Counter(
    "penstock_gateway_retrieval_skipped_total", "Answered without the passages asked for", ["why"]
)
reranked = from_zero(
    Counter(
        "penstock_gateway_reranked_total",
        "Searches whose passages a model is to rank anew: reranked by it; or left as they were, "
        "for it was late, or failed (it is not served, say, or may not be used)",
        ["outcome"],
    ),
    ("reranked", "late", "failed"),
)
rewritten = from_zero(
    Counter(
        "penstock_gateway_rewritten_total",
        "Questions of chats with vector stores that have turns before them, by what made them "
        "whole: rule, model; left as they were",
        ["by"],
    ),
    ("rule", "model", "left"),
)
citations = from_zero(
    Counter(
        "penstock_gateway_citations_total",
        "Marks in answers to prompts with passages: known, of a passage; unknown numbers",
        ["of"],
    ),
    ("known", "unknown"),
)
quotations = from_zero(
    Counter(
        "penstock_gateway_quotations_total",
        "Quotations in such answers that have a mark: found in its passage; unfounded, not there",
        ["outcome"],
    ),
    ("found", "unfounded"),
)
file_bytes = Gauge(
    "penstock_gateway_file_bytes",
    "Of all tenants' files together, in Redis; every gateway tells it",
)
file_bytes_limit = Gauge("penstock_gateway_file_bytes_limit", "How many they may be")
blob_bytes = Gauge(
    "penstock_gateway_blob_bytes",
    "Of all tenants' uploaded files together, in the blob store; every gateway tells it",
)
blob_bytes_limit = Gauge("penstock_gateway_blob_bytes_limit", "How many they may be")
orphans = Counter(
    "penstock_gateway_orphan_blobs_total", "Blobs that no file was of, and that were deleted"
)
orphan_looks_failed = Counter(
    "penstock_gateway_orphan_looks_failed_total",
    "Looks for such blobs that were not ended: Redis or the blob store was away, or failed",
)
redis_memory = Gauge(
    "penstock_gateway_redis_memory_ratio", "Of Redis' maxmemory in use, by anything; 0: it has none"
)
files_refused = Counter(
    "penstock_gateway_files_refused_total",
    "Files and vector stores without room: in the tenant's own limits, or in what all may take",
    ["limit"],
)
tokenizer_losses = Counter(
    "penstock_gateway_tokenizer_losses_total", "Tokenizers lost under a request", ["why"]
)


def show_model(model: str) -> None:
    """Its outcomes from zero on."""
    for outcome in OUTCOMES:
        generations.labels(model, outcome)
