"""What a router tells of itself: the workers as it sees them, slots, and whether it is well."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from protos import router_pb2, worker_pb2
from services.common.config import Settings
from services.common.errors import PenstockError
from services.common.link import LinkState
from services.common.redis import connect
from services.common.served_models import Checkpoint, entry, forget
from services.common.telemetry.telemetry import Telemetry
from services.router import metrics
from services.router.server import RouterService
from tests.support.admission_ends import ticket
from tests.support.scripted_workers import Pool
from tests.support.transport import TRANSPORT
from tests.support.waiting import until, within


@pytest.fixture
async def service(redis_url: str, namespace: str) -> AsyncIterator[RouterService]:
    """With scripted workers, and not started."""
    redis = connect(redis_url)
    settings = Settings(redis_url=redis_url, namespace=namespace)
    made = RouterService(settings, redis, Telemetry("router", "r"), "r")
    yield made
    await redis.aclose()


async def test_a_workers_status_is_what_it_last_told(service: RouterService) -> None:
    pool = Pool()
    pool.workers = service._workers
    peer = pool.peer("w1", "decode", max_running=4)
    cast(Any, peer.link).vitals.steps = 9
    load = worker_pb2.Load(waiting=1, running=2, free_blocks=3, total_blocks=5)
    pool.tell(peer, load=load, events=[(True, [bytes([n]) * 16 for n in range(7)])])
    other = pool.peer("w2", "prefill", "another", max_running=8)
    cast(Any, other.link).state = LinkState.DRAINING
    service._workers._of(other).breaker.began().lost()
    status = await service.status()
    first, second = status.workers
    assert first == router_pb2.WorkerStatus(
        id="w1",
        address="127.0.0.1:1",
        role="decode",
        model="m",
        state="ready",
        waiting=1,
        running=2,
        free_blocks=3,
        total_blocks=5,
        steps=9,
        known_blocks=7,
        breaker="closed",
    )
    told = (second.id, second.model, second.role, second.state, second.breaker)
    assert told == ("w2", "another", "prefill", "draining", "open")
    assert (status.queued, status.admitted, status.capacity) == (0, 0, 4), "it takes none"
    cast(Any, other.link).state = LinkState.READY
    assert (await service.status()).capacity == 12, "of both models"
    (sample,) = next(iter(metrics.breakers_open.collect())).samples
    assert sample.value == 1


async def test_a_router_is_ill_when_its_admission_has_stopped_and_ends_all_that_it_began(
    service: RouterService,
) -> None:
    before = asyncio.all_tasks()
    await service.start(TRANSPORT.server())
    service.check()
    (renewal,) = (t for t in asyncio.all_tasks() if t.get_name() == "admission renewal")
    renewal.cancel()
    await asyncio.wait([renewal])
    with pytest.raises(RuntimeError, match="admission renewal has ended"):
        service.check()
    await service.stop()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_when_a_model_is_removed_what_waits_for_it_hears_of_it(
    service: RouterService, redis_url: str
) -> None:
    redis = connect(redis_url)
    worker = entry(redis, service.settings, Checkpoint("m", "d", "t", "/m"))
    await worker.start()
    await service._models.start()
    await service._admission.start()
    waiting = asyncio.create_task(service._admission.admit(ticket()))
    await until(lambda: service._admission.waiting("m"))
    await forget(redis, service.settings, lambda one: one.model == "m")
    with pytest.raises(PenstockError, match="the model 'm' does not exist"):
        await within(5, waiting)
    await service._models.stop()
    await service._admission.stop()
    await worker.stop()
    await redis.aclose()
