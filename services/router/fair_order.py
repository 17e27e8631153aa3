"""The order of admission, in one process: what admission.lua does for all routers.

Used while Redis is away. Lanes come strictly one after the other; waiting `ageing_s` lifts a
request by one lane. Within a lane, tenants share by weight: start-time fair queuing (Goyal, Vin,
Cheng, 1996), where each grant charges its tenant cost / weight of virtual time and the tenant
furthest behind is next. A tenant's own requests go in order of arrival.
"""

from collections import Counter
from dataclasses import dataclass

LANES = (1, 2, 3)
"""High, normal, low: the numbers of `penstock.v1.Priority`."""


@dataclass(eq=False)
class Waiting:
    """One request in the order."""

    id: str
    tenant: str
    lane: int
    work: float  # cost / weight
    arrived_s: float
    lifts: int = 0


class FairOrder:
    """Waiting requests; times are monotonic seconds that the caller gives."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._virtual = 0.0
        self._finish: dict[str, float] = {}  # of tenants served ahead of the virtual time
        self._starts: dict[int, dict[str, float]] = {lane: {} for lane in LANES}
        self._waiting: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, id: str) -> bool:
        return id in self._waiting

    def add(self, request: Waiting) -> None:
        """Puts a request in its place."""
        self._waiting[request.id] = request
        self._start(request, self._start_of(request.tenant))

    def remove(self, id: str) -> None:
        """As if it had never come. Ignores unknown ids."""
        if id in self._waiting:
            self._take(self._waiting.pop(id))

    def displace(self, tenant: str, limit: int) -> str | None:
        """Frees a place for one more of the tenant's, of the `limit` places, all of them taken.

        Returns the id of the request that gives its place: the last of the tenant that has the
        most. None if the tenant would then have more than an equal part of the places.
        """
        counts = Counter(request.tenant for request in self._waiting.values())
        if (counts[tenant] + 1) * len(counts.keys() | {tenant}) > limit:
            return None
        most = max(counts, key=lambda t: (counts[t], t))
        theirs = (request for request in self._waiting.values() if request.tenant == most)
        last = max(theirs, key=lambda r: (r.lane, r.arrived_s, r.id))
        self.remove(last.id)
        return last.id

    def charge(self, tenant: str, work: float) -> None:
        """Accounts for a request that is granted without having waited."""
        self._charge(tenant, self._start_of(tenant), work)

    def settle(self, tenant: str, missed: float) -> None:
        """Charges what a granted request's work missed, or gives back, if it is negative."""
        self._finish[tenant] = self._start_of(tenant) + missed
        self._forget_past()
        self._restart(tenant)

    def pop(self, now_s: float) -> str | None:
        """The next request's id; it leaves the order and is charged."""
        self._lift(now_s)
        for lane in LANES:
            if self._starts[lane]:
                break
        else:
            return None
        # Among equals the smaller name, as in a Redis sorted set.
        tenant = min(self._starts[lane], key=lambda t: (self._starts[lane][t], t))
        start = self._starts[lane][tenant]
        request = min(self._line(lane, tenant), key=lambda r: (r.arrived_s, r.id))
        del self._waiting[request.id]
        self._take(request)
        self._charge(tenant, start, request.work)
        self._restart(tenant)
        return request.id

    def _line(self, lane: int, tenant: str) -> list[Waiting]:
        return [r for r in self._waiting.values() if r.lane == lane and r.tenant == tenant]

    def _start_of(self, tenant: str) -> float:
        return max(self._virtual, self._finish.get(tenant, 0.0))

    def _start(self, request: Waiting, start: float) -> None:
        starts = self._starts[request.lane]
        starts[request.tenant] = min(start, starts.get(request.tenant, start))

    def _restart(self, tenant: str) -> None:
        """After a charge: the tenant's lanes go by its new start."""
        for starts in self._starts.values():
            if tenant in starts:
                starts[tenant] = self._start_of(tenant)

    def _take(self, request: Waiting) -> None:
        """Its tenant leaves the lane with its last request there."""
        others = (r for r in self._line(request.lane, request.tenant) if r is not request)
        if next(others, None) is None:
            del self._starts[request.lane][request.tenant]

    def _charge(self, tenant: str, start: float, work: float) -> None:
        self._virtual = max(self._virtual, start)
        self._finish[tenant] = start + work
        self._forget_past()

    def _forget_past(self) -> None:
        self._finish = {t: f for t, f in self._finish.items() if f > self._virtual}

    def _lift(self, now_s: float) -> None:
        for lane in (3, 2):
            due = [
                r
                for r in self._waiting.values()
                if r.lane == lane and r.arrived_s + self._ageing_s * (r.lifts + 1) <= now_s
            ]
            for request in due:
                start = self._starts[lane][request.tenant]
                self._take(request)
                request.lane -= 1
                request.lifts += 1
                self._start(request, start)
