"""Whether another Penstock runs in this one's namespace, on a Redis that both were given."""

import asyncio
import time

from services.cli.ground.ground import Report
from services.common.config import Settings
from services.common.discovery import SERVICES, Directory
from services.common.locks.secrets import redacted
from services.common.redis import Redis, connect

_LEASES = 1.5  # how many a replica that was lost may still be registered
_LOOK_EVERY_S = 0.1


async def check_alone(settings: Settings, report: Report) -> None:
    """Raises RuntimeError when one does, which two stacks of one machine each cannot share: each
    has models of its own, and the one that was there would end. Raises ConnectionError while Redis
    is away."""
    redis = connect(settings.redis_dsn)
    until = time.monotonic() + _LEASES * settings.lease_s
    said = False
    try:
        while others := await _registered(redis, settings):
            if time.monotonic() > until:
                raise RuntimeError(
                    f"another Penstock of the namespace {settings.namespace!r} runs on Redis at "
                    f"{redacted(settings.redis_dsn)} ({', '.join(others[:3])}): end it, "
                    "or give this one a PENSTOCK_NAMESPACE of its own"
                )
            if not said:
                report(f"{others[0]} is registered: lost, or another Penstock's?")
                said = True
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        await redis.aclose()


async def _registered(redis: Redis, settings: Settings) -> list[str]:
    """By a fresh look: a view keeps for a lease who has gone."""
    views = [Directory(redis, settings.namespace, name, settings.lease_s) for name in SERVICES]
    await asyncio.gather(*(view.refresh() for view in views))
    if not all(view.reachable for view in views):
        raise ConnectionError("Redis is away: who else runs on it is not known")
    return [id for view in views for id in view.replicas]
