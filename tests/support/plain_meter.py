"""Metering in plain Python, as a ledger would be kept by hand: what meter.lua is held to.

Buckets are levels that fill up here, and times there; dates are the library's; nothing is stored
but what each request holds and what it was charged.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

FULL_S = {"minute": 60.0, "hour": 3600.0}
CLOSE = 1e-6  # seconds
NEVER = -1.0


@dataclass
class Bucket:
    left: float
    at: float


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


def date_of(per: str, now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d" if per == "day" else "%Y-%m")


def period_ends(per: str, now: float) -> float:
    first = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if per == "day":
        return (first + timedelta(days=1)).timestamp()
    return (first.replace(day=1) + timedelta(days=32)).replace(day=1).timestamp()


def amounts(used: dict[str, int]) -> dict[str, int]:
    return {"requests": 1, "tokens": used["prompt"] + used["output"], "cost": used["cost"]}


@dataclass
class PlainMeter:
    lease_s: float
    buckets: dict[str, Bucket] = field(default_factory=dict)
    counts: dict[tuple[str, str], Count] = field(default_factory=lambda: defaultdict(Count))
    standing: dict[str, Standing] = field(default_factory=dict)
    charged: dict[str, dict[str, int]] = field(default_factory=dict)
    ledger: list[tuple[str, str, dict[str, int]]] = field(default_factory=list)
    now: float = 0.0

    # ---- rules --------------------------------------------------------------------------------

    def _bucket(self, rule: dict[str, Any]) -> Bucket:
        bucket = self.buckets.setdefault(rule["key"], Bucket(rule["most"], self.now))
        rate = rule["most"] / FULL_S[rule["per"]]
        bucket.left = min(rule["most"], bucket.left + (self.now - bucket.at) * rate)
        bucket.at = self.now
        return bucket

    def look(self, rule: dict[str, Any], need: float) -> tuple[float, float]:
        """What is left, and how long until `need` fits."""
        most = rule["most"]
        if rule["of"] == "concurrent":
            left = max(0, int(most) - len(self.holders(rule)))
            return left, NEVER if most < 1 else 0.0 if left else 1.0
        if rule["per"] in FULL_S:
            left, rate = self._bucket(rule).left, most / FULL_S[rule["per"]]
            if need > most or not most:
                return 0.0, NEVER
            wait = (need - left) / rate
            return max(0.0, left), wait if wait > CLOSE else 0.0
        count = self.counts[rule["key"], date_of(rule["per"], self.now)]
        left = max(0, most - count.held - count.used)
        if need <= left:
            return left, 0.0
        if need > most or not most:
            return left, NEVER
        soon = need <= most - count.used
        return left, 1.0 if soon else period_ends(rule["per"], self.now) - self.now

    def holders(self, rule: dict[str, Any]) -> set[str]:
        return {
            id
            for id, one in self.standing.items()
            if one.until > self.now and rule["key"] in {r["key"] for r in one.run["rules"]}
        }

    def _move(self, run: dict[str, Any], dates: dict[str, str], held: Any, used: Any) -> None:
        for rule in run["rules"]:
            hold, use = held.get(rule["of"], 0), used.get(rule["of"], 0)
            if rule["per"] in FULL_S:
                bucket = self._bucket(rule)
                bucket.left = min(rule["most"], bucket.left - hold - use)
            elif rule["of"] != "concurrent":
                count = self.counts[rule["key"], dates[rule["key"]]]
                count.held += hold
                count.used += use

    # ---- what can be asked --------------------------------------------------------------------

    def reserve(self, id: str, run: dict[str, Any]) -> tuple[int, float]:
        """Which rule stands in the way, from 1 (0: none), and for how long."""
        self.sweep(10)
        if id in self.standing or id in self.charged:
            return 0, 0.0
        waits = [self.look(rule, run["held"].get(rule["of"], 0))[1] for rule in run["rules"]]
        if NEVER in waits:
            return waits.index(NEVER) + 1, NEVER
        if any(waits):
            return waits.index(max(waits)) + 1, max(waits)
        self._stand(id, run)
        return 0, 0.0

    def _stand(self, id: str, run: dict[str, Any]) -> None:
        dates = {
            rule["key"]: date_of(rule["per"], self.now)
            for rule in run["rules"]
            if rule["per"] in ("day", "month")
        }
        self._move(run, dates, run["held"], {})
        self.standing[id] = Standing(run, dates, self.now + self.lease_s, run["used"])

    def hold(self, id: str, run: dict[str, Any]) -> None:
        if id in self.charged:
            return
        if id not in self.standing:
            self._stand(id, run)
        self.standing[id].until = self.now + self.lease_s
        self.standing[id].used = run["used"]

    def settle(self, id: str, run: dict[str, Any]) -> None:
        if id in self.standing:
            self._close(id, run["used"], run["status"])
            return
        before = self.charged.get(id)
        missing = {name: n - (before[name] if before else 0) for name, n in run["used"].items()}
        if before and not any(missing.values()):
            return
        dates = {
            rule["key"]: date_of(rule["per"], self.now)
            for rule in run["rules"]
            if rule["per"] in ("day", "month")
        }
        told = amounts(missing) | ({"requests": 0} if before else {})
        self._move(run, dates, {}, told)
        self.ledger.append((id, "correction" if before else run["status"], missing))
        self.charged[id] = run["used"]

    def _close(self, id: str, used: dict[str, int], status: str) -> None:
        one = self.standing.pop(id)
        back = {name: -amount for name, amount in one.run["held"].items()}
        self._move(one.run, one.dates, back, amounts(used))
        self.ledger.append((id, status, used))
        self.charged[id] = used

    def sweep(self, most: int) -> int:
        over = sorted((one.until, id) for id, one in self.standing.items() if one.until <= self.now)
        for _, id in over[:most]:
            self._close(id, self.standing[id].used, "lost")
        return len(over[:most])
