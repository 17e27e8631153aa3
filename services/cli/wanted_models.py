"""Which models an install is to serve: written by `penstock models`, read by the stack that applies
it. In Redis, so that neither needs to reach the other, and a stack that is started anew in place of
a lost one has them, too (decision 0015)."""

from services.common.config import ModelSpec
from services.common.redis import Redis


class WantedModels:
    """Calls raise one of `RedisAway`."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self._specs = f"{namespace}:{{models}}:wanted"  # name → ModelSpec as JSON
        self._leaving = f"{namespace}:{{models}}:leaving"  # their workers have not ended yet
        self._failures = f"{namespace}:{{models}}:failures"  # name → why it was given up

    async def all(self) -> dict[str, ModelSpec]:
        stored = await self._redis.hgetall(self._specs)
        return {str(name): ModelSpec.model_validate_json(spec) for name, spec in stored.items()}

    async def start_with(self, models: list[ModelSpec]) -> None:
        """In place of whatever was wanted before."""
        async with self._redis.pipeline(transaction=True) as both:
            both.delete(self._specs, self._leaving, self._failures)
            for model in models:
                both.hset(self._specs, model.name, model.model_dump_json())
            await both.execute()

    async def add(self, model: ModelSpec) -> bool:
        """False: there is one of that name, or it has not ended yet."""
        await self._redis.hdel(self._failures, model.name)
        if await self.leaves(model.name):
            return False
        return bool(await self._redis.hsetnx(self._specs, model.name, model.model_dump_json()))

    async def remove(self, name: str) -> bool:
        """False: there is none of that name."""
        async with self._redis.pipeline(transaction=True) as both:
            both.sadd(self._leaving, name)
            both.hdel(self._specs, name)
            _, there = await both.execute()
        if not there:
            await self.removed(name)
        return bool(there)

    async def leaves(self, name: str) -> bool:
        """Whether it was removed and has not ended yet."""
        return bool(await self._redis.sismember(self._leaving, name))

    async def removed(self, name: str) -> None:
        """Nothing of it runs any more."""
        await self._redis.srem(self._leaving, name)

    async def give_up(self, name: str, why: str) -> None:
        """It cannot be served: whoever wanted it is told."""
        await self._redis.hset(self._failures, name, why)
        await self._redis.hdel(self._specs, name)

    async def failure(self, name: str) -> str:
        """Why it was given up; empty: it was not."""
        return str(await self._redis.hget(self._failures, name) or "")
