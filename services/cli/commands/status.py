"""`penstock status`: what runs, as the registry and the routers see it."""

import argparse
import asyncio
from typing import Any
from urllib.parse import urljoin

import grpc
import httpx
from rich.table import Table

from protos import router_pb2, router_pb2_grpc
from services.cli.console import console, folding_table
from services.cli.interruptible import run
from services.cli.registry import looked, settings_here
from services.common.discovery import Replica
from services.common.locks.secrets import redacted
from services.common.transport import Transport

_ASK_POLICY = ("gateway", "tokenizer", "retrieval")
_TIMEOUT_S = 5.0  # whoever has not answered by then is told so


def main(arguments: argparse.Namespace) -> int:
    return run(_main())


async def _main() -> int:
    settings = settings_here()
    registry = await looked(settings)
    serving, draining = registry.serving, registry.draining
    if not serving and not draining:
        raise RuntimeError(f"nothing is registered in Redis at {redacted(settings.redis_dsn)}")
    out = console()
    out.print(_services_table(serving, draining))
    for line in registry.unread:
        out.print(line)
    transport = Transport.of(settings, "cli")
    routers = [r for r in serving if r.service == "router"]
    for shown in await asyncio.gather(*(_seen_by(router, transport) for router in routers)):
        out.print(shown)
    if told := await _policies(serving):
        out.print(told)
    return 0


def _services_table(serving: list[Replica], draining: list[Replica]) -> Table:
    table = folding_table("service", "replica", "gRPC", "metrics", "pid", "facts", title="Replicas")
    for replica in [*(r for r in serving if r not in draining), *draining]:
        facts = ", ".join(f"{key}={value}" for key, value in replica.facts.items())
        table.add_row(
            replica.service,
            replica.id + (" (drains)" if replica in draining else ""),
            replica.address,
            replica.metrics_url,
            str(replica.pid),
            facts,
        )
    return table


async def _policies(serving: list[Replica]) -> Table | None:
    """The policies of those that ask one; None: nobody is known to have any."""
    asked = [r for r in serving if r.service in _ASK_POLICY and r.metrics_url]
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as http:
        told = await asyncio.gather(*(_policy_of(replica, http) for replica in asked))
    if not any(policy.get("file") for policy in told):
        return None
    table = folding_table("replica", "version", "rules", "fault", title="Policies")
    for replica, policy in zip(asked, told, strict=True):
        table.add_row(
            replica.id,
            policy.get("version") or "none",
            str(policy.get("rules", 0)),
            policy.get("fault") or "",
        )
    return table


async def _policy_of(replica: Replica, http: httpx.AsyncClient) -> dict[str, Any]:
    """Empty where no file is set."""
    try:
        answer = await http.get(urljoin(replica.metrics_url, "/policy"))
        told: dict[str, Any] = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        return {"fault": f"it does not say: {error}"}
    return told if told["file"] else {}


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
