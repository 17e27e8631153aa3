"""The order of admission, in one process: what order.lua does for all routers, and explains.

Used while Redis is away, and the model that a test holds the script to. Times are monotonic
seconds that the caller gives.
"""

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from dataclasses import dataclass, field

LANES = (1, 2, 3)
"""High, normal, low: the numbers of `penstock.v1.Priority`."""


@dataclass(eq=False)
class Request:
    """One request in the order."""

    id: str
    tenant: str
    lane: int
    work: float  # cost / weight
    weight: float
    arrived_s: float
    recalls: int = 0  # how often it gave its slot back
    granted_s: float | None = None  # None: it waits
    asked: bool = False  # it was recalled and holds on still

    @property
    def in_line(self) -> tuple[int, float, str]:
        return self.lane, self.arrived_s, self.id


@dataclass
class Decided:
    """What a call to the order decided, about any request."""

    granted: list[str] = field(default_factory=list)
    displaced: list[str] = field(default_factory=list)
    recalled: list[str] = field(default_factory=list)


class FairOrder:
    """The requests of one model, waiting or holding a slot. Each method that takes a `Decided`
    adds to it what follows for whichever request.

    A grant costs a step for each tenant that waits, however many requests it has, and a recall
    one for each slot of the tenant that gives: this runs on the router's loop, between two frames
    of its links.
    """

    def __init__(self, ageing_s: float, patience_s: float, recalls: int) -> None:
        self._ageing_s = ageing_s
        self._patience_s = patience_s
        self._recalls = recalls
        self._virtual = 0.0
        self._finish: dict[str, float] = {}  # of tenants served ahead of the virtual time
        self._starts: dict[str, float] = {}  # of tenants that wait
        self._since: dict[str, float] = {}  # when they began to wait, or to hold no slot
        self._waiting: dict[str, Request] = {}
        self._lines: defaultdict[str, list[Request]] = defaultdict(list)  # of tenants, in order
        self._held: dict[str, Request] = {}
        self._seats: defaultdict[str, dict[str, Request]] = defaultdict(dict)  # of tenants
        self._asked: Counter[str] = Counter()  # of tenants: how many of these
        self._lowest: dict[str, Request] = {}  # those that are held in the lowest lane

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __contains__(self, id: str) -> bool:
        return id in self._waiting or id in self._held

    def enter(
        self, new: Request, limit: int, capacity: int, now_s: float, decided: Decided
    ) -> tuple[str, int]:
        """Returns "granted", "waiting" or "full", and how many waited before it."""
        self._pump(capacity, now_s, decided)
        before, state = len(self._waiting), "waiting"
        if len(self._held) < capacity:
            self._hold(new, self._start_of(new.tenant), now_s)
            return "granted", before
        if before >= limit and not self._displace(new, limit, decided):
            state = "full"
        else:
            self._queue(new, new.arrived_s)
        self._recall(capacity, now_s, decided)
        return state, before

    def hold(self, running: Request, now_s: float) -> None:
        """Enters a request that runs already."""
        self._hold(running, self._start_of(running.tenant), now_s)

    def give_back(
        self, id: str, missed: float, left: float, capacity: int, now_s: float, decided: Decided
    ) -> str:
        """A recalled request waits again, with the work that is left; "kept" if none needs it,
        "unknown" if it is."""
        if id not in self._held:
            return "waiting" if id in self._waiting else "unknown"
        request = self._held[id]
        self._pump(capacity, now_s, decided)
        need = self._need(0, now_s)
        slots = self._slots(request.tenant) + request.asked
        wanted = need and (
            (request.lane == LANES[-1] and self._presses(0, now_s))
            or self._owes(request, slots, *need[:2])
        )
        if len(self._held) > capacity or not wanted:
            self._ask(request, False, now_s)
            self._recall(capacity, now_s, decided)
            return "kept"
        self._release(id, missed, now_s)
        request.granted_s = None
        request.recalls += 1
        request.work = left
        self._queue(request, now_s)
        self.look(capacity, now_s, decided)
        return "waiting"

    def leave(self, id: str, missed: float, now_s: float) -> None:
        """As if it had never come, but for what it used. Ignores unknown ids."""
        if id in self._waiting:
            self._take(id)
        elif id in self._held:
            self._release(id, missed, now_s)

    def look(self, capacity: int, now_s: float, decided: Decided) -> None:
        """Grants free slots in order and recalls what is owed."""
        self._pump(capacity, now_s, decided)
        self._recall(capacity, now_s, decided)

    # ---- the tenants' virtual time ----------------------------------------------------------

    def _start_of(self, tenant: str) -> float:
        return max(self._virtual, self._finish.get(tenant, 0.0))

    def _charge(self, tenant: str, start: float, work: float) -> None:
        self._virtual = max(self._virtual, start)
        self._set_finish(tenant, start + work)

    def _settle(self, tenant: str, missed: float) -> None:
        if missed:
            self._set_finish(tenant, self._start_of(tenant) + missed)

    def _set_finish(self, tenant: str, finish: float) -> None:
        self._finish[tenant] = finish
        self._finish = {t: f for t, f in self._finish.items() if f > self._virtual}
        if tenant in self._starts:
            self._starts[tenant] = self._start_of(tenant)

    # ---- what waits and what holds ----------------------------------------------------------

    def _queue(self, request: Request, since_s: float) -> None:
        self._waiting[request.id] = request
        insort(self._lines[request.tenant], request, key=_in_line)
        self._starts.setdefault(request.tenant, self._start_of(request.tenant))
        self._since.setdefault(request.tenant, since_s)

    def _take(self, id: str) -> Request:
        request = self._waiting.pop(id)
        line = self._lines[request.tenant]
        del line[bisect_left(line, request.in_line, key=_in_line)]
        if not line:
            del self._lines[request.tenant]
            del self._starts[request.tenant], self._since[request.tenant]
        return request

    def _hold(self, request: Request, start: float, now_s: float) -> None:
        self._charge(request.tenant, start, request.work)
        request.granted_s = now_s
        self._held[request.id] = self._seats[request.tenant][request.id] = request
        if request.lane == LANES[-1]:
            self._lowest[request.id] = request

    def _release(self, id: str, missed: float, now_s: float) -> None:
        request = self._held.pop(id)
        self._lowest.pop(id, None)
        tenant = request.tenant
        self._ask(request, False, now_s)
        del self._seats[tenant][id]
        if not self._seats[tenant]:
            del self._seats[tenant]
        self._note_service(tenant, now_s)
        self._settle(tenant, missed)

    def _ask(self, request: Request, back: bool, now_s: float) -> None:
        """Whether its slot is asked back."""
        if request.asked != back:
            request.asked = back
            self._asked[request.tenant] += 1 if back else -1
            self._asked += Counter()  # drops the zeros
        self._note_service(request.tenant, now_s)

    def _note_service(self, tenant: str, now_s: float) -> None:
        """Who has no slot any more was served up to now."""
        if tenant in self._since and not self._slots(tenant):
            self._since[tenant] = now_s

    def _slots(self, tenant: str) -> int:
        """Those on their way out are not counted."""
        return len(self._seats.get(tenant, ())) - self._asked[tenant]

    # ---- decisions --------------------------------------------------------------------------

    def _lane(self, tenant: str, now_s: float) -> int:
        """Of its first request, raised by the time that the tenant has gone without a slot."""
        lifts = max(0, math.floor((now_s - self._since[tenant]) / self._ageing_s))
        return max(LANES[0], self._lines[tenant][0].lane - (0 if self._slots(tenant) else lifts))

    def _next(self, now_s: float) -> Request | None:
        if not self._starts:
            return None

        def place(tenant: str) -> tuple[int, bool, float, str]:
            """Among equals the smaller name, as in a Redis sorted set."""
            lane, start = self._lane(tenant, now_s), self._starts[tenant]
            return lane, self._slots(tenant) > 0, start, tenant

        return self._lines[min(self._starts, key=place)][0]

    def _pump(self, capacity: int, now_s: float, decided: Decided) -> None:
        while len(self._held) < capacity and (request := self._next(now_s)):
            start = self._starts[request.tenant]
            self._hold(self._take(request.id), start, now_s)
            decided.granted.append(request.id)

    def _need(self, coming: int, now_s: float) -> tuple[int, float, float] | None:
        """Of the next, with `coming` slots on their way to its tenant: in what lane, the share that
        its tenant would then have, how long it has waited."""
        request = self._next(now_s)
        if request is None or coming >= len(self._lines[request.tenant]):
            return None
        own = (self._slots(request.tenant) + coming + 1) / request.weight
        return self._lane(request.tenant, now_s), own, now_s - request.arrived_s

    def _owes(self, request: Request, slots: int, lane: int, own: float) -> bool:
        """Of a tenant with so many slots; nobody loses the only one."""
        return request.lane >= lane and slots > 1 and slots / request.weight >= 2 * own

    def _recall(self, capacity: int, now_s: float, decided: Decided) -> None:
        if not self._recalls or len(self._held) != capacity:
            return
        asked = self._asked.total()
        while self._presses(asked, now_s) and (request := self._to_stand_aside()):
            self._ask(request, True, now_s)
            asked += 1
            decided.recalled.append(request.id)
        while True:
            need = self._need(asked, now_s)
            if need is None or need[2] < self._patience_s:
                return
            request = self._to_recall(*need[:2])
            if request is None:
                return
            self._ask(request, True, now_s)
            asked += 1
            decided.recalled.append(request.id)

    def _presses(self, coming: int, now_s: float) -> bool:
        """Whether more wait above the lowest lane than slots are coming. Of a tenant that has risen
        there, one does: then it is served."""
        waiting = 0
        for tenant, line in self._lines.items():
            if waiting <= coming and self._lane(tenant, now_s) < LANES[-1]:
                waiting += max(1, bisect_left(line, LANES[-1], key=_lane_of))
        return waiting > coming

    def _to_stand_aside(self) -> Request | None:
        """The youngest in the lowest lane, of those that may be recalled."""
        may = (r for r in self._lowest.values() if not r.asked and r.recalls < self._recalls)
        return max(may, key=lambda r: (r.granted_s, r.id), default=None)

    def _to_recall(self, lane: int, own: float) -> Request | None:
        shares = {
            tenant: len(seats) / next(reversed(seats.values())).weight
            for tenant, seats in self._seats.items()
        }
        for tenant in sorted(shares, key=lambda t: (shares[t], t), reverse=True):
            if shares[tenant] < 2 * own:
                return None
            theirs = [
                r for r in self._seats[tenant].values() if not r.asked and r.recalls < self._recalls
            ]
            youngest = max(theirs, key=lambda r: (r.lane, r.granted_s, r.id), default=None)
            if youngest and self._owes(youngest, self._slots(tenant), lane, own):
                return youngest
        return None

    def _displace(self, new: Request, limit: int, decided: Decided) -> bool:
        counts = Counter({tenant: len(line) for tenant, line in self._lines.items()})
        equal_part = (counts[new.tenant] + 1) * len(counts.keys() | {new.tenant}) <= limit
        most = max(counts, key=lambda t: (counts[t], t), default=new.tenant)
        giver = most if equal_part else new.tenant
        line = reversed(self._lines.get(giver, []))
        last = next((request for request in line if not request.recalls), None)
        if last is None or (not equal_part and last.lane <= new.lane):
            return False
        self._take(last.id)
        decided.displaced.append(last.id)
        return True


def _lane_of(request: Request) -> int:
    return request.lane


def _in_line(request: Request) -> tuple[int, float, str]:
    return request.in_line
