"""A gateway in a process of its own, which a test may kill."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from services.common.discovery import Directory
from tests.support.gateway_rig import Rig
from tests.support.waiting import until


class AnotherGateway:
    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        self.url = url

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def another_gateway(rig: Rig) -> AsyncIterator[AnotherGateway]:
    """Beside the rig's own, with its settings, ready to serve."""
    settings = rig.settings
    told = {
        "REDIS_URL": settings.redis_dsn,
        "PENSTOCK_NAMESPACE": settings.namespace,
        "PENSTOCK_LEASE_S": str(settings.lease_s),
        "PENSTOCK_GATEWAY__PORT": "0",
        "PENSTOCK_RUNS__LEASE_S": str(settings.runs.lease_s),
        "PENSTOCK_METERING__PRICES": json.dumps(settings.metering.model_dump()["prices"]),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env={**os.environ, **told}
    )
    view = Directory(rig.redis, settings.namespace, "gateway", settings.lease_s)
    await view.start()
    own = rig.host.id

    def url() -> str:
        return next((r.facts["url"] for id, r in view.replicas.items() if id != own), "")

    async def ready() -> bool:
        async with httpx.AsyncClient() as http:
            return (await http.get(f"{gateway.url}/readyz")).status_code == 200

    gateway = AnotherGateway(process, "")
    try:
        await until(lambda: bool(url()) or process.returncode is not None, 30, "it is listed")
        gateway.url = url()
        await until(ready, 30, "it is ready")
        yield gateway
    finally:
        await gateway.kill()
        await view.stop()
