"""Each model's window follows what its registered workers have room for."""

import asyncio

from services.common.config import Settings
from services.common.discovery import Registration, Replica
from services.common.redis import connect
from services.tokenizer.models import Models, ServedModel
from services.tokenizer.windows import Windows
from tests.support.waiting import until


def worker(id: str, model: str = "tiny", **facts: str) -> Replica:
    return Replica("worker", id, "127.0.0.1:1", "host", 1, facts={"model": model, **facts})


async def test_the_smallest_worker_counts_and_the_last_known_stands(
    model: ServedModel, redis_url: str, namespace: str
) -> None:
    redis = connect(redis_url)
    models = Models([model])
    windows = Windows(redis, Settings(namespace=namespace, lease_s=0.3), models)

    def view(*workers: Replica) -> int:
        windows._workers.replicas = {replica.id: replica for replica in workers}
        windows._changed([], [])
        return models["tiny"].window

    large, small = worker("w1", max_model_len="300"), worker("w2", max_model_len="64")
    assert view(large) == 300
    assert view(large, small, worker("w3", "other", max_model_len="8")) == 64
    assert view(large) == 300
    assert view(small, large) == 64
    assert view() == 64
    assert view(worker("w4", max_model_len="100000")) == 512
    assert view(worker("w5"), worker("w6", max_model_len="many"), small) == 64
    await redis.aclose()


async def test_the_registry_is_followed_until_it_is_stopped(
    model: ServedModel, redis_url: str, namespace: str
) -> None:
    redis = connect(redis_url)
    models = Models([model])
    registered = Registration(redis, namespace, worker("w1", max_model_len="300"), 60)
    await registered.start()
    before = asyncio.all_tasks()
    windows = Windows(redis, Settings(namespace=namespace, lease_s=0.3), models)
    await windows.start()
    assert models["tiny"].window == 300
    small = Registration(redis, namespace, worker("w2", max_model_len="64"), 60)
    await small.start()
    await until(lambda: models["tiny"].window == 64)
    await small.stop()
    await windows.stop()
    assert asyncio.all_tasks() <= before, "nothing looks any more"
    await registered.stop()
    await redis.aclose()
