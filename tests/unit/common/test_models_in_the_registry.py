"""Served models in the registry: who says so, how long it is remembered, who is told."""

from collections.abc import AsyncIterator

import pytest

from services.common.config import Settings
from services.common.discovery import Registration, Replica
from services.common.redis import Redis, RedisAway, connect
from services.common.served_models import Checkpoint, ServedModels, entry, forget, listed
from tests.support.waiting import until


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def settings(redis_url: str, namespace: str) -> Settings:
    return Settings(redis_url=redis_url, namespace=namespace, lease_s=0.6, model_memory_s=3600)


def checkpoint(name: str, digest: str = "d", path: str = "/m") -> Checkpoint:
    return Checkpoint(name, digest, "t", path)


async def test_what_its_worker_told_outlives_it_until_it_is_forgotten(
    redis: Redis, settings: Settings
) -> None:
    """A path that another worker has elsewhere is told, too, and another checkpoint is another."""
    changes: list[dict[str, str]] = []
    models = ServedModels(redis, settings, lambda: changes.append(paths()))

    def paths() -> dict[str, str]:
        return {str(served): served.path for served in models.all()}

    first = entry(redis, settings, checkpoint("m", "old", "/old"))
    await first.start()
    await models.start()
    assert changes == [{"m@old": "/old"}], "it is known when the start returns"
    await first.stop()
    assert await ServedModels(redis, settings).has("m"), "its worker may be back"
    moved = entry(redis, settings, checkpoint("m", "old", "/moved"))
    await moved.start()
    await until(lambda: changes[-1] == {"m@old": "/moved"})
    other = entry(redis, settings, checkpoint("m", "new", "/new"))
    await other.start()
    await until(lambda: changes[-1] == {"m@old": "/moved", "m@new": "/new"})
    assert {served.digest for served in models.of("m")} == {"old", "new"}
    models.all().clear()
    assert models.names() == {"m"}, "nobody else's list"
    await moved.stop()
    await other.stop()
    await forget(redis, settings, lambda one: one.model == "m")
    await until(lambda: changes[-1] == {})
    assert not await models.has("m")
    await models.stop()


async def test_one_that_has_just_come_is_found_and_what_is_known_is_not_looked_for(
    redis: Redis, settings: Settings
) -> None:
    models = ServedModels(redis, settings)
    assert not await models.has("m")
    come = entry(redis, settings, checkpoint("m"))
    await come.start()
    assert await models.has("m")
    await come.stop()
    await forget(redis, settings, lambda one: one.model == "m")
    assert await models.has("m"), "what is known is not looked for"


async def test_another_installs_models_and_what_is_none_are_not_there(
    redis: Redis, settings: Settings, namespace: str
) -> None:
    other = Settings(namespace=f"{namespace}-b", lease_s=0.6)
    kept = [entry(redis, other, checkpoint("theirs"))]
    odd = {"model": "?name", "digest": "d", "text_digest": "t", "path": "/m"}
    for one in (
        Replica("model", "no path", "", "", 0),
        Replica("model", "?name", "", "", 0, facts=odd),
    ):
        kept.append(Registration(redis, namespace, one, 60))
    kept.append(entry(redis, settings, checkpoint("ours")))
    for each in kept:
        await each.start()
    models = ServedModels(redis, settings)
    await models.start()
    assert models.names() == {"ours"}
    await models.stop()
    for each in kept:
        await each.stop()


async def test_without_redis_it_is_not_said_that_there_is_none(settings: Settings) -> None:
    """Who forgets a model would believe that nothing is left of it."""
    away = connect("redis://127.0.0.1:1")
    with pytest.raises(RedisAway):
        await listed(away, settings)
    with pytest.raises(RedisAway):
        await forget(away, settings, lambda _: True)
    await away.aclose()


async def test_what_was_forgotten_is_gone_with_the_next_look_and_no_worker_renews_it(
    redis: Redis, namespace: str
) -> None:
    """An entry that is merely gone would be waited for, a lease long."""
    settings = Settings(namespace=namespace, lease_s=1000, model_memory_s=3600)
    one, another = (entry(redis, settings, checkpoint("m")) for _ in range(2))
    await one.start()
    await another.start()
    models = ServedModels(redis, settings)
    assert await models.has("m")
    await forget(redis, settings, lambda served: served.model == "m")
    await models.look()
    assert models.all() == []
    await another._once()
    await another.stop()
    assert await listed(redis, settings) == []
    assert not await models.has("m")
    again = entry(redis, settings, checkpoint("m"))
    await again.start()
    await one._once()
    await one.stop()
    assert await models.has("m"), "who begins to serve it lists it anew"
    await again.stop()
