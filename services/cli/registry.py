"""What is registered in Redis, for the commands."""

import asyncio
from contextlib import suppress

from pydantic import SecretStr

from services.cli.running import Running, find_running
from services.common.config import Settings
from services.common.discovery import DRAINING, SERVICES, Directory, Replica
from services.common.locks.secrets import redacted
from services.common.redis import connect
from services.common.served_models import READING

_TIMEOUT_S = 5.0  # whoever has not answered by then is told so


def settings_here() -> Settings:
    """Those of the environment, with the registry of the Penstock that runs here, if any."""
    settings = Settings()
    point_to_running(settings)
    return settings


def point_to_running(settings: Settings) -> Running | None:
    """Makes the registry that of the Penstock that runs with their data directory, and returns
    that one; unless they name a Redis themselves."""
    running = find_running(settings)
    if running is not None and "redis_url" not in settings.model_fields_set:
        settings.redis_url = SecretStr(running.redis_url)
        settings.namespace = running.namespace
    return running


class Registry:
    """What was registered at the last look; while Redis is away, at the one before."""

    def __init__(self, settings: Settings) -> None:
        self.redis = connect(settings.redis_dsn)
        self._views = {
            name: Directory(self.redis, settings.namespace, name, settings.lease_s)
            for name in (*SERVICES, DRAINING, READING)
        }

    async def look(self, within_s: float = _TIMEOUT_S) -> bool:
        """Looks once; False when Redis gives no answer in time."""
        views = self._views.values()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(view.refresh() for view in views))
            return all(view.reachable for view in views)
        return False

    @property
    def serving(self) -> list[Replica]:
        """In the order of a request's way."""
        return [r for service in SERVICES for r in self._views[service].replicas.values()]

    @property
    def draining(self) -> list[Replica]:
        """Some of them may be just in between, and still serve."""
        return list(self._views[DRAINING].replicas.values())

    @property
    def unread(self) -> list[str]:
        """Which tokenizer cannot read which model, and why."""
        return [
            f"{tokenizer.id} has not read {model}: {why}"
            for tokenizer in self._views[READING].replicas.values()
            for model, why in tokenizer.facts.items()
            if why
        ]

    async def close(self) -> None:
        await self.redis.aclose()


async def looked(settings: Settings) -> Registry:
    """The registry after one look. Raises RuntimeError when there is none to look into."""
    registry = Registry(settings)
    try:
        if not await registry.look():
            raise RuntimeError(_nothing(settings))
        return registry
    finally:
        await registry.close()


def _nothing(settings: Settings) -> str:
    url = redacted(settings.redis_dsn)
    if find_running(settings) is None:
        return (
            f"no Penstock runs with the data directory {settings.data_dir}, and Redis at {url} "
            "cannot be reached; start one with `penstock up`"
        )
    return f"no registry: Redis at {url} cannot be reached"
