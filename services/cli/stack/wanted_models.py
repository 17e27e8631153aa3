"""Which models an install is to serve: written by `penstock models`, read by the stack that applies
it. In Redis, so that neither needs to reach the other, and a stack that is started anew in place of
a lost one has them, too (decision 0015).

Commands write what is wanted, and the keeper alone what runs. That a model leaves is no third thing
to be kept true: it runs and is not wanted.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from services.common.config import ModelSpec
from services.common.redis import Redis, Script

log = logging.getLogger(__name__)

# wanted, running, failures; the name; its spec
_ADD = """
local there = redis.call('HEXISTS', KEYS[1], ARGV[1]) + redis.call('SISMEMBER', KEYS[2], ARGV[1])
if there > 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HDEL', KEYS[3], ARGV[1])
return 1
"""
_BEGIN = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""


@dataclass(frozen=True)
class Look:
    """What one look found."""

    keeper: str  # who makes it so; empty: nobody said yet what is wanted, or Redis has lost it
    specs: dict[str, ModelSpec]  # wanted
    odd: frozenset[str]  # names with something that is no model: they stay as they are
    running: frozenset[str]  # their workers run, start or end
    proven: frozenset[str]  # were served once
    failures: dict[str, str]  # why one is not served: given up, or wanted and tried again

    def leaves(self, name: str) -> bool:
        """Whether it was removed and has not ended yet."""
        return name in self.running and name not in self.specs


class WantedModels:
    """Calls raise one of `RedisAway`."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self._specs = f"{namespace}:{{models}}:wanted"  # name → ModelSpec as JSON
        self._running = f"{namespace}:{{models}}:running"
        self._proven = f"{namespace}:{{models}}:proven"
        self._failures = f"{namespace}:{{models}}:failures"  # name → why
        self._keeper = f"{namespace}:{{models}}:keeper"  # is there: no model may be wanted, too
        self._keys = [self._specs, self._running, self._failures]
        self._add, self._begin = Script(redis, _ADD), Script(redis, _BEGIN)

    async def look(self) -> Look:
        async with self._redis.pipeline(transaction=True) as at_once:
            at_once.hgetall(self._specs)
            at_once.smembers(self._running)
            at_once.smembers(self._proven)
            at_once.hgetall(self._failures)
            at_once.get(self._keeper)
            stored, running, proven, failures, keeper = await at_once.execute()
        specs = {name: _read(name, spec) for name, spec in stored.items()}
        return Look(
            keeper or "",
            {name: spec for name, spec in specs.items() if spec is not None},
            frozenset(name for name, spec in specs.items() if spec is None),
            frozenset(running),
            frozenset(proven),
            failures,
        )

    async def all(self) -> dict[str, ModelSpec]:
        return (await self.look()).specs

    async def start_with(self, models: Iterable[ModelSpec], keeper: str) -> None:
        """In place of whatever was wanted before, and of who kept it. None of them is ever given
        up."""
        async with self._redis.pipeline(transaction=True) as at_once:
            at_once.delete(self._specs, self._failures, self._proven)
            at_once.set(self._keeper, keeper)
            for model in models:
                at_once.hset(self._specs, model.name, model.model_dump_json())
                at_once.sadd(self._proven, model.name)
            await at_once.execute()

    async def add(self, model: ModelSpec) -> bool:
        """False: there is one of that name, or it has not ended yet."""
        return bool(await self._add(self._keys, [model.name, model.model_dump_json()]))

    async def remove(self, name: str) -> bool:
        """False: there is none of that name, and none that leaves or failed."""
        async with self._redis.pipeline(transaction=True) as at_once:
            at_once.hdel(self._specs, name)
            at_once.hdel(self._failures, name)
            at_once.sismember(self._running, name)
            at_once.srem(self._proven, name)
            return any((await at_once.execute())[:3])

    # The keeper's

    async def keep(self, keeper: str) -> None:
        """In place of another one, what is wanted as it is."""
        await self._redis.set(self._keeper, keeper)

    async def runs(self, names: Iterable[str]) -> None:
        """These and no others."""
        async with self._redis.pipeline(transaction=True) as at_once:
            at_once.delete(self._running)
            for name in names:
                at_once.sadd(self._running, name)
            await at_once.execute()

    async def begin(self, name: str) -> bool:
        """It runs from now on, unless it is not wanted any more (False)."""
        return bool(await self._begin(self._keys, [name]))

    async def served(self, name: str) -> None:
        async with self._redis.pipeline(transaction=True) as at_once:
            at_once.sadd(self._proven, name)
            at_once.hdel(self._failures, name)
            await at_once.execute()

    async def failed(self, name: str, why: str) -> None:
        """It is not served; it stays wanted, and is tried again."""
        await self._redis.hset(self._failures, name, why)

    async def give_up(self, name: str, why: str) -> None:
        """It cannot be served: whoever wanted it is told."""
        async with self._redis.pipeline(transaction=True) as at_once:
            at_once.hset(self._failures, name, why)
            at_once.hdel(self._specs, name)
            await at_once.execute()

    async def ended(self, name: str) -> None:
        """Nothing of it runs any more."""
        await self._redis.srem(self._running, name)


def _read(name: str, spec: str) -> ModelSpec | None:
    try:
        return ModelSpec.model_validate_json(spec)
    except ValueError:
        log.warning("what is wanted of %.100r is no model", name)
        return None
