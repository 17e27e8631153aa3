"""Why replicas did not start: told in Redis by whoever hosts them, to whoever waits for them."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from services.common.redis import Redis, RedisAway

_KEPT_S = 600
_MOST = 100  # the earliest: a replica that is started again and again tells the same


@dataclass(frozen=True)
class StartFailure:
    who: str  # as an operator would call the replica: "retrieval", "decode worker of demo"
    why: str
    log: str  # file that has more; empty where there is none

    def __str__(self) -> str:
        return f"{self.who} did not start: {self.why}" + (f"\nits log: {self.log}" * bool(self.log))


def _key(namespace: str) -> str:
    return f"{namespace}:start-failures"


async def tell(redis: Redis, namespace: str, failure: StartFailure) -> None:
    """Best effort: the failure itself is raised by the caller."""
    with suppress(*RedisAway):
        await redis.rpush(_key(namespace), json.dumps(asdict(failure)))
        await redis.ltrim(_key(namespace), 0, _MOST - 1)
        await redis.expire(_key(namespace), _KEPT_S)


async def forget(redis: Redis, namespace: str, model: str = "") -> None:
    """Before a new start, so that it does not hear of an old one's failures; of one model's workers
    alone if it is named."""
    for told in await redis.lrange(_key(namespace), 0, -1):
        if _is_of(model, StartFailure(**json.loads(told))):
            await redis.lrem(_key(namespace), 0, str(told))


async def first_told(redis: Redis, namespace: str, model: str = "") -> StartFailure | None:
    """The earliest, which later ones may follow from; of one model's workers if it is named."""
    with suppress(*RedisAway):
        for told in await redis.lrange(_key(namespace), 0, -1):
            failure = StartFailure(**json.loads(told))
            if _is_of(model, failure):
                return failure
    return None


def _is_of(model: str, failure: StartFailure) -> bool:
    return not model or failure.who.endswith(f"worker of {model}")
