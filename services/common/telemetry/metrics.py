"""What every service measures, and label values that stay few."""

from collections.abc import Iterable

from prometheus_client import Counter, Gauge

from services.common.telemetry.tally import Tally
from services.common.versions import version

OTHER = "other"

STAGE_SECONDS = Tally(
    "penstock_stage_seconds",
    "One stage of a request, as its trace has it; `stage` is the span's name",
    ["service", "stage"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
REDIS_REACHABLE = Gauge(
    "penstock_redis_reachable",
    "1: this replica renewed its lease at the last try; 0: Redis is away",
)
BUILD = Gauge("penstock_build_info", "1; what runs in this process", ["service", "version"])


def tell_build(service: str) -> None:
    BUILD.labels(service, version()).set(1)


def from_zero(counter: Counter, values: Iterable[str | tuple[str, ...]]) -> Counter:
    """`counter` with these values of its label, or labels, shown from the start: the first event of
    one that appears with it would look like no change at all."""
    for value in values:
        counter.labels(*((value,) if isinstance(value, str) else value))
    return counter


class BoundedNames:
    """The first `limit` names that come are told; all others are `other` from then on."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def of(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= self._limit:
                return OTHER
            self._names.add(name)
        return name
