"""What the gateway counts. Labels are few and bounded: no tenant, no request id, no raw path."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)

requests = Counter(
    "penstock_gateway_requests_total", "Answered requests; status as in HTTP", ["route", "status"]
)
duration = Histogram(
    "penstock_gateway_request_duration_seconds",
    "From the request's first line to the answer's last byte",
    ["route"],
    buckets=_SECONDS,
)
ttft = Histogram(
    "penstock_gateway_time_to_first_token_seconds",
    "From a generation's start to its first text",
    ["route"],
    buckets=_SECONDS,
)
itl = Histogram(
    "penstock_gateway_inter_token_latency_seconds",
    "Mean gap between the tokens of one arrival and the arrival before",
    buckets=_GAPS,
)
tokens = Counter(
    "penstock_gateway_tokens_total", "Of ended generations: prompt, cached, completion", ["kind"]
)
running = Gauge(
    "penstock_gateway_running_requests",
    "Under way: generations, embeddings, changes of files and stores",
)
refused = Counter(
    "penstock_gateway_refused_total", "Before the body, for what they would have taken", ["why"]
)
auth_failures = Counter("penstock_gateway_auth_failures_total", "Refused or unchecked", ["why"])
retrieval_skipped = Counter(
    "penstock_gateway_retrieval_skipped_total", "Answered without the passages asked for", ["why"]
)
tokenizer_losses = Counter(
    "penstock_gateway_tokenizer_losses_total", "Tokenizers lost under a request", ["why"]
)
