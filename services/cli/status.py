"""`penstock status`: what runs, as the registry and the routers see it."""

import argparse
import asyncio

import grpc
from rich.table import Table

from protos import router_pb2, router_pb2_grpc
from services.cli.console import console, folding_table
from services.cli.running import find_running
from services.common.config import Settings
from services.common.discovery import Directory, Replica
from services.common.redis import connect
from services.common.secrets import redacted
from services.common.transport import Transport

_TIMEOUT_S = 5.0  # whoever has not answered by then is told so
_SERVICES = ("gateway", "retrieval", "tokenizer", "router", "worker")


def main(arguments: argparse.Namespace) -> int:
    return asyncio.run(_main())


async def _main() -> int:
    settings = Settings()
    running = find_running(settings)
    if running is not None and "redis_url" not in settings.model_fields_set:
        settings.redis_url, settings.namespace = running.redis_url, running.namespace
    replicas = await _registered(settings)
    if replicas is None and running is None:
        raise RuntimeError(
            f"no Penstock runs with the data directory {settings.data_dir}, and Redis at "
            f"{redacted(settings.redis_url)} cannot be reached; start one with `penstock up`"
        )
    if replicas is None:
        raise RuntimeError(
            f"no registry: Redis at {redacted(settings.redis_url)} cannot be reached"
        )
    if not replicas:
        raise RuntimeError(f"nothing is registered in Redis at {redacted(settings.redis_url)}")
    out = console()
    out.print(_services_table(replicas))
    transport = Transport.of(settings, "cli")
    routers = [r for r in replicas if r.service == "router"]
    for shown in await asyncio.gather(*(_seen_by(router, transport) for router in routers)):
        out.print(shown)
    return 0


async def _registered(settings: Settings) -> list[Replica] | None:
    """None: Redis gives no answer in time."""
    redis = connect(settings.redis_url)
    views = [Directory(redis, settings.namespace, s, settings.lease_s) for s in _SERVICES]
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await asyncio.gather(*(view.refresh() for view in views))
    except TimeoutError:
        return None
    finally:
        await redis.aclose()
    if not all(view.reachable for view in views):
        return None
    return [replica for view in views for replica in view.replicas.values()]


def _services_table(replicas: list[Replica]) -> Table:
    table = folding_table("service", "replica", "gRPC", "metrics", "pid", "facts", title="Replicas")
    for replica in replicas:
        facts = ", ".join(f"{key}={value}" for key, value in replica.facts.items())
        table.add_row(
            replica.service,
            replica.id,
            replica.address,
            replica.metrics_url,
            str(replica.pid),
            facts,
        )
    return table


async def _seen_by(router: Replica, transport: Transport) -> Table | str:
    """The workers as the router sees them, or that it does not answer in time."""
    async with transport.dial(router.address, "router") as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        try:
            seen = await stub.GetStatus(router_pb2.RouterStatusRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return f"{router.id} does not answer: {error.code().name}: {error.details()}"
    table = folding_table(
        "worker",
        "role",
        "model",
        "state",
        "breaker",
        "running",
        "waiting",
        "KV blocks",
        "KV used",
        "steps",
        title=f"Workers, seen by {router.id}",
        caption=f"{seen.admitted} of {seen.capacity} slots in use, {seen.queued} requests wait",
    )
    for worker in seen.workers:
        used = 1 - worker.free_blocks / worker.total_blocks if worker.total_blocks else 0.0
        table.add_row(
            worker.id,
            worker.role,
            worker.model,
            worker.state,
            worker.breaker,
            str(worker.running),
            str(worker.waiting),
            str(worker.total_blocks),
            f"{used:.0%}",
            str(worker.steps),
        )
    return table
