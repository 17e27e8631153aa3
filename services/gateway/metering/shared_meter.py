"""The meter in Redis (meter.lua), as a gateway calls it."""

import json
from pathlib import Path
from typing import Any

from services.common.redis import Redis, Script
from services.common.script_pipe import ScriptPipe
from services.gateway.metering.run import Room, Run, Verdict

SOURCE = Path(__file__).with_name("meter.lua").read_text()

_ALONE = 8
_MEMORY_S = 3600  # for so long it is known what an ended request was charged


def root_of(namespace: str) -> str:
    """What all of its keys begin with; the braces: one slot of a Redis cluster."""
    return f"{namespace}:{{meter}}"


class SharedMeter:
    """Every call may be carried out twice, which is the same as once. Raises one of `RedisAway`."""

    def __init__(self, redis: Redis, namespace: str, lease_s: float) -> None:
        self._at_once = Script(redis, SOURCE)
        self._alone = 0  # calls on connections of their own
        self._pipe = ScriptPipe(redis, SOURCE)
        self._keys = [root_of(namespace)]
        self._bounds = (round(lease_s * 1e6), _MEMORY_S)

    async def reserve(self, run: Run) -> Verdict:
        """Holds what `run` may use, if every limit has room for it."""
        told = json.loads(await self._ask("reserve", run.id, json.dumps(run.told())))
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

    async def settle(self, run: Run) -> None:
        """Charges what it used, and what it held is free."""
        await self._call("settle", run.id, json.dumps(run.told()))

    async def release(self, run: Run) -> None:
        """What is held for it is free, and nothing charged. A `reserve` that comes later holds
        nothing."""
        await self._call("release", run.id)

    async def sweep(self, most: int) -> int:
        """Settles requests whose leases have run out; returns how many."""
        return int(await self._call("sweep", most))

    async def _ask(self, op: str, *args: Any) -> Any:
        """At the door: waits for nobody else's round trip, unless it comes in a burst, in which
        sharing them is faster."""
        if self._alone >= _ALONE:
            return await self._call(op, *args)
        self._alone += 1
        try:
            return await self._at_once(self._keys, [op, *self._bounds, *args])
        finally:
            self._alone -= 1

    async def _call(self, op: str, *args: Any) -> Any:
        return await self._pipe(self._keys, [op, *self._bounds, *args])
