"""What is registered in Redis, for the commands."""

import asyncio

from pydantic import SecretStr

from services.cli.running import find_running
from services.common.config import Settings
from services.common.discovery import DRAINING, SERVICES, Directory, Replica
from services.common.redis import connect
from services.common.secrets import redacted

_TIMEOUT_S = 5.0  # whoever has not answered by then is told so


def settings_here() -> Settings:
    """Those of the environment, with the registry of the Penstock that runs here, if any."""
    settings = Settings()
    running = find_running(settings)
    if running is not None and "redis_url" not in settings.model_fields_set:
        settings.redis_url = SecretStr(running.redis_url)
        settings.namespace = running.namespace
    return settings


async def registered(settings: Settings) -> tuple[list[Replica], list[Replica]]:
    """The replicas that serve, and those that drain. Raises RuntimeError when there is no registry
    to look into."""
    redis = connect(settings.redis_dsn)
    views = [
        Directory(redis, settings.namespace, s, settings.lease_s) for s in (*SERVICES, DRAINING)
    ]
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await asyncio.gather(*(view.refresh() for view in views))
        reachable = all(view.reachable for view in views)
    except TimeoutError:
        reachable = False
    finally:
        await redis.aclose()
    if not reachable:
        raise RuntimeError(_nothing(settings))
    *serving, draining = (list(view.replicas.values()) for view in views)
    return [replica for replicas in serving for replica in replicas], draining


def _nothing(settings: Settings) -> str:
    url = redacted(settings.redis_dsn)
    if find_running(settings) is None:
        return (
            f"no Penstock runs with the data directory {settings.data_dir}, and Redis at {url} "
            "cannot be reached; start one with `penstock up`"
        )
    return f"no registry: Redis at {url} cannot be reached"
