"""Served models in the registry: who says so, how long it is remembered, who is told."""

from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from services.common import served_models
from services.common.config import ModelSpec, Settings
from services.common.discovery import Registration, Replica
from services.common.redis import Redis, connect
from services.common.served_models import ServedModels, entry, forget
from tests.support.waiting import until


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def settings(redis_url: str, namespace: str) -> Settings:
    return Settings(redis_url=redis_url, namespace=namespace, lease_s=0.6, model_memory_s=3600)


async def test_what_its_worker_told_outlives_it_until_it_is_forgotten(
    redis: Redis, settings: Settings
) -> None:
    changes: list[dict[str, str]] = []
    models = ServedModels(redis, settings, lambda: changes.append(paths()))

    def paths() -> dict[str, str]:
        return {name: spec.path for name, spec in models.all().items()}

    first = entry(redis, settings, ModelSpec(name="m", path="/old"))
    await first.start()
    await models.start()
    assert changes == [{"m": "/old"}], "it is known when the start returns"
    await first.stop()
    assert await ServedModels(redis, settings).has("m"), "its worker may be back"
    moved = entry(redis, settings, ModelSpec(name="m", path="/new"))
    await moved.start()
    await until(lambda: changes[-1] == {"m": "/new"})
    models.all().clear()
    assert paths() == {"m": "/new"}, "nobody else's list"
    await moved.stop()
    await forget(redis, settings.namespace, "m")
    await until(lambda: changes[-1] == {})
    assert not await models.has("m")
    await models.stop()


async def test_unknown_names_cost_the_registry_a_look_now_and_then(
    redis: Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are asked for; one that has just come is found by the next look."""
    now = 1000.0
    monkeypatch.setattr(served_models, "time", SimpleNamespace(monotonic=lambda: now))
    models = ServedModels(redis, settings)
    assert not await models.has("m")
    come = entry(redis, settings, ModelSpec(name="m", path="/m"))
    await come.start()
    now += 0.1
    assert not await models.has("m")
    now += 0.11
    assert await models.has("m")
    await forget(redis, settings.namespace, "m")
    now += 10
    assert await models.has("m"), "what is known is not looked for"
    await come.stop()


async def test_another_installs_models_and_what_is_none_are_not_there(
    redis: Redis, settings: Settings, namespace: str
) -> None:
    other = Settings(namespace=f"{namespace}-b", lease_s=0.6)
    kept = [entry(redis, other, ModelSpec(name="theirs", path="/m"))]
    for odd in (
        Replica("model", "no path", "", "", 0),
        Replica("model", "?name", "", "", 0, facts={"path": "/m"}),
    ):
        kept.append(Registration(redis, namespace, odd, 60))
    kept.append(entry(redis, settings, ModelSpec(name="ours", path="/m")))
    for one in kept:
        await one.start()
    models = ServedModels(redis, settings)
    await models.start()
    assert set(models.all()) == {"ours"}
    await models.stop()
    for one in kept:
        await one.stop()
