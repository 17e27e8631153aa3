"""The worker's Prometheus metrics."""

from prometheus_client import Counter, Gauge, Histogram

from services.worker.engine import StepOutput

STEPS = Counter("penstock_worker_steps", "Engine steps")
STEP_SECONDS = Histogram(
    "penstock_worker_step_seconds",
    "Duration of an engine step",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)
PREFILL_TOKENS = Counter("penstock_worker_prefill_tokens", "Prompt tokens computed")
DECODE_TOKENS = Counter("penstock_worker_decode_tokens", "Tokens decoded")
PREEMPTIONS = Counter("penstock_worker_preemptions", "Sequences whose blocks were taken")
KV_EXPORTED = Counter("penstock_worker_kv_blocks_exported", "KV blocks made for decode workers")
WAITING = Gauge("penstock_worker_waiting_sequences", "Sequences that hold no place yet")
RUNNING = Gauge("penstock_worker_running_sequences", "Sequences that hold a place")
KV_FREE = Gauge("penstock_worker_kv_free_blocks", "KV blocks reusable at once")
KV_TOTAL = Gauge("penstock_worker_kv_blocks", "KV blocks in all")


def observe_step(step: StepOutput) -> None:
    STEPS.inc()
    STEP_SECONDS.observe(step.duration_ns / 1e9)
    PREFILL_TOKENS.inc(step.prefill_tokens)
    DECODE_TOKENS.inc(step.decode_tokens)
    PREEMPTIONS.inc(len(step.preempted))
    KV_EXPORTED.inc(sum(blocks.num_blocks for blocks in step.kv_exports))
    WAITING.set(step.load.waiting)
    RUNNING.set(step.load.running)
    KV_FREE.set(step.load.free_blocks)
    KV_TOTAL.set(step.load.total_blocks)
