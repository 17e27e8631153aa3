"""What the replicas' metrics say, and how much it grew between two looks."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from protos import router_pb2, router_pb2_grpc
from services.cli.registry import Registry
from services.common.discovery import Replica
from services.common.transport import Transport

_ANSWER_S = 2.0
Labels = dict[str, str]


class Metrics:
    """One replica's, as scraped."""

    def __init__(self, text: str = "") -> None:
        self._of: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._of[sample.name].append((sample.labels, sample.value))

    def __bool__(self) -> bool:
        """Whether there was an answer."""
        return bool(self._of)

    def get(self, name: str, **labels: str) -> float | None:
        """The sum over all series that have these labels; None without any."""
        found = [
            value
            for own, value in self._of.get(name, ())
            if all(own.get(key) == wanted for key, wanted in labels.items())
        ]
        return sum(found) if found else None

    def mean(self, name: str) -> float | None:
        """Over all its series."""
        found = [value for _, value in self._of.get(name, ())]
        return sum(found) / len(found) if found else None

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram's cumulative counts by upper bound, over all its series."""
        counts: dict[float, float] = defaultdict(float)
        for labels, value in self._of.get(f"{name}_bucket", ()):
            counts[float(labels["le"])] += value
        return counts


@dataclass
class Sample:
    """One look at everything."""

    at: float  # monotonic
    replicas: list[Replica]
    metrics: dict[str, Metrics]  # by replica; empty for who gives no answer
    workers: dict[str, router_pb2.WorkerStatus] = field(default_factory=dict)  # as a router sees
    draining: set[str] = field(default_factory=set)  # ids
    fresh: bool = True  # False: Redis is away, the replicas are those of before

    def of(self, service: str) -> list[Replica]:
        return [replica for replica in self.replicas if replica.service == service]


async def look(registry: Registry, transport: Transport, http: httpx.AsyncClient) -> Sample:
    """Asks Redis, all replicas and the routers, each for at most a few seconds."""
    fresh = await registry.look(_ANSWER_S)
    draining = registry.draining
    ids = {replica.id for replica in draining}
    replicas = [*(r for r in registry.serving if r.id not in ids), *draining]
    routers = [replica for replica in replicas if replica.service == "router"]
    scraped, seen = await asyncio.gather(
        asyncio.gather(*(_scraped(http, replica) for replica in replicas)),
        asyncio.gather(*(_seen_by(router, transport) for router in routers)),
    )
    workers = {worker.id: worker for status in reversed(seen) for worker in status.workers}
    metrics = {replica.id: told for replica, told in zip(replicas, scraped, strict=True)}
    return Sample(time.monotonic(), replicas, metrics, workers, ids, fresh)


async def _scraped(http: httpx.AsyncClient, replica: Replica) -> Metrics:
    try:
        answer = await http.get(replica.metrics_url, timeout=_ANSWER_S)
        return Metrics(answer.raise_for_status().text)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return Metrics()


async def _seen_by(router: Replica, transport: Transport) -> router_pb2.RouterStatus:
    async with transport.dial(router.address, "router") as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        try:
            asked = router_pb2.RouterStatusRequest()
            status: router_pb2.RouterStatus = await stub.GetStatus(asked, timeout=_ANSWER_S)
            return status
        except grpc.aio.AioRpcError:
            return router_pb2.RouterStatus()


@dataclass(frozen=True)
class Span:
    """Two looks, and what happened between them. Replicas that only one of them saw do not count:
    what they did before, or since, is not known."""

    first: Sample
    last: Sample

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at

    def _both(self, service: str) -> list[tuple[Metrics, Metrics]]:
        pairs = (
            (self.first.metrics.get(r.id, Metrics()), self.last.metrics[r.id])
            for r in self.last.of(service)
        )
        return [(before, after) for before, after in pairs if before and after]

    def rate(self, service: str, name: str, **labels: str) -> float | None:
        """A counter's growth a second, over all replicas of a service."""
        return self._per_second(self._both(service), name, labels)

    def rate_of(self, replica: Replica, name: str, **labels: str) -> float | None:
        before = self.first.metrics.get(replica.id, Metrics())
        after = self.last.metrics[replica.id]
        return self._per_second([(before, after)] if before and after else [], name, labels)

    def _per_second(
        self, pairs: list[tuple[Metrics, Metrics]], name: str, labels: Labels
    ) -> float | None:
        """None where nobody tells it. A series that came in between began at nothing."""
        told = [
            (before.get(name, **labels) or 0.0, now)
            for before, after in pairs
            if (now := after.get(name, **labels)) is not None
        ]
        if not told or self.seconds <= 0:
            return None
        return sum(max(0.0, now - before) for before, now in told) / self.seconds

    def total(self, service: str, name: str) -> float | None:
        """A gauge's sum over all replicas of a service, now."""
        told = [self.last.metrics[replica.id].get(name) for replica in self.last.of(service)]
        known = [value for value in told if value is not None]
        return sum(known) if known else None

    def quantiles(self, service: str, name: str, *wanted: float) -> list[float | None]:
        """Of what a histogram took in between the looks; None when that is nothing."""
        grown: dict[float, float] = defaultdict(float)
        for before, after in self._both(service):
            earlier = before.buckets(name)
            for bound, count in after.buckets(name).items():
                grown[bound] += max(0.0, count - earlier.get(bound, 0.0))
        return [quantile(sorted(grown.items()), share) for share in wanted]


def quantile(buckets: Iterable[tuple[float, float]], share: float) -> float | None:
    """As Prometheus estimates it: evenly spread within its bucket; past the last finite bound, that
    bound. `buckets`: cumulative counts by rising upper bound."""
    known = list(buckets)
    if not known or known[-1][1] <= 0:
        return None
    rank = share * known[-1][1]
    below, counted = 0.0, 0.0
    for bound, count in known:
        if count >= rank and count > counted:
            if math.isinf(bound):
                return below
            return below + (bound - below) * (rank - counted) / (count - counted)
        below, counted = bound, count
    return below
