"""Models that are wanted, and what keeps Serve's applications so."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services import app
from services.cli.stack import model_keeper
from services.cli.stack.model_keeper import ModelKeeper
from services.cli.stack.wanted_models import WantedModels
from services.common import served_models
from services.common.config import ModelSpec, Settings
from services.common.discovery import Registration, Replica
from services.common.redis import Redis, connect
from services.common.served_models import Checkpoint, ServedModels, entry
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
        self.bad: dict[str, StartFailure] = {}  # what their workers tell
        self.tells: Any = None
        self.drained = threading.Event()
        self.drained.set()  # cleared: a removal takes its time

    def deploy_model(self, settings: Settings, spec: ModelSpec) -> None:
        assert spec in settings.models
        self.deployed.append(spec)
        if spec.name in self.bad:
            asyncio.run(self.tells(self.bad[spec.name]))

    def delete_model(self, namespace: str, name: str) -> None:
        self.deleted.append(name)
        self.drained.wait(10)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    serve = Serve()
    monkeypatch.setattr(app, "deploy_model", serve.deploy_model)
    monkeypatch.setattr(app, "delete_model", serve.delete_model)
    monkeypatch.setattr(model_keeper, "_LOOK_EVERY_S", 0.05)
    return serve


@asynccontextmanager
async def kept(
    redis: Redis, redis_url: str, namespace: str, started_with: list[ModelSpec]
) -> AsyncIterator[tuple[WantedModels, ModelKeeper]]:
    """With a keeper that makes it so."""
    told: Any = {"PENSTOCK_REDIS_URL": redis_url, "namespace": namespace, "lease_s": 0.6}
    settings = Settings.model_validate({**told, "models": started_with})
    keeper = ModelKeeper("us", settings, lambda: {"GPU": 1.0}, lambda _: None)
    keeper.start()
    yield WantedModels(redis, namespace), keeper
    await asyncio.to_thread(keeper.stop)


@pytest.fixture
async def keeper(
    redis: Redis, redis_url: str, namespace: str, serve: Serve
) -> AsyncIterator[ModelKeeper]:
    """Of a stack that was started with the first, and has looked round."""
    await WantedModels(redis, namespace).start_with([FIRST], "us")
    async with kept(redis, redis_url, namespace, [FIRST]) as (_wanted, keeper):
        await asyncio.to_thread(keeper.settle, 20)
        yield keeper


@pytest.fixture
def wanted(redis: Redis, namespace: str, keeper: ModelKeeper) -> WantedModels:
    return WantedModels(redis, namespace)


async def worker_of(redis: Redis, namespace: str, model: str) -> Registration:
    facts = {"role": "both", "model": model}
    replica = Replica("worker", f"worker-of-{model}", "h:1", "h", 1, facts=facts)
    registration = Registration(redis, namespace, replica, lease_s=0.6)
    await registration.start()
    return registration


async def test_what_is_wanted_is_written_down_once(redis: Redis, namespace: str) -> None:
    wanted = WantedModels(redis, namespace)
    assert not (await wanted.look()).keeper
    await wanted.start_with([FIRST], "us")
    assert (await wanted.look()).keeper
    assert await wanted.all() == {"first": FIRST}
    assert await wanted.add(SECOND)
    assert not await wanted.add(SECOND)
    assert (await wanted.all())["second"].pools == SECOND.pools
    assert not await wanted.remove("third")
    assert not (await wanted.look()).leaves("third")
    await wanted.give_up("second", "it is broken")
    assert "second" not in await wanted.all()
    assert (await wanted.look()).failures == {"second": "it is broken"}
    await wanted.add(SECOND)
    assert not (await wanted.look()).failures, "another attempt"
    await wanted.give_up("second", "it is broken")
    assert await wanted.remove("second")
    assert not (await wanted.look()).failures, "whoever removes it knows"
    await wanted.start_with([], "us")
    assert (await wanted.look()).keeper, "that none is wanted is known, too"
    assert not await wanted.all()


async def test_adapters_are_wanted_of_a_model(redis: Redis, namespace: str) -> None:
    wanted = WantedModels(redis, namespace)
    await wanted.start_with([FIRST, SECOND], "us")
    assert await wanted.add_adapter("first", "pirate", "/pirate")
    for name in ("pirate", "first", "second"):
        assert not await wanted.add_adapter("second", name, "/other"), "there is one of that name"
    assert not await wanted.add_adapter("third", "lawyer", "/lawyer")
    assert not await wanted.add(ModelSpec(name="pirate", path="/p")), "as of models"
    await redis.hset(wanted._failures, "lawyer", "it is broken")
    assert await wanted.add_adapter("first", "lawyer", "/lawyer")
    assert not (await wanted.look()).failures, "another attempt"
    specs = await wanted.all()
    assert specs["first"].adapters == {"pirate": "/pirate", "lawyer": "/lawyer"}
    assert specs["first"].pools == FIRST.pools
    assert specs["second"] == SECOND
    assert await wanted.remove_adapter("pirate")
    assert not await wanted.remove_adapter("pirate")
    assert (await wanted.all())["first"].adapters == {"lawyer": "/lawyer"}


async def test_a_keeper_whose_redis_lost_all_wants_the_adapters_of_before(
    redis: Redis, wanted: WantedModels, keeper: ModelKeeper, serve: Serve
) -> None:
    assert await wanted.add_adapter("first", "pirate", "/pirate")
    await until(lambda: "pirate" in keeper._served["first"].adapters, 10, "it has looked")
    await redis.delete(wanted._specs, wanted._keeper)
    await until(lambda: wants(wanted, "pirate"), 10)
    assert not serve.deployed, "no worker is replaced for it"


async def wants(wanted: WantedModels, adapter: str) -> bool:
    return any(adapter in spec.adapters for spec in (await wanted.all()).values())


async def test_what_is_removed_leaves_until_it_has_ended(redis: Redis, namespace: str) -> None:
    wanted = WantedModels(redis, namespace)
    await wanted.start_with([FIRST], "us")
    assert await wanted.begin("first")
    assert await wanted.remove("first")
    for _ in range(2):  # a second command waits like the first
        assert (await wanted.look()).leaves("first")
        assert not await wanted.add(FIRST), "before the old one has ended"
        assert await wanted.remove("first")
    assert not await wanted.begin("first"), "it is not wanted any more"
    await wanted.ended("first")
    assert not (await wanted.look()).leaves("first")
    assert not await wanted.remove("first")
    assert await wanted.add(FIRST)
    assert await wanted.remove("first")
    assert not (await wanted.look()).leaves("first"), "it had not begun"


async def test_junk_hides_no_other_model(redis: Redis, namespace: str) -> None:
    wanted = WantedModels(redis, namespace)
    await wanted.start_with([FIRST], "us")
    await redis.hset(wanted._specs, "junk", '{"name": 3}')
    look = await wanted.look()
    assert look.specs == {"first": FIRST}
    assert look.odd == {"junk"}
    assert await wanted.remove("junk")
    assert not (await wanted.look()).odd


async def test_models_are_deployed_and_removed_as_wanted(
    redis: Redis, namespace: str, wanted: WantedModels, serve: Serve
) -> None:
    await wanted.add(SECOND)
    await until(lambda: serve.deployed == [SECOND], 10)
    worker = await worker_of(redis, namespace, "second")
    settings = Settings(namespace=namespace, lease_s=0.6)
    listed = entry(redis, settings, Checkpoint("second", "d", "t", "/second"))
    await listed.start()
    assert await ServedModels(redis, settings).has("second")

    serve.drained.clear()
    await wanted.remove("second")
    await until(lambda: serve.deleted == ["second"], 10)
    await listed.stop()
    await worker.stop()
    assert (await wanted.look()).leaves("second"), "what runs on it has not ended"
    serve.drained.set()
    await until_not(lambda: leaves(wanted, "second"))
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
    assert "no room" in (await wanted.look()).failures["second"]
    await until(lambda: serve.deleted == ["second"], 10)
    assert set(await wanted.all()) == {"first"}


async def test_one_removed_while_it_starts_was_never_served(
    wanted: WantedModels, serve: Serve
) -> None:
    await wanted.add(SECOND)
    await until(lambda: serve.deployed == [SECOND], 10)
    await wanted.remove("second")
    await until_not(lambda: leaves(wanted, "second"))
    assert "second" not in (await wanted.look()).proven, "it would be tried for ever"
    assert serve.deleted == ["second"]


async def test_what_is_not_up_in_time_is_named(
    wanted: WantedModels, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_keeper, "_START_TIMEOUT_S", 0.1)
    await wanted.add(SECOND)
    await until_not(lambda: not_told(wanted))
    assert (await wanted.look()).failures["second"] == "not up after 0 s: worker of second"


async def not_told(wanted: WantedModels) -> bool:
    return "second" not in (await wanted.look()).failures


async def leaves(wanted: WantedModels, name: str) -> bool:
    return (await wanted.look()).leaves(name)


async def test_what_serve_could_not_do_is_tried_again(
    wanted: WantedModels, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = iter((True,))

    def deploy(settings: Settings, spec: ModelSpec) -> None:
        if next(away, False):
            raise RuntimeError("Ray is away")
        serve.deploy_model(settings, spec)

    monkeypatch.setattr(app, "deploy_model", deploy)
    await wanted.add(SECOND)
    await until(lambda: serve.deployed == [SECOND], 10)


async def test_one_that_was_stopped_is_waited_for_until_serve_has_its_last_model(
    redis: Redis,
    redis_url: str,
    namespace: str,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it deploys after a take-down would stay, with nobody to end it."""
    monkeypatch.setattr(model_keeper, "_END_S", 0.0)
    begun, goes_on = threading.Event(), threading.Event()

    def deploy(settings: Settings, spec: ModelSpec) -> None:
        begun.set()
        assert goes_on.wait(10)
        serve.deploy_model(settings, spec)

    monkeypatch.setattr(app, "deploy_model", deploy)
    await WantedModels(redis, namespace).start_with([SECOND], "us")
    async with kept(redis, redis_url, namespace, []) as (_, keeper):
        assert await asyncio.to_thread(begun.wait, 10)
    waiting = asyncio.create_task(asyncio.to_thread(keeper.wait))
    ended, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not ended
    goes_on.set()
    await asyncio.wait_for(waiting, 10)
    assert serve.deployed == [SECOND]


