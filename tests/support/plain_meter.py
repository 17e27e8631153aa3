"""Metering in plain Python, as a ledger would be kept by hand: what meter.lua is held to.

A bucket is the history of what was put in, told anew from its beginning at every look: what comes
back of a reservation is changed in there as if it had never been. Dates are the library's.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

FULL_S = {"minute": 60.0, "hour": 3600.0}
CLOSE = 1e-6  # seconds
NEVER = -1.0


@dataclass
class Addition:
    """To a bucket, in what the rule counts."""

    at: float
    amount: float


@dataclass
class Count:
    held: int = 0
    used: int = 0


@dataclass
class Standing:
    run: dict[str, Any]
    dates: dict[str, str]  # of calendar rules, by key
    until: float
    used: dict[str, int]
    added: dict[str, Addition]  # to buckets, by rule
    by: str = ""  # the attempt that came last


def date_of(per: str, now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d" if per == "day" else "%Y-%m")


def period_ends(per: str, now: float) -> float:
    first = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if per == "day":
        return (first + timedelta(days=1)).timestamp()
    return (first.replace(day=1) + timedelta(days=32)).replace(day=1).timestamp()


def amounts(used: dict[str, int]) -> dict[str, int]:
    return {"requests": 1, "tokens": used["prompt"] + used["output"], "cost": used["cost"]}


def _most(used: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: max(n, before[name]) for name, n in used.items()}


@dataclass
class PlainMeter:
    lease_s: float
    buckets: dict[str, list[Addition]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[tuple[str, str], Count] = field(default_factory=lambda: defaultdict(Count))
    standing: dict[str, Standing] = field(default_factory=dict)
    charged: dict[str, dict[str, int]] = field(default_factory=dict)
    over: dict[str, str] = field(default_factory=dict)  # as what
    ended_by: dict[str, str] = field(default_factory=dict)  # which attempt
    released: dict[str, str] = field(default_factory=dict)  # the attempt that was last
    ledger: list[tuple[str, str, dict[str, int]]] = field(default_factory=list)
    now: float = 0.0

    # ---- rules --------------------------------------------------------------------------------

    def _left(self, rule: dict[str, Any]) -> float:
        level, before, rate = 0.0, 0.0, rule["most"] / FULL_S[rule["per"]]
        for one in [*self.buckets[rule["key"]], Addition(self.now, 0.0)]:
            level = max(0.0, level - (one.at - before) * rate) + one.amount
            before = one.at
        return float(rule["most"] - level)

    def look(self, rule: dict[str, Any], need: float) -> tuple[float, float]:
        """What is left, and how long until `need` fits."""
        most = rule["most"]
        if rule["of"] == "concurrent":
            left = max(0, int(most) - len(self.holders(rule)))
            return left, NEVER if most < 1 else 0.0 if left else 1.0
        if rule["per"] in FULL_S:
            if need > most or not most:
                return 0.0, NEVER
            left, rate = self._left(rule), most / FULL_S[rule["per"]]
            wait = (need - left) / rate
            return max(0.0, left), wait if wait > CLOSE else 0.0
        count = self.counts[rule["key"], date_of(rule["per"], self.now)]
        left = max(0, most - count.held - count.used)
        if need > most or not most:
            return left, NEVER
        if need <= left:
            return left, 0.0
        soon = need <= most - count.used
        return left, 1.0 if soon else period_ends(rule["per"], self.now) - self.now

    def holders(self, rule: dict[str, Any]) -> set[str]:
        return {
            id
            for id, one in self.standing.items()
            if one.until > self.now and rule["key"] in {r["key"] for r in one.run["rules"]}
        }

    def _hold(self, run: dict[str, Any], dates: dict[str, str]) -> dict[str, Addition]:
        added = {}
        for rule in run["rules"]:
            amount = run["held"].get(rule["of"], 0)
            if rule["per"] in FULL_S:
                added[rule["key"]] = self._add(rule, amount)
            elif rule["of"] != "concurrent":
                self.counts[rule["key"], dates[rule["key"]]].held += amount
        return added

    def _add(self, rule: dict[str, Any], amount: float) -> Addition:
        one = Addition(self.now, amount if rule["most"] else 0)
        self.buckets[rule["key"]].append(one)
        return one

    def _use(self, one: Standing, held: dict[str, int], used: dict[str, int]) -> None:
        """In the place of what it held."""
        for rule in one.run["rules"]:
            hold, use = held.get(rule["of"], 0), used.get(rule["of"], 0)
            if rule["per"] in FULL_S:
                added = one.added.get(rule["key"])
                if added is not None and added.amount:
                    added.amount = min(added.amount, added.amount - hold + max(0, use))
                if use > hold:
                    self._add(rule, use - hold)
            elif rule["of"] != "concurrent":
                count = self.counts[rule["key"], one.dates[rule["key"]]]
                count.held -= hold
                count.used += use

    # ---- what can be asked --------------------------------------------------------------------

    def reserve(self, id: str, run: dict[str, Any]) -> tuple[int, float]:
        """Which rule stands in the way, from 1 (0: none), and for how long."""
        self.sweep(10)
        self._of_another_model(id, run)
        if id in self.standing:
            self.standing[id].until = self.now + self.lease_s
            self.standing[id].by = run["attempt"]
            return 0, 0.0
        if self._is_gone(id, run):
            return 0, 0.0
        if self.over.get(id) == "lost":
            self.hold(id, run)
            return 0, 0.0
        if self.ended_by.get(id) == run["attempt"]:
            return 0, 0.0
        self._count(id, run)
        waits = [self.look(rule, run["held"].get(rule["of"], 0))[1] for rule in run["rules"]]
        if NEVER in waits:
            return waits.index(NEVER) + 1, NEVER
        if any(waits):
            return waits.index(max(waits)) + 1, max(waits)
        self._stand(id, run)
        return 0, 0.0

    def _count(self, id: str, run: dict[str, Any]) -> None:
        """What was charged is no new request, and told."""
        if id in self.charged:
            run["held"]["requests"] = 0
            run["used"] = _most(run["used"], self.charged[id])

    def _stand(self, id: str, run: dict[str, Any]) -> None:
        dates = self._dates(run)
        added, until = self._hold(run, dates), self.now + self.lease_s
        self.standing[id] = Standing(run, dates, until, run["used"], added, run["attempt"])

    def _dates(self, run: dict[str, Any]) -> dict[str, str]:
        return {
            rule["key"]: date_of(rule["per"], self.now)
            for rule in run["rules"]
            if rule["per"] in ("day", "month")
        }

    def _of_another_model(self, id: str, run: dict[str, Any]) -> None:
        one = self.standing.get(id)
        if one is not None and one.run["who"]["model"] != run["who"]["model"]:
            self._give_back(id)

    def _give_back(self, id: str) -> None:
        one = self.standing.pop(id)
        self._use(one, one.run["held"], {})

    def hold(self, id: str, run: dict[str, Any]) -> None:
        self._of_another_model(id, run)
        if id not in self.standing:
            if self.over.get(id, "lost") != "lost" or self._is_gone(id, run):
                return
            self._count(id, run)
            self._stand(id, run)
        one = self.standing[id]
        one.until, one.by = self.now + self.lease_s, run["attempt"]
        one.used = _most(run["used"], one.used)  # it only grows

    def settle(self, id: str, run: dict[str, Any]) -> None:
        self._of_another_model(id, run)
        if one := self.standing.get(id):
            if run["status"] == "cancelled" and one.by != run["attempt"]:
                one.used = _most(run["used"], one.used)
                return
            one.by = run["attempt"]
            self._close(id, run["used"], run["status"])
        else:
            one = Standing(run, self._dates(run), 0.0, {}, {}, run["attempt"])
            self._charge(id, one, {}, run)

    def _is_gone(self, id: str, run: dict[str, Any]) -> bool:
        return self.released.get(id) == run["attempt"]

    def release(self, id: str, attempt: str) -> None:
        if id in self.standing and self.standing[id].run["attempt"] == attempt:
            self._give_back(id)
        if id not in self.charged:
            self.released[id] = attempt

    def _close(self, id: str, used: dict[str, int], status: str) -> None:
        one = self.standing.pop(id)
        self._charge(id, one, one.run["held"], {"used": used, "status": status})

    def _charge(self, id: str, one: Standing, held: dict[str, int], end: dict[str, Any]) -> None:
        before, used, status = self.charged.get(id), end["used"], end["status"]
        was_lost = self.over.get(id) == "lost"
        if before and used["output"] == before["output"]:
            gives_back = was_lost and status == "failed"
            used = before if used["prompt"] < before["prompt"] and not gives_back else used
        elif before and not was_lost and used["output"] < before["output"]:
            used = before
        missing = {name: n - (before[name] if before else 0) for name, n in used.items()}
        told = amounts(missing) | ({"requests": 0} if before else {})
        self._use(one, held, told)
        self.charged[id], self.over[id], self.ended_by[id] = used, status, one.by
        self.released.pop(id, None)
        if not before or any(missing.values()):
            self.ledger.append((id, "correction" if before else status, missing))

    def sweep(self, most: int) -> int:
        over = sorted((one.until, id) for id, one in self.standing.items() if one.until <= self.now)
        for _, id in over[:most]:
            self._close(id, self.standing[id].used, "lost")
        return len(over[:most])
