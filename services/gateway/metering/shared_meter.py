"""The meter in Redis (meter.lua), as a gateway calls it."""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.redis import Redis, RedisAway
from services.common.script_line import ScriptLine
from services.gateway import metrics
from services.gateway.metering.run import Room, Run, Verdict

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("meter.lua").read_text()

_MEMORY_S = 3600  # for so long it is known what an ended request was charged


def root_of(namespace: str) -> str:
    """What all of its keys begin with; the braces: one slot of a Redis cluster."""
    return f"{namespace}:{{meter}}"


class SharedMeter:
    """Every call may be carried out twice, which is the same as once. Raises one of `RedisAway`, no
    later than `patience_s`."""

    def __init__(self, redis: Redis, namespace: str, lease_s: float, patience_s: float) -> None:
        self._line = ScriptLine(redis, SOURCE, patience_s)
        self._keys = [root_of(namespace)]
        self._bounds = (round(lease_s * 1e6), _MEMORY_S)
        self.away = False
        """Redis did not answer. Nobody asks until upkeep has told it of all that runs here: else
        what runs on would be let in beside as many others, and each request would find it out
        anew."""

    async def reserve(self, run: Run) -> Verdict:
        """Holds what `run` may use, if every limit has room for it."""
        told = json.loads(await self._call("reserve", run.id, json.dumps(run.told())))
        metrics.lapsed.inc(told["swept"])
        rooms = zip(run.bounds, told["rules"] or (), strict=True)
        return Verdict(
            tuple(Room(bound, left, reset / 1e6) for bound, (left, reset) in rooms),
            None if told["granted"] else run.bounds[told["rule"] - 1],
            None if told["wait"] < 0 else told["wait"] / 1e6,
        )

    async def hold(self, run: Run) -> None:
        """Renews its lease, or holds what it may use whether there is room or not; what it used so
        far is what it is charged should nothing be heard of it again."""
        await self._call("hold", run.id, json.dumps(run.told()))

    async def hold_all(self, runs: Sequence[Run]) -> None:
        """Renews all of their leases."""
        for error in await asyncio.gather(*map(self.hold, runs), return_exceptions=True):
            if isinstance(error, RedisAway):
                raise error

    async def settle(self, run: Run) -> None:
        """Charges what it used, and what it held is free."""
        await self._call("settle", run.id, json.dumps(run.told()))

    async def release(self, run: Run) -> None:
        """What its attempt reserved is free, and nothing charged. If its `reserve` comes later,
        that holds nothing."""
        await self._call("release", run.id, json.dumps({"attempt": run.attempt}))

    async def sweep(self, most: int) -> tuple[int, list[str]]:
        """Settles requests whose leases have run out. Returns how many, and the ids of those that
        could not be: their reservations cannot be read, and are set aside."""
        settled, aside = await self._call("sweep", most)
        metrics.lapsed.inc(settled)
        return int(settled), list(aside)

    async def _call(self, op: str, *args: Any) -> Any:
        try:
            return await self._line(self._keys, [op, *self._bounds, *args])
        except RedisAway as error:
            if not self.away:
                log.warning("Redis is away: %s: %s", type(error).__name__, error)
            self.away = True
            raise
