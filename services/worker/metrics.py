"""What the worker counts, under its model and role."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from services.worker.engine import ModelInfo, StepOutput, TierCounts, Timeline

_OWN = ["model", "role"]
_LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60)

STEPS = Counter("penstock_worker_steps_total", "Engine steps", _OWN)
PENDING = Gauge(
    "penstock_worker_pending_requests",
    "Requests that the engine owes its next step; steps must move while there are any",
    _OWN,
)
STEP_SECONDS = Histogram(
    "penstock_worker_step_seconds",
    "Duration of an engine step",
    _OWN,
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)
PREFILL_SECONDS = Histogram(
    "penstock_worker_prefill_seconds",
    "Of one request: from its first place in a step to its first token here",
    _OWN,
    buckets=_LATENCIES,
)
DECODE_TOKEN_SECONDS = Histogram(
    "penstock_worker_decode_token_seconds",
    "Of one request: the mean time between its tokens here",
    _OWN,
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5),
)
PREFILL_TOKENS = Counter("penstock_worker_prefill_tokens_total", "Prompt tokens computed", _OWN)
DECODE_TOKENS = Counter("penstock_worker_decode_tokens_total", "Tokens decoded", _OWN)
DRAFT_TOKENS = Counter(
    "penstock_worker_draft_tokens_total", "Guesses of tokens that were computed", _OWN
)
ACCEPTED_TOKENS = Counter(
    "penstock_worker_accepted_tokens_total", "Guesses of tokens that were right", _OWN
)
PREEMPTIONS = Counter(
    "penstock_worker_preemptions_total", "Sequences whose blocks were taken", _OWN
)
KV_EXPORTED = Counter(
    "penstock_worker_kv_blocks_exported_total", "KV blocks made for decode workers", _OWN
)
KV_SENT = Counter(
    "penstock_worker_kv_sent_bytes_total",
    "KV handed over to decode workers, through shared memory or gRPC",
    [*_OWN, "transport"],
)
WAITING = Gauge("penstock_worker_waiting_sequences", "Sequences that hold no place yet", _OWN)
RUNNING = Gauge("penstock_worker_running_sequences", "Sequences that hold a place", _OWN)
KV_FREE = Gauge("penstock_worker_kv_free_blocks", "KV blocks reusable at once", _OWN)
KV_TOTAL = Gauge("penstock_worker_kv_blocks", "KV blocks in all", _OWN)
KV_TIER_BLOCKS = Counter(
    "penstock_worker_kv_tier_blocks_total",
    "KV blocks between the cache and the disk: loaded, missed (were to be there and could not be "
    "had), passed (computing them was expected to be sooner), stored, dropped (the disk was too "
    "slow), failed (to be written), evicted (files)",
    [*_OWN, "event"],
)
KV_TIER_BYTES = Counter(
    "penstock_worker_kv_tier_bytes_total",
    "Of KV blocks loaded from disk and stored there",
    [*_OWN, "event"],
)
KV_TIER_HELD = Gauge(
    "penstock_worker_kv_tier_held_bytes", "KV blocks on disk, of all workers of the host", _OWN
)


class Meter:
    """One worker's own: its labels are looked up once, not in every step."""

    def __init__(self, model: str, role: str) -> None:
        own = (model, role)
        self._steps = STEPS.labels(*own)
        self._pending = PENDING.labels(*own)
        self._step_seconds = STEP_SECONDS.labels(*own)
        self._prefill_seconds = PREFILL_SECONDS.labels(*own)
        self._decode_token_seconds = DECODE_TOKEN_SECONDS.labels(*own)
        self._prefill_tokens = PREFILL_TOKENS.labels(*own)
        self._decode_tokens = DECODE_TOKENS.labels(*own)
        self._draft_tokens = DRAFT_TOKENS.labels(*own)
        self._accepted_tokens = ACCEPTED_TOKENS.labels(*own)
        self._preemptions = PREEMPTIONS.labels(*own)
        self._kv_exported = KV_EXPORTED.labels(*own)
        self._kv_sent = {shared: KV_SENT.labels(*own, shared) for shared in ("shared", "grpc")}
        self._waiting = WAITING.labels(*own)
        self._running = RUNNING.labels(*own)
        self._kv_free = KV_FREE.labels(*own)
        self._kv_total = KV_TOTAL.labels(*own)
        self._own = own
        self._block_bytes = 0
        self._tier = TierCounts()

    def watch(self, pending: Callable[[], int], info: ModelInfo) -> None:
        """`pending` is asked at each scrape: an engine that makes no step tells nothing."""
        self._pending.set_function(pending)
        self._kv_free.set(info.token_blocks)
        self._kv_total.set(info.token_blocks)
        self._block_bytes = info.kv_bytes_per_block

    def step(self, step: StepOutput) -> None:
        self._steps.inc()
        self._step_seconds.observe(step.duration_ns / 1e9)
        self._prefill_tokens.inc(step.prefill_tokens)
        self._decode_tokens.inc(step.decode_tokens)
        self._draft_tokens.inc(step.draft_tokens)
        self._accepted_tokens.inc(step.accepted_tokens)
        self._preemptions.inc(len(step.preempted))
        self._kv_exported.inc(sum(blocks.num_blocks for blocks in step.kv_exports))
        self._waiting.set(step.load.waiting)
        self._running.set(step.load.running)
        self._kv_free.set(step.load.free_blocks)
        self._kv_total.set(step.load.total_blocks)
        if step.tier is not None and step.tier != self._tier:
            self._count_tier(step.tier)

    def _count_tier(self, tier: TierCounts) -> None:
        KV_TIER_HELD.labels(*self._own).set(tier.held_bytes)
        for event in ("loaded", "missed", "passed", "stored", "dropped", "failed", "evicted"):
            more = getattr(tier, event) - getattr(self._tier, event)
            KV_TIER_BLOCKS.labels(*self._own, event).inc(more)
            if event in ("loaded", "stored"):
                KV_TIER_BYTES.labels(*self._own, event).inc(more * self._block_bytes)
        self._tier = tier

    def request(self, timeline: Timeline, first_ns: int, last_ns: int, tokens: int) -> None:
        """One that has ended; nanoseconds of the engine's clock, 0 for what did not come to be."""
        if timeline.chunks and first_ns:
            self._prefill_seconds.observe((first_ns - timeline.scheduled_ns) / 1e9)
        if tokens > 1 and first_ns:
            self._decode_token_seconds.observe((last_ns - first_ns) / (tokens - 1) / 1e9)

    def kv_sent(self, size: int, shared: bool) -> None:
        self._kv_sent["shared" if shared else "grpc"].inc(size)
