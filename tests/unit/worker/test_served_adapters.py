"""Which adapters a worker serves: those that are wanted when it begins, and what changes then."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.common.config import ModelSpec, Settings
from services.common.discovery import Registration
from services.common.redis import Redis
from services.common.served_models import Checkpoint, adapted, failures_key, listed, wanted_key
from services.worker import adapters as module
from services.worker.adapters import ServedAdapters
from services.worker.engine.adapters import Adapter, PlaceInUse, UnsupportedAdapter
from tests.support.waiting import until
from tests.unit.worker.worker_rig import NO_REDIS

BASE = Checkpoint("tiny", "d", "t", "/tiny")


class Engine:
    """Of an EngineClient what adapters need."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.refuses: set[str] = set()
        self.in_use = 0
        """How often there is no place yet."""
        self.meanwhile: Coroutine[Any, Any, None] | None = None
        """What happens while it refuses one."""

    async def load_adapter(self, adapter: Adapter) -> str:
        if self.in_use:
            self.in_use -= 1
            raise PlaceInUse("all places are taken")
        if adapter.id in self.refuses:
            if self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                await meanwhile
            return "there is no place for it"
        self.loaded.append(adapter.id)
        return ""

    def drop_adapter(self, id: str) -> None:
        self.loaded.remove(id)


class Rig:
    """A worker that is started with the adapter `own`, whose path is its digest."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self.redis, self.engine = redis, Engine()
        self.settings = Settings(namespace=namespace)
        self.spec = ModelSpec(name="tiny", path="/tiny", adapters={"own": "o"})
        self.served = ServedAdapters(redis, self.settings, self.spec, BASE, Path("/tiny"))
        self.told: list[list[str]] = []
        self.read: list[str] = []
        self.broken: set[str] = set()
        self.served.read = self._read  # type: ignore[method-assign]

    def _read(self, name: str, path: str) -> tuple[Checkpoint, Adapter]:
        self.read.append(path)
        if path in self.broken:
            raise UnsupportedAdapter(f"{path} is broken")
        if path == "strange":
            raise RuntimeError("what nobody thought of")
        served = adapted(BASE, name, path)
        return served, Adapter(served.digest, {})

    async def want(self, **adapters: str) -> None:
        spec = self.spec.model_copy(update={"adapters": adapters})
        key = wanted_key(self.settings.namespace)
        await self.redis.hset(key, "tiny", spec.model_dump_json())

    async def start(self) -> None:
        first = await self.served.first()
        await self.served.start(first, self.engine, self._tell)  # type: ignore[arg-type]

    def _tell(self) -> None:
        self.told.append(self.served.digests)


def digest(path: str) -> str:
    return adapted(BASE, "", path).digest


@pytest.fixture
async def rig(redis: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    rig = Rig(redis, namespace)
    yield rig
    await rig.served.withdraw()


async def test_who_takes_anothers_place_begins_with_what_that_had(rig: Rig) -> None:
    """Also with what was loaded while it ran, which its settings do not know: routers that hear
    that nobody has an adapter refuse what waits for it."""
    await rig.want(own="o", late="l")
    await rig.start()
    assert sorted(rig.engine.loaded) == sorted([digest("o"), digest("l")])
    assert rig.told[-1] == sorted([digest("o"), digest("l")])


async def test_without_redis_it_begins_with_its_settings(rig: Rig) -> None:
    rig.served = ServedAdapters(NO_REDIS, rig.settings, rig.spec, BASE, Path("/tiny"))
    rig.served.read = rig._read  # type: ignore[method-assign]
    assert [*await rig.served.first()] == ["own"]


async def test_only_one_of_the_settings_keeps_a_worker_from_starting(rig: Rig) -> None:
    await rig.want(own="o", late="l", many="m")
    rig.broken, rig.engine.refuses = {"l"}, {digest("m")}
    await rig.start()
    assert rig.engine.loaded == [digest("o")]
    key = failures_key(rig.settings.namespace)

    async def told() -> bool:
        why = {"late": "l is broken", "many": "there is no place for it"}
        return bool(await rig.redis.hgetall(key) == why)

    await until(told, what="why the others are not served")
    rig.broken = {"o"}
    with pytest.raises(UnsupportedAdapter, match="'own': o is broken"):
        await rig.served.first()


async def test_routers_hear_of_a_drop_before_anything_is_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they send here what is refused."""
    await rig.want(own="o", late="l")
    await rig.start()
    stuck, real = asyncio.Event(), module.Registration.stop

    async def stop(registration: Registration) -> None:
        await stuck.wait()
        await real(registration)

    monkeypatch.setattr(module.Registration, "stop", stop)
    await rig.want(own="o")
    await until(lambda: rig.told[-1] == [digest("o")], what="routers hear of it")
    stuck.set()
    await until(lambda: rig.engine.loaded == [digest("o")], what="the engine drops it")

    async def forgotten() -> bool:
        return {one.model for one in await listed(rig.redis, rig.settings)} == {"own"}

    await until(forgotten, what="it is listed no more")


async def test_one_that_comes_before_anothers_place_is_free_is_tried_again(rig: Rig) -> None:
    await rig.want(own="o", late="l")
    await rig.start()
    rig.engine.in_use = 2
    await rig.want(own="o", many="m")
    await until(lambda: digest("m") in rig.engine.loaded, what="it has the place")
    assert not await rig.redis.exists(failures_key(rig.settings.namespace))


async def test_of_one_that_was_removed_meanwhile_no_failure_stays(rig: Rig) -> None:
    await rig.start()
    rig.engine.refuses = {digest("l"), digest("m")}
    rig.engine.meanwhile = rig.want(own="o", many="m")
    await rig.want(own="o", late="l")
    key = failures_key(rig.settings.namespace)
    await until(lambda: rig.redis.hexists(key, "many"), what="the next one is told")
    assert await rig.redis.hkeys(key) == ["many"]


async def test_what_nobody_thought_of_does_not_end_the_watch(rig: Rig) -> None:
    await rig.start()
    await rig.want(own="o", strange="strange")
    await until(lambda: "strange" in rig.read, what="it is read")
    await rig.want(own="o", late="l")
    await until(lambda: digest("l") in rig.engine.loaded, what="another is loaded")


async def test_whatever_a_file_makes_a_library_raise_is_told_and_the_others_are_loaded(
    rig: Rig,
) -> None:
    await rig.start()
    long = "x" * 10_000
    rig.broken = {long}
    await rig.want(own="o", strange="strange", long=long, late="l", many="m")
    await until(lambda: len(rig.engine.loaded) == 3, what="the others are loaded")
    key = failures_key(rig.settings.namespace)

    async def told() -> bool:
        why = {"strange": "RuntimeError('what nobody thought of')", "long": long[:1000]}
        return bool(await rig.redis.hgetall(key) == why)

    await until(told, what="why these are not served")
    assert rig.read.count("strange") == 1, "it is not tried again"
