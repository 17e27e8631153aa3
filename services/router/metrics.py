"""What the router counts. Labels are few and known beforehand: no tenant, no request, no worker."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

queued = Gauge("penstock_router_queued_requests", "waiting for admission at this router")
admitted = Gauge("penstock_router_admitted_requests", "holding a slot at this router")
redis_away = Gauge(
    "penstock_router_admission_without_redis_state", "1: this router admits without Redis"
)
wait = Histogram("penstock_router_admission_wait_seconds", "until admitted", buckets=_SECONDS)
grants = Counter("penstock_router_grants", "requests admitted", ["lane", "order"])
refusals = Counter("penstock_router_refusals", "requests not admitted", ["reason"])
recalls = Counter("penstock_router_recalls", "slots taken back for a tenant that had fewer")
placements = Counter("penstock_router_placements", "requests placed on workers", ["mode"])
failovers = Counter("penstock_router_failovers", "requests that went on elsewhere", ["cause"])
quarantined = Counter(
    "penstock_router_quarantined_requests",
    "not run on: convicted of ending engines, or refused for being like one that was",
    ["how"],
)
breakers_open = Gauge("penstock_router_breakers_open", "workers that are left alone now")
ttft = Histogram(
    "penstock_router_ttft_seconds",
    "from arrival at the router to the first token",
    buckets=_SECONDS,
)
itl = Histogram(
    "penstock_router_itl_seconds",
    "between tokens; a delta of several counts once, by its mean",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 5),
)
prompt_tokens = Counter("penstock_router_prompt_tokens", "of placed requests")
hit_tokens = Counter("penstock_router_prefix_hit_tokens", "of them, cached where they were placed")
output_tokens = Counter("penstock_router_output_tokens", "sent to clients")
ended = Counter("penstock_router_requests", "ended requests", ["outcome"])