class Away:
    """Redis, which the keeper cannot reach for calls that are named `of`, three times of four."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: set[str] = set()
        self.failed = 0
        for name in ("look", "served"):
            monkeypatch.setattr(WantedModels, name, self._fails(name, getattr(WantedModels, name)))

    def _fails(self, name: str, call: Any) -> Any:
        async def fails(*arguments: Any) -> Any:
            if name in self.of and threading.current_thread().name == "models":
                self.failed += 1
                if self.failed % 4:
                    raise ConnectionError("Redis is away")
            return await call(*arguments)

        return fails


@pytest.mark.parametrize("call", ["look", "served"])
async def test_while_redis_is_away_a_load_goes_on(
    redis: Redis,
    namespace: str,
    wanted: WantedModels,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """Deployed once more it would begin from the start: Serve replaces the workers that load."""
    away = Away(monkeypatch)
    await wanted.add(SECOND)
    await until(lambda: serve.deployed == [SECOND], 10)
    await wanted.failed("second", "of an earlier attempt")
    away.of = {call}
    if call == "look":
        await until(lambda: away.failed > 8, 10)
    worker = await worker_of(redis, namespace, "second")
    await until(lambda: away.failed > 16 if call == "look" else away.failed > 2, 10)
    away.of = set()

    async def proven() -> bool:
        look = await wanted.look()
        return "second" in look.proven and not look.failures

    await until(proven, 10, "that it was served once is written")
    await worker.stop()
    assert serve.deployed == [SECOND]


async def test_one_removed_while_redis_is_away_is_forgotten_when_it_is_back(
    redis: Redis,
    namespace: str,
    wanted: WantedModels,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its entry would stand for a day, and requests wait for it."""
    settings = Settings(namespace=namespace, lease_s=0.6)
    listed = entry(redis, settings, Checkpoint("first", "d", "t", "/first"))
    await listed._once()
    forgets: list[bool] = []
    forget = served_models.forget

    async def fails(*arguments: Any) -> None:
        forgets.append(serve.drained.is_set())
        if len(forgets) < 4:
            raise ConnectionError("Redis is away")
        await forget(*arguments)

    monkeypatch.setattr(served_models, "forget", fails)
    serve.drained.clear()
    await wanted.remove("first")
    served = ServedModels(redis, settings)

    async def known() -> bool:
        await served.look()
        return served.names() != set()

    await until_not(known)
    assert not any(forgets), "while what runs on it ends"
    serve.drained.set()
    await until_not(lambda: leaves(wanted, "first"))
    assert serve.deleted == ["first"]


