"""A histogram of values that come by the thousand a second, summed when somebody looks.

The client's own takes a lock and walks its buckets for each value, 2 to 4 µs with the look-up of
its labels; here a value is a step of a binary search and two additions. They are made in one
thread, the event loop's; a look from another one may miss the value that is just being added.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Counts:
    """Of one set of label values."""

    __slots__ = ("_bounds", "of_buckets", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.of_buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.of_buckets[bisect_left(self._bounds, value)] += 1
        self.sum += value


class Tally(Collector):
    """As prometheus_client.Histogram."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`buckets`: their upper bounds, rising; one for all above is added."""
        self._name, self._documentation = name, documentation
        self._labelnames = tuple(labels)
        self._bounds = tuple(map(float, buckets))
        self._counts: dict[tuple[str, ...], Counts] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Counts:
        """To be kept by who observes often."""
        counts = self._counts.get(values)
        if counts is None:
            if len(values) != len(self._labelnames):
                raise ValueError(f"{self._name} has the labels {', '.join(self._labelnames)}")
            counts = self._counts[values] = Counts(self._bounds)
        return counts

    def observe(self, value: float) -> None:
        """Of one without labels."""
        self._counts[()].observe(value)

    def describe(self) -> Iterable[HistogramMetricFamily]:
        yield self._family()

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = self._family()
        for values, counts in list(self._counts.items()):
            so_far, buckets = 0, []
            bounds = (*map(floatToGoString, self._bounds), "+Inf")
            for bound, count in zip(bounds, counts.of_buckets, strict=True):
                so_far += count
                buckets.append((bound, so_far))
            family.add_metric(values, buckets, counts.sum)
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
