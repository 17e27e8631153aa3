"""The ledger: one entry for each request that ended, in a Redis Stream (meter.lua writes it).

Entries of one request id add up to what it was charged: a request of a gateway that was cut off may
have a "lost" one and a "correction".
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from decimal import Decimal
from typing import cast

from services.common.redis import Redis
from services.gateway.metering.prices import NANO
from services.gateway.metering.shared_meter import root_of

_AT_ONCE = 1000


@dataclass(frozen=True)
class Entry:
    """What a request was charged, or what was missing of it."""

    entry: str  # its id in the stream: milliseconds since 1970, a dash, a number
    id: str  # of the request
    status: str
    """ok, refused, limited, failed, cancelled; lost: its gateway was, and this is what it told
    last; correction: what was missing."""
    tenant: str
    user: str
    model: str
    tier: str
    route: str
    prompt: int
    cached: int
    output: int
    nanos: int

    @property
    def time_s(self) -> float:
        """Unix time of its end."""
        return int(self.entry.partition("-")[0]) / 1000

    @property
    def cost(self) -> Decimal:
        return Decimal(self.nanos) / NANO


class Ledger:
    """Raises one of `RedisAway`."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self._key = f"{root_of(namespace)}:ledger"

    async def entries(
        self, since_s: float = 0.0, until_s: float | None = None
    ) -> AsyncIterator[Entry]:
        """From Unix time `since_s` on, before `until_s`, oldest first."""
        at = f"{max(0, round(since_s * 1000))}"
        end = "+" if until_s is None else f"({max(1, round(until_s * 1000))}-0"
        while True:
            found = await self._redis.xrange(self._key, at, end, count=_AT_ONCE)
            some = cast(list[tuple[str, dict[str, str]]], found)
            for id, fields in some:
                yield _entry(id, fields)
            if len(some) < _AT_ONCE:
                return
            at = f"({some[-1][0]}"

    async def remove(self, through: str) -> int:
        """Takes out all entries up to this one; returns how many."""
        ms, _, number = through.partition("-")
        after = f"{ms}-{int(number) + 1}"
        return int(await self._redis.xtrim(self._key, minid=after, approximate=False))

    async def trim(self, kept_s: float, most: int) -> int:
        """Takes out what is older, and then the oldest of more than `most` (both loosely, by whole
        nodes of the stream); returns how many of the latter."""
        oldest = round((time.time() - kept_s) * 1000)
        await self._redis.xtrim(self._key, minid=max(0, oldest), approximate=True)
        return int(await self._redis.xtrim(self._key, maxlen=most, approximate=True))


def _entry(id: str, fields: dict[str, str]) -> Entry:
    return Entry(
        entry=id,
        id=fields["id"],
        status=fields["status"],
        tenant=fields["tenant"],
        user=fields["user"],
        model=fields["model"],
        tier=fields["tier"],
        route=fields["route"],
        prompt=int(fields["prompt"]),
        cached=int(fields["cached"]),
        output=int(fields["output"]),
        nanos=int(fields["cost"]),
    )
