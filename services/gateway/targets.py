"""Where all replicas of this install tell their metrics, as Prometheus' http_sd asks for it.

scrape_configs:
  - job_name: penstock
    http_sd_configs: [{url: "http://GATEWAY:METRICS_PORT/targets"}]
"""

import asyncio
from typing import Any
from urllib.parse import urlsplit

from services.common.config import Settings
from services.common.discovery import DRAINING, SERVICES, Directory, Replica
from services.common.errors import unavailable
from services.common.redis import Redis


class Targets:
    """Looks into the registry when it is asked; while Redis is away the last view stands."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._views = [
            Directory(redis, settings.namespace, name, settings.lease_s)
            for name in (*SERVICES, DRAINING)
        ]

    async def page(self) -> list[dict[str, Any]]:
        """Raises UNAVAILABLE when the registry could never be read: Prometheus keeps the list that
        it has, an empty one would end the scraping."""
        await asyncio.gather(*(view.refresh() for view in self._views))
        replicas = [replica for view in self._views for replica in view.replicas.values()]
        if not replicas:
            raise unavailable("Redis is away", stage="gateway", reason="registry_away")
        return [_target(replica) for replica in replicas if replica.metrics_url]


def _target(replica: Replica) -> dict[str, Any]:
    url = urlsplit(replica.metrics_url)
    labels = {"service": replica.service, "replica": replica.id, "__metrics_path__": url.path}
    return {"targets": [url.netloc], "labels": labels}
