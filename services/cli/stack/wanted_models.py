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
from services.common.served_models import failures_key, wanted_key

log = logging.getLogger(__name__)

# In the same step as the write: of two commands that give one name at once, one does.
_IS_TAKEN = """
local function is_taken(name)
  local there = redis.call('HEXISTS', KEYS[1], name) + redis.call('SISMEMBER', KEYS[2], name)
  if there > 0 then return true end
  for _, spec in ipairs(redis.call('HVALS', KEYS[1])) do
    local is_json, told = pcall(cjson.decode, spec)
    local adapters = is_json and type(told) == 'table' and told.adapters
    if type(adapters) == 'table' and adapters[name] then return true end
  end
  return false
end
"""
# wanted, running, failures; the name; its spec
_ADD = f"""{_IS_TAKEN}
if is_taken(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HDEL', KEYS[3], ARGV[1])
return 1
"""
# wanted, running, failures; the model; its spec before, and after; an adapter's name; whether it
# is new: 1 or 0. Returns 0 where the spec was changed meanwhile, -1 where the name is taken.
_ADAPT = f"""{_IS_TAKEN}
if ARGV[5] == '1' and is_taken(ARGV[4]) then return -1 end
local told = redis.call('HGET', KEYS[1], ARGV[1])
if not told or told ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('HDEL', KEYS[3], ARGV[4])
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
        self._specs = wanted_key(namespace)
        self._running = f"{namespace}:{{models}}:running"
        self._proven = f"{namespace}:{{models}}:proven"
        self._failures = failures_key(namespace)
        self._keeper = f"{namespace}:{{models}}:keeper"  # is there: no model may be wanted, too
        self._keys = [self._specs, self._running, self._failures]
        self._add, self._begin = Script(redis, _ADD), Script(redis, _BEGIN)
        self._adapt = Script(redis, _ADAPT)

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
        """False: there is one of that name, or it has not ended yet, or an adapter."""
        return bool(await self._add(self._keys, [model.name, model.model_dump_json()]))

    async def remove(self, name: str) -> bool:
        """False: there is none of that name, and none that leaves or failed."""
        async with self._redis.pipeline(transaction=True) as at_once:
            at_once.hdel(self._specs, name)
            at_once.hdel(self._failures, name)
            at_once.sismember(self._running, name)
            at_once.srem(self._proven, name)
            return any((await at_once.execute())[:3])

    async def add_adapter(self, model: str, name: str, path: str) -> bool:
        """The model's workers load it. False: there is no such model, or a model or an adapter of
        that name."""
        return await self._change(model, name, {name: path})

    async def remove_adapter(self, name: str) -> bool:
        """False: there is none of that name."""
        specs = await self.all()
        model = next((spec.name for spec in specs.values() if name in spec.adapters), None)
        return model is not None and await self._change(model, name, {})

    async def _change(self, model: str, name: str, to: dict[str, str]) -> bool:
        """Has the adapters that the model has, but for `name`, and these."""
        while told := await self._redis.hget(self._specs, model):
            if (spec := _read(model, str(told))) is None:
                return False
            adapters = {n: path for n, path in spec.adapters.items() if n != name} | to
            changed = spec.model_copy(update={"adapters": adapters}).model_dump_json()
            arguments = [model, told, changed, name, int(name in to)]
            if outcome := int(await self._adapt(self._keys, arguments)):
                return outcome > 0
        return False

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
