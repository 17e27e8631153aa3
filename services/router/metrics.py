"""What the router counts. Labels are few and known beforehand: no tenant, no request, no worker."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metrics import from_zero
from services.common.telemetry.tally import Tally

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

queued = Gauge("penstock_router_queued_requests", "Waiting for admission at this router")
admitted = Gauge("penstock_router_admitted_requests", "Holding a slot at this router")
redis_away = Gauge(
    "penstock_router_admission_without_redis_state", "1: this router admits without Redis"
)
wait = Histogram("penstock_router_admission_wait_seconds", "Until admitted", buckets=_SECONDS)
grants = Counter("penstock_router_grants_total", "Requests admitted", ["lane", "order"])
refusals = Counter("penstock_router_refusals_total", "Requests not admitted", ["reason"])
recalls = Counter(
    "penstock_router_recalls_total",
    "Slots taken back for a tenant that had fewer, or from the low lane",
)
placements = Counter("penstock_router_placements_total", "Requests placed on workers", ["mode"])
failovers = from_zero(
    Counter("penstock_router_failovers_total", "Requests that went on elsewhere", ["cause"]),
    (
        "broken_off",
        "draining",
        "engine_died",
        "engine_gone",
        "engine_killed",
        "peer_stalled",
        "kv_transfer",
        "link_congested",
        "no_adapter",
        "peer_lost",
        "other_checkpoint",
        "too_many_requests",
    ),
)
quarantined = Counter(
    "penstock_router_quarantined_requests_total",
    "Not run on: convicted of ending engines, or refused for being like one that was",
    ["how"],
)
breakers_open = Gauge("penstock_router_breakers_open", "Workers that are left alone now")
ttft = Histogram(
    "penstock_router_time_to_first_token_seconds",
    "From arrival at the router to the first token",
    buckets=_SECONDS,
)
itl = Tally(
    "penstock_router_inter_token_latency_seconds",
    "Between tokens; a delta of several counts once, by its mean",
    (),
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 5),
)
prompt_tokens = Counter("penstock_router_prompt_tokens_total", "Of placed requests")
hit_tokens = Counter(
    "penstock_router_prefix_hit_tokens_total", "Of them, cached where they were placed"
)
output_tokens = Counter("penstock_router_output_tokens_total", "Sent to clients")
warmed = from_zero(
    Counter(
        "penstock_router_warmed_prompts_total",
        "Known parts of chats' next prompts, by whether they were computed ahead: whole; dropped, "
        "for a request came; busy, no worker had nothing to do; unheld, nobody had the beginning",
        ["outcome"],
    ),
    ("whole", "dropped", "busy", "unheld"),
)
warmed_tokens = Counter("penstock_router_warmed_tokens_total", "Computed ahead")
ended = Counter(
    "penstock_router_requests_total", "Ended requests; warmed: decision 0059", ["outcome"]
)


class ReadyWorkers(Collector):
    """Counted when somebody asks."""

    def __init__(self) -> None:
        self._counts: Callable[[], Mapping[tuple[str, str], int]] = dict

    def watch(self, counts: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """`counts`: by model and role."""
        self._counts = counts

    def describe(self) -> Iterator[Metric]:
        return iter((_ready_workers(),))

    def collect(self) -> Iterator[Metric]:
        family = _ready_workers()
        for labels, count in sorted(self._counts().items()):
            family.add_metric(labels, count)
        yield family


def _ready_workers() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "penstock_router_ready_workers",
        "Workers linked to this router that take requests now",
        labels=["model", "role"],
    )


READY_WORKERS = ReadyWorkers()
REGISTRY.register(READY_WORKERS)
