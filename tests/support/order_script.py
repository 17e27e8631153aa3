"""order.lua as a router calls it, its clock ahead where a test wants it."""

import json
import uuid

from redis import Redis as BlockingRedis

from services.router.admission.shared_order import SOURCE

NEVER = 1e6  # seconds
CLOCK = "call('TIME')"
LATER = "{CLOCK}; time[1] = time[1] + (call('GET', KEYS[1] .. '-later') or 0)".replace(
    "{CLOCK}", CLOCK
)
assert SOURCE.count(CLOCK) == 1


class Script:
    """Calls order.lua directly, as any router."""

    def __init__(
        self,
        url: str,
        ageing_s: float = NEVER,
        lease_s: float = NEVER,
        patience_s: float = 0.0,
        recalls: int = 0,
    ) -> None:
        self.redis = BlockingRedis.from_url(url, decode_responses=True)
        self._run = self.redis.register_script(SOURCE.replace(CLOCK, LATER))
        self.root = f"test-{uuid.uuid4().hex}:{{admission:m}}"
        self.options = [lease_s, ageing_s, patience_s, recalls]

    def call(self, capacity: int, op: str, *args: object, router: str = "r1"):
        """(granted, displaced, recalled, the op's first and second result)"""
        common = [op, router, f"{self.root}:word:", capacity, *self.options]
        said = json.loads(self._run([self.root], [*common, *args]))
        *lists, advice, self.held, self.waiting, first, second = said
        granted, displaced, recalled = map(list, lists)
        self.advice_s = float(advice)
        return granted, displaced, recalled, first, second

    def enter(
        self,
        capacity,
        id,
        tenant,
        lane=2,
        work=1.0,
        waited=0.0,
        limit=1000,
        weight=1.0,
        router="r1",
    ):
        """(state, how many waited, granted, displaced, recalled)"""
        facts = [id, tenant, lane, work, weight, 0, waited, limit]
        *lists, state, before = self.call(capacity, "enter", *facts, router=router)
        return state, before, *lists

    def leave(self, capacity, *ids, missed=0.0):
        """What was granted."""
        leavers = [part for id in ids for part in (id, missed)]
        return self.call(capacity, "tell", 0, *leavers)[0]

    def give_back(self, capacity, id, missed=0.0, left=1.0, waited=0.0, router="r1"):
        """(state, granted, recalled)"""
        reply = self.call(capacity, "yield", id, missed, left, waited, router=router)
        return reply[3], reply[0], reply[2]

    def renew(self, capacity, held=(), waiting=(), router="r1"):
        """(granted, recalled, lost, unknown)"""
        reply = self.call(capacity, "renew", len(held), *held, *waiting, router=router)
        return reply[0], reply[2], reply[3] or [], reply[4] or []

    def status(self, capacity) -> list[int]:
        return list(self.call(capacity, "status")[3:])

    def pass_time(self, seconds: float) -> None:
        """From here on it is so much later."""
        self.redis.incrbyfloat(f"{self.root}-later", seconds)

    def lapse(self, id: str) -> None:
        """Its lease is over, as if its router had been silent for so long."""
        for key in ("held", "waiting"):
            self.redis.zadd(f"{self.root}:{key}", {id: 1}, xx=True)

    def tenants(self) -> dict[str, int]:
        """How many requests of each wait, as the script counts them."""
        counts = self.redis.zrange(f"{self.root}:tenants", 0, -1, withscores=True)
        return {tenant: int(count) for tenant, count in counts}

    def keys(self) -> set[str]:
        return {key[len(self.root) + 1 :] for key in self.redis.keys(f"{self.root}:*")}

    def close(self) -> None:
        for key in self.redis.keys(f"{self.root}*"):
            self.redis.delete(key)
        self.redis.close()


KEYS = [
    *("clock", "finish", "entries", "held", "slots", "seats", "shares", "asked", "waiting", "line"),
    *("tenants", "since", "lift", "lane:1", "lane:2", "lane:3", "lane:4", "lane:5", "lane:6"),
]
