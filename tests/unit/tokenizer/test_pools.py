"""What each checkpoint's registered workers can take."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.common.config import Settings
from services.common.discovery import Registration, Replica
from services.common.redis import connect
from services.tokenizer.checkpoints.pools import Pools, Standing
from tests.support.waiting import until


@pytest.fixture
async def pools(redis_url: str, namespace: str) -> AsyncIterator[Pools]:
    redis = connect(redis_url)
    yield Pools(redis, Settings(namespace=namespace, lease_s=0.3))
    await redis.aclose()


def worker(id: str, digest: str = "old", **facts: str) -> Replica:
    return Replica("worker", id, "h:1", "h", 1, facts={"model": "m", "digest": digest, **facts})


def see(pools: Pools, *workers: Replica) -> None:
    pools._workers.replicas = {replica.id: replica for replica in workers}
    pools._changed([], [])


async def test_the_smallest_worker_counts_and_the_last_known_stands(pools: Pools) -> None:
    def room(*workers: Replica) -> int | None:
        see(pools, *workers)
        return pools.room("m", "old")

    large, small = worker("w1", max_model_len="300"), worker("w2", max_model_len="64")
    assert room() is None
    assert room(large) == 300
    assert room(large, small, worker("w3", "new", max_model_len="8")) == 64
    assert pools.room("m", "new") == 8
    assert room(large) == 300
    assert room(small, large) == 64
    assert room() == 64
    assert room(worker("w5"), worker("w6", max_model_len="many"), small) == 64
    pools.forget("m", "old")
    assert pools.room("m", "old") is None


async def test_the_checkpoint_that_decodes_more_stands_higher_then_the_later_one(
    pools: Pools,
) -> None:
    def chosen(*workers: Replica) -> str:
        see(pools, *workers)
        return max(("old", "new"), key=lambda digest: pools.standing("m", digest))

    def of(digest: str, id: str, began: str, role: str = "both", slots: str = "8") -> Replica:
        return worker(id, digest, began=began, role=role, max_running=slots)

    olds = [of("old", f"o{n}", f"{n}.5") for n in range(2)]
    assert chosen(*olds, of("new", "n0", "7")) == "old", "one would be crowded"
    assert chosen(*olds, of("new", "n0", "7"), of("new", "n1", "8")) == "new"
    assert chosen(olds[0], of("new", "n0", "7")) == "new"
    assert chosen(olds[0], of("new", "n0", "7", "prefill", "99")) == "old", "it cannot decode"
    assert chosen(of("new", "n0", "7", "prefill")) == "new", "better than none"
    assert chosen(of("new", "n0", "junk", slots="?"), olds[0]) == "old"
    see(pools)
    assert pools.standing("m", "old") == Standing()


async def test_the_registry_is_followed_until_it_is_stopped(
    redis_url: str, namespace: str, pools: Pools
) -> None:
    redis = connect(redis_url)
    large = Registration(redis, namespace, worker("w1", max_model_len="300"), 60)
    await large.start()
    before = asyncio.all_tasks()
    await pools.start()
    assert pools.room("m", "old") == 300
    small = Registration(redis, namespace, worker("w2", max_model_len="64"), 60)
    await small.start()
    await until(lambda: pools.room("m", "old") == 64)
    await small.stop()
    await pools.stop()
    assert asyncio.all_tasks() <= before, "nothing looks any more"
    await large.stop()
    await redis.aclose()
