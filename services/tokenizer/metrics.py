"""What the tokenizer counts (its stages are timed by their spans). Labels are configured names."""

from prometheus_client import Counter, Gauge

PROMPT_TOKENS = Counter(
    "penstock_tokenizer_prompt_tokens_total", "Prompt tokens sent on", ["model"]
)
COMPLETION_TOKENS = Counter(
    "penstock_tokenizer_completion_tokens_total", "Tokens turned into text", ["model"]
)
CUT = Counter(
    "penstock_tokenizer_cut_total",
    "Passages and messages that did not fit the window",
    ["what"],  # passages, messages
)
REQUESTS = Counter(
    "penstock_tokenizer_requests_total",
    "Requests by how they ended: ok or an error's code",
    ["outcome"],
)
RUNNING = Gauge("penstock_tokenizer_running_requests", "Requests under way")
ROUTER_LOSSES = Counter(
    "penstock_tokenizer_router_losses_total", "Routers lost under a request", ["why"]
)
