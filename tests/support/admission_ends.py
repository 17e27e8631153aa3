"""Routers' ends of admission on a real Redis, for its tests."""

import asyncio
import uuid

import grpc
import pytest

from services.common.config import RouterSettings, Settings
from services.common.errors import PenstockError
from services.common.redis import Redis, connect
from services.router.admission import Admission, Ticket
from tests.support.waiting import until, within


class Routers:
    """Admission ends of several routers, with a capacity of each model that tests set."""

    def __init__(self, url: str, namespace: str, **options: object) -> None:
        self.capacity = 1
        self.url, self.namespace = url, namespace
        self.options = options
        self.ends: list[Admission] = []
        self.clients: list[Redis] = []

    async def add(self) -> Admission:
        client = connect(self.url)
        self.clients.append(client)
        options = RouterSettings(**self.options)  # type: ignore[arg-type]
        end = Admission(
            client,
            Settings(redis_url=self.url, namespace=self.namespace, router=options),
            f"router-{len(self.ends)}",
            lambda model: self.capacity,
            lambda: len(self.ends),
        )
        await end.start()
        self.ends.append(end)
        return end

    async def close(self) -> None:
        for end in self.ends:
            await end.stop()
        for client in self.clients:
            await client.aclose()

    async def listening(self, end: Admission) -> bool:
        """Whether it would hear what other routers' calls decide."""
        channel = end._shared.channel(end._shared._router_id)
        return bool((await self.clients[0].pubsub_numsub(channel))[0][1] == 1)


def ticket(tenant: str = "t", lane: int = 2, cost: float = 10, model: str = "m") -> Ticket:
    return Ticket(uuid.uuid4().hex, model, tenant, lane, cost, 1.0)


async def queued(end: Admission, held: int, waiting: int, model: str = "m") -> None:
    """Returns when so many hold a slot and wait, over all routers."""

    async def reached() -> bool:
        return await end.status([model]) == (held, waiting)

    await until(reached, what=f"{held} held, {waiting} waiting")


async def refusal(waiting: "asyncio.Task[None]") -> tuple[str, float]:
    """Why it is refused, and after how many seconds it may come again."""
    with pytest.raises(PenstockError) as refused:
        await within(5, waiting)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return refused.value.reason, refused.value.retry_after_s
