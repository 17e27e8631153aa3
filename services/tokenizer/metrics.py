"""What the tokenizer counts (its stages are timed by their spans). Labels are configured names."""

from prometheus_client import Counter, Gauge

from services.common.telemetry.metrics import from_zero

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
UNWARMED = from_zero(
    Counter(
        "penstock_tokenizer_unwarmed_prompts_total",
        "What is known of chats' next prompts and was not sent to be computed ahead: budget, the "
        "tenant's is spent; unpaid, too few of the tenant's are asked for",
        ["why"],
    ),
    ("budget", "unpaid"),
)
WARMED_TURNS = from_zero(
    Counter(
        "penstock_tokenizer_warmed_turns_total",
        "Next turns that came to warmed chats: hit, found in the cache; evicted, not any more",
        ["outcome"],
    ),
    ("hit", "evicted"),
)
WARMED_HIT_TOKENS = Counter(
    "penstock_tokenizer_warmed_hit_tokens_total",
    "Of penstock_router_warmed_tokens_total, found by next turns; the others were for nothing",
)
WARMED_SAVED_SECONDS = Counter(
    "penstock_tokenizer_warmed_saved_seconds_total",
    "What computing them ahead took, which next turns did not wait for",
)
