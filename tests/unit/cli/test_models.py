"""Models that are wanted, and what keeps Serve's applications so."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services import app
from services.cli import model_keeper
from services.cli.model_keeper import ModelKeeper
from services.cli.wanted_models import WantedModels
from services.common.config import ModelSpec, Settings
from services.common.discovery import Registration, Replica
from services.common.redis import Redis, connect
from services.common.served_models import ServedModels, entry
from services.common.start_failures import StartFailure, tell
from tests.support.waiting import until

FIRST = ModelSpec(name="first", path="/first").sized(0, 1)
SECOND = ModelSpec.model_validate(
    {"name": "second", "path": "/second", "decode": {"worker": {"threads": 3}}}
)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


class Serve:
    """What is deployed; nothing of it starts by itself."""

    def __init__(self) -> None:
        self.deployed: list[ModelSpec] = []
        self.deleted: list[str] = []
        self.drained = threading.Event()
        self.drained.set()  # cleared: a removal takes its time

    def deploy_model(self, settings: Settings, spec: ModelSpec) -> None:
        assert spec in settings.models
        self.deployed.append(spec)

    def delete_model(self, name: str) -> None:
        self.deleted.append(name)
        self.drained.wait(10)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    serve = Serve()
    monkeypatch.setattr(app, "deploy_model", serve.deploy_model)
    monkeypatch.setattr(app, "delete_model", serve.delete_model)
    monkeypatch.setattr(model_keeper, "_LOOK_EVERY_S", 0.05)
    return serve


@pytest.fixture
async def wanted(
    redis: Redis, redis_url: str, namespace: str, serve: Serve
) -> AsyncIterator[WantedModels]:
    """With a keeper that makes it so."""
    settings: Any = Settings.model_validate(
        {"PENSTOCK_REDIS_URL": redis_url, "namespace": namespace, "models": [FIRST], "lease_s": 0.6}
    )
    wanted = WantedModels(redis, namespace)
    await wanted.start_with([FIRST])
    keeper = ModelKeeper(settings, lambda: {"GPU": 1.0}, lambda _: None)
    keeper.start()
    yield wanted
    await asyncio.to_thread(keeper.stop)


async def worker_of(redis: Redis, namespace: str, model: str) -> Registration:
    facts = {"role": "both", "model": model}
    replica = Replica("worker", f"worker-of-{model}", "h:1", "h", 1, facts=facts)
    registration = Registration(redis, namespace, replica, lease_s=0.6)
    await registration.start()
    return registration


async def test_what_is_wanted_is_written_down_once(redis: Redis, namespace: str) -> None:
    wanted = WantedModels(redis, namespace)
    await wanted.start_with([FIRST])
    assert await wanted.all() == {"first": FIRST}
    assert await wanted.add(SECOND)
    assert not await wanted.add(SECOND)
    assert (await wanted.all())["second"].pools == SECOND.pools
    assert not await wanted.remove("third")
    assert not await wanted.leaves("third")
    assert await wanted.remove("first")
    assert await wanted.leaves("first")
    assert not await wanted.add(FIRST), "before the old one has ended"
    await wanted.removed("first")
    assert await wanted.add(FIRST)
    await wanted.give_up("first", "it is broken")
    assert "first" not in await wanted.all()
    assert await wanted.failure("first") == "it is broken"
    await wanted.add(FIRST)
    assert await wanted.failure("first") == "", "another attempt"
    await wanted.start_with([SECOND])
    assert set(await wanted.all()) == {"second"}


async def test_models_are_deployed_and_removed_as_wanted(
    redis: Redis, namespace: str, wanted: WantedModels, serve: Serve
) -> None:
    await wanted.add(SECOND)
    await until(lambda: serve.deployed == [SECOND], 10)
    worker = await worker_of(redis, namespace, "second")
    settings = Settings(namespace=namespace, lease_s=0.6)
    listed = entry(redis, settings, SECOND)
    await listed.start()
    assert await ServedModels(redis, settings).has("second")

    serve.drained.clear()
    await wanted.remove("second")
    await until(lambda: serve.deleted == ["second"], 10)
    await listed.stop()
    await worker.stop()
    assert await wanted.leaves("second"), "what runs on it has not ended"
    serve.drained.set()
    await until_not(lambda: wanted.leaves("second"))
    assert not await ServedModels(redis, settings).has("second")
    assert serve.deployed == [SECOND], "the first was there already"


async def until_not(look: Any) -> None:
    async def over() -> bool:
        return not await look()

    await until(over, 10)


async def test_one_whose_worker_does_not_start_is_given_up(
    redis: Redis, namespace: str, wanted: WantedModels, serve: Serve
) -> None:
    await wanted.add(SECOND)
    await until(lambda: serve.deployed == [SECOND], 10)
    await tell(redis, namespace, StartFailure("both worker of other", "of another model", ""))
    await tell(redis, namespace, StartFailure("both worker of second", "no room", ""))
    await until_not(lambda: not_told(wanted))
    assert "no room" in await wanted.failure("second")
    await until(lambda: serve.deleted == ["second"], 10)
    assert set(await wanted.all()) == {"first"}


async def not_told(wanted: WantedModels) -> bool:
    return not await wanted.failure("second")


async def test_one_that_ray_has_no_room_for_is_told_so(wanted: WantedModels, serve: Serve) -> None:
    large = ModelSpec.model_validate(
        {"name": "second", "path": "/l", "decode": {"ray": {"num_gpus": 2}}}
    )
    await wanted.add(large)
    await until_not(lambda: not_told(wanted))
    assert "2 of GPU, and Ray has 1" in await wanted.failure("second")
    assert not serve.deployed


async def test_whatever_redis_answers_the_keeper_goes_on(
    redis: Redis, wanted: WantedModels, serve: Serve
) -> None:
    await redis.delete(wanted._specs)
    await redis.set(wanted._specs, "not a hash")
    await asyncio.sleep(0.3)
    await redis.delete(wanted._specs)
    await wanted.start_with([FIRST, SECOND])
    await until(lambda: serve.deployed == [SECOND], 10)
