"""Gateways in processes of their own, which a test may kill."""

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


async def _start(rig: Rig) -> asyncio.subprocess.Process:
    """With the rig's settings."""
    settings = rig.settings
    told = {
        "REDIS_URL": settings.redis_dsn,
        "PENSTOCK_NAMESPACE": settings.namespace,
        "PENSTOCK_BLOBS_URL": settings.blobs_url,
        "PENSTOCK_LOG_LEVEL": settings.log_level,
        "PENSTOCK_LEASE_S": str(settings.lease_s),
        "PENSTOCK_GATEWAY__PORT": "0",
        "PENSTOCK_RUNS__LEASE_S": str(settings.runs.lease_s),
        "PENSTOCK_JOBS__LEASE_S": str(settings.jobs.lease_s),
        "PENSTOCK_METERING__PRICES": json.dumps(settings.metering.model_dump()["prices"]),
        "PENSTOCK_METERING__LEASE_S": str(settings.metering.lease_s),
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env={**os.environ, **told}
    )


async def _is_ready(url: str) -> bool:
    async with httpx.AsyncClient() as http:
        return (await http.get(f"{url}/readyz")).status_code == 200


@asynccontextmanager
async def another_gateway(rig: Rig) -> AsyncIterator[AnotherGateway]:
    """Beside the rig's own, ready to serve."""
    async with gateways(rig, 1) as (processes, urls):
        yield AnotherGateway(processes[0], urls[0])


@asynccontextmanager
async def gateways(
    rig: Rig, count: int
) -> AsyncIterator[tuple[list[asyncio.subprocess.Process], list[str]]]:
    """So many beside the rig's own, ready to serve: their processes and URLs, in any order."""
    settings = rig.settings
    processes = [await _start(rig) for _ in range(count)]
    view = Directory(rig.redis, settings.namespace, "gateway", settings.lease_s)
    await view.start()
    own = rig.host.id

    def urls() -> list[str]:
        return [r.facts["url"] for id, r in view.replicas.items() if id != own]

    async def all_ready() -> bool:
        return all([await _is_ready(url) for url in urls()])

    def ended() -> bool:
        return any(process.returncode is not None for process in processes)

    try:
        await until(lambda: len(urls()) == count or ended(), 60, "they are listed")
        await until(all_ready, 60, "they are ready")
        yield processes, urls()
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await view.stop()
