"""Why replicas did not start: told in Redis by whoever hosts them, to whoever waits for them."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from services.common.redis import Redis, RedisAway

_KEPT_S = 600


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
        await redis.expire(_key(namespace), _KEPT_S)


async def forget(redis: Redis, namespace: str) -> None:
    """Before a new start, so that it does not hear of an old one's failures."""
    await redis.delete(_key(namespace))


async def first_told(redis: Redis, namespace: str) -> StartFailure | None:
    """The earliest, which later ones may follow from."""
    with suppress(*RedisAway):
        told = await redis.lindex(_key(namespace), 0)
        if told is not None:
            return StartFailure(**json.loads(told))
    return None
