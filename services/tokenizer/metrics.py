"""What the tokenizer counts. Labels are configured names only."""

from prometheus_client import Counter, Gauge, Histogram

_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

ASSEMBLE = Histogram(
    "penstock_tokenizer_assemble_seconds",
    "Rendering, fitting into the window and tokenizing one prompt, waiting for a thread included",
    buckets=_BUCKETS,
)
POLICY = Histogram(
    "penstock_tokenizer_policy_seconds",
    "Checking one request against the policy, waiting for a thread included",
    buckets=_BUCKETS,
)
RESUME = Histogram(
    "penstock_tokenizer_resume_seconds",
    "Taking up one answer that a lost tokenizer began, waiting for a thread included",
    buckets=_BUCKETS,
)
REFUSALS = Counter(
    "penstock_tokenizer_policy_refusals", "Requests refused by the content policy", ["rule"]
)
PROMPT_TOKENS = Counter("penstock_tokenizer_prompt_tokens", "Prompt tokens sent on", ["model"])
COMPLETION_TOKENS = Counter(
    "penstock_tokenizer_completion_tokens", "Tokens turned into text", ["model"]
)
CUT = Counter(
    "penstock_tokenizer_cut",
    "Passages and messages that did not fit the window",
    ["what"],  # passages, messages
)
REQUESTS = Counter(
    "penstock_tokenizer_requests", "Requests by how they ended: ok or an error's code", ["outcome"]
)
RUNNING = Gauge("penstock_tokenizer_running_requests", "Requests under way")
ROUTER_LOSSES = Counter("penstock_tokenizer_router_losses", "Routers lost under a request", ["why"])