async def test_a_removal_that_ends_before_redis_is_back_is_repeated(
    wanted: WantedModels, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgets: list[str] = []

    async def fails(*_: Any) -> None:
        forgets.append("")
        if len(forgets) < 3:
            raise ConnectionError("Redis is away")

    monkeypatch.setattr(served_models, "forget", fails)
    await wanted.remove("first")
    await until_not(lambda: leaves(wanted, "first"))
    assert len(forgets) == 3


async def test_one_that_ray_has_no_room_for_is_told_so(wanted: WantedModels, serve: Serve) -> None:
    large = ModelSpec.model_validate(
        {"name": "second", "path": "/l", "decode": {"ray": {"num_gpus": 2}}}
    )
    await wanted.add(large)
    await until_not(lambda: not_told(wanted))
    assert "2 of GPU, and Ray has 1" in (await wanted.look()).failures["second"]
    assert not serve.deployed
    await until_not(lambda: leaves(wanted, "second"))


async def test_whatever_redis_answers_the_keeper_goes_on(
    redis: Redis, wanted: WantedModels, serve: Serve
) -> None:
    async def refused() -> int:
        told = await redis.info("errorstats")
        return int(told.get("errorstat_WRONGTYPE", {}).get("count", 0))

    before = await refused()

    async def looked() -> bool:
        return await refused() > before

    await redis.delete(wanted._specs)
    await redis.set(wanted._specs, "not a hash")
    await until(looked, 10)
    await redis.delete(wanted._specs)
    await wanted.start_with([FIRST, SECOND], "us")
    await until(lambda: serve.deployed == [SECOND], 10)


async def test_of_a_stack_started_again_a_bad_model_is_tried_again_and_keeps_no_other_back(
    redis: Redis, redis_url: str, namespace: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_keeper, "_TRIED_AGAIN_S", (0.1,))
    before = WantedModels(redis, namespace)
    await before.start_with([FIRST, SECOND], "us")
    await before.runs(["first", "second", "third"])  # the third was leaving when all was lost
    worker = await worker_of(redis, namespace, "first")
    serve.bad = {"second": StartFailure("both worker of second", "its folder is gone", "")}
    serve.tells = lambda failure: tell(connect(redis_url), namespace, failure)
    async with kept(redis, redis_url, namespace, []) as (wanted, keeper):
        await asyncio.to_thread(keeper.settle, 10)
        assert "second" in (await wanted.look()).failures
        assert "second" not in serve.deleted
        await until(lambda: serve.deployed.count(SECOND) >= 2, 10, "it is tried again")
        assert FIRST in serve.deployed
        look = await wanted.look()
        assert "its folder is gone" in look.failures["second"]
        assert set(look.specs) == {"first", "second"}
        assert not look.leaves("third"), "it went with the stack"
        serve.bad = {}
        back = await worker_of(redis, namespace, "second")

        async def served() -> bool:
            return not (await wanted.look()).failures

        await until(served, 10)
        assert serve.deployed.count(FIRST) == 1
    await worker.stop()
    await back.stop()


async def test_one_removed_before_its_keeper_saw_it_leaves_no_trace(
    wanted: WantedModels, serve: Serve
) -> None:
    assert await wanted.add(SECOND)
    assert await wanted.remove("second")
    await until_not(lambda: leaves(wanted, "second"))
    assert await wanted.add(SECOND)
    await until(lambda: SECOND in serve.deployed, 10)


async def test_what_a_killed_keeper_left_half_done_is_cleared(
    redis: Redis, wanted: WantedModels, serve: Serve
) -> None:
    await redis.sadd(wanted._running, "gone")
    await until_not(lambda: leaves(wanted, "gone"))


async def test_when_redis_lost_what_was_wanted_what_runs_is(
    redis: Redis, wanted: WantedModels, serve: Serve
) -> None:
    assert await running(wanted)
    await redis.delete(wanted._specs, wanted._running, wanted._keeper)
    await until(lambda: running(wanted), 10)
    assert await wanted.all() == {"first": FIRST}
    assert not serve.deleted


async def running(wanted: WantedModels) -> bool:
    return (await wanted.look()).running == {"first"}


async def test_a_deployed_model_stays_while_redis_has_junk_of_it(
    redis: Redis, wanted: WantedModels, serve: Serve
) -> None:
    await redis.hset(wanted._specs, "first", "junk")
    await wanted.add(SECOND)
    await until(lambda: SECOND in serve.deployed, 10, "the others are looked after")
    assert not serve.deleted


async def test_who_is_replaced_keeps_nothing_and_ends_nothing(
    redis: Redis, redis_url: str, namespace: str, wanted: WantedModels, serve: Serve
) -> None:
    """Two `penstock up --address` on one cluster: the later one's models are served."""
    async with kept(redis, redis_url, namespace, [FIRST]) as (_, keeper):
        await asyncio.to_thread(keeper.settle, 10)
        assert not keeper.replaced
        await wanted.start_with([SECOND], "them")
        await asyncio.to_thread(keeper._thread.join, 10)
        assert keeper.replaced
    assert (serve.deployed, serve.deleted) == ([], [])
    assert (await wanted.look()).keeper == "them"


async def test_who_takes_the_place_of_a_lost_one_keeps_what_was_wanted(
    redis: Redis, redis_url: str, namespace: str, serve: Serve
) -> None:
    before = WantedModels(redis, namespace)
    await before.start_with([SECOND], "lost")
    await before.keep("us")
    async with kept(redis, redis_url, namespace, []) as (_, keeper):
        await until(lambda: serve.deployed == [SECOND], 10)
        assert not keeper.replaced


async def test_what_an_earlier_stack_lost_is_forgotten_by_the_next(
    redis: Redis, redis_url: str, namespace: str, serve: Serve
) -> None:
    """It is not wanted any more, and its entry would stand for a day."""
    settings = Settings(namespace=namespace, lease_s=0.6)
    for name in ("first", "lost"):
        await entry(redis, settings, Checkpoint(name, "d", "t", f"/{name}"))._once()
    await WantedModels(redis, namespace).start_with([FIRST], "us")
    async with kept(redis, redis_url, namespace, [FIRST]):
        served = ServedModels(redis, settings)

        async def known() -> set[str]:
            await served.look()
            return served.names()

        await until_not(lambda: holds(known, "lost"))
        assert await known() == {"first"}


async def holds(known: Any, name: str) -> bool:
    return name in await known()
