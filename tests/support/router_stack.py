"""Routers between fake workers and the links of their callers, in one process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from protos import common_pb2, router_pb2, router_pb2_grpc, worker_pb2
from services.common.config import RouterSettings, Settings
from services.common.link import End, LinkClient
from services.common.packed_ids import pack
from services.common.redis import Redis, connect
from services.common.service import Host
from services.router.server import RouterService
from tests.support.fake_worker import (
    CHECKPOINT,
    MODEL,
    FakeWorker,
    Transfers,
    continuation,
)
from tests.support.transport import TRANSPORT
from tests.support.waiting import leaving_no_task, until

PROMPT = list(range(100, 300))


@dataclass
class Answered:
    """One request as its client sees it."""

    request: Any
    deltas: list[worker_pb2.TokenDelta] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [id for delta in self.deltas for id in delta.token_ids]

    async def end(self) -> End:
        async with asyncio.timeout(60):
            return await self.request.ended()

    async def whole(self) -> "Answered":
        end = await self.end()
        assert end.status.code == 0, end.status
        self.decisions = {d.subject: d for d in end.record.decisions}
        self.record = end.record
        return self

    @property
    def usage(self) -> common_pb2.Usage:
        assert self.deltas[-1].finish
        return self.deltas[-1].usage


class Stack:
    """Routers and fake workers in this process."""

    def __init__(self, redis: Redis, redis_url: str, namespace: str) -> None:
        self.redis, self.redis_url, self.namespace = redis, redis_url, namespace
        self.transfers = Transfers()
        self.workers: dict[str, FakeWorker] = {}
        self.hosts: list[Host] = []
        self.links: list[LinkClient] = []

    async def worker(self, id: str, role: str = "both", **options: Any) -> FakeWorker:
        made = FakeWorker(self.redis, self.namespace, id, role, transfers=self.transfers, **options)
        self.workers[id] = await made.start()
        return made

    async def router(self, **options: Any) -> LinkClient:
        """A started router that sees all workers, and a link to it."""
        settings = Settings(
            redis_url=self.redis_url,
            namespace=self.namespace,
            lease_s=5.0,
            router=RouterSettings(**{"worker_patience_s": 60.0, **options}),
        )
        host = Host(RouterService, settings)
        self.hosts.append(host)
        replica = await host.start()
        link = LinkClient(
            replica.address,
            "/penstock.v1.Router/Link",
            transport=TRANSPORT,
            peer_id="tokenizer-1",
        )
        self.links.append(link)
        await link.start()
        await link.wait_ready(60)

        async def sees_all() -> bool:
            seen = {w.id for w in (await self.status()).workers if w.state == "ready"}
            return seen == set(self.workers)

        await until(sees_all)
        return link

    async def status(self, host: int = -1) -> router_pb2.RouterStatus:
        replica = self.hosts[host].replica
        assert replica is not None
        async with TRANSPORT.dial(replica.address, "router") as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            return await stub.GetStatus(router_pb2.RouterStatusRequest(), timeout=10)

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        for host in self.hosts:
            await host.stop(grace_s=0)
        for worker in self.workers.values():
            await worker.stop()


def ask(
    link: LinkClient,
    prompt: list[int] = PROMPT,
    max_tokens: int = 20,
    *,
    tenant: str = "acme",
    priority: int = common_pb2.PRIORITY_NORMAL,
    model: str = MODEL,
    generated: int = 0,
    checkpoint: str = CHECKPOINT,
    timeout_s: float = 60.0,
) -> Answered:
    """`generated`: how many of the prompt's last tokens another router gave."""
    request = router_pb2.GenerateRequest(
        caller=common_pb2.Caller(request_id="r", tenant=tenant, priority=priority, weight=1),
        model=model,
        prompt_token_ids=pack(prompt),
        sampling=common_pb2.Sampling(top_p=1, seed=7, max_tokens=max_tokens),
        generated_prefix=generated,
        checkpoint=checkpoint,
    )
    deltas: list[worker_pb2.TokenDelta] = []
    opened = link.open(
        request.SerializeToString(),
        deadline=time.monotonic() + timeout_s,
        on_item=lambda payload: deltas.append(worker_pb2.TokenDelta.FromString(payload)),
    )
    return Answered(opened, deltas)


def undisturbed(prompt: list[int] = PROMPT, max_tokens: int = 20) -> list[int]:
    return continuation(prompt, max_tokens, seed=7)


@asynccontextmanager
async def stack_on(redis_url: str, namespace: str) -> AsyncIterator[Stack]:
    """Of which no task is left."""
    async with leaving_no_task():
        redis = connect(redis_url)
        made = Stack(redis, redis_url, namespace)
        try:
            yield made
        finally:
            await made.close()
            await redis.aclose()
