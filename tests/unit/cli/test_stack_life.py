"""A stack's whole life on a ground that starts nothing: in what order it begins and ends, what a
start that fails leaves, and what others may find of it meanwhile."""

import asyncio
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from services import app
from services.cli.running import find_running, holding, state_file
from services.cli.stack import stack as module
from services.cli.stack.stack import Stack
from services.cli.stack.wanted_models import WantedModels
from services.common.config import ModelSpec, RouterSettings, Settings
from services.common.discovery import SERVICES, Registration, Replica, leave
from services.common.redis import connect
from services.common.start_failures import StartFailure, tell
from services.gateway.identity.key_record import key_hash
from services.gateway.identity.keys import KeyStore
from tests.support.web import serving

TINY = ModelSpec(name="tiny", path="/models/tiny").sized(0, 1)
PLENTY = {"CPU": 1000.0, "GPU": 1000.0}


class World:
    """A ground, Serve and a keeper of models that only write down what they are asked."""

    def __init__(self, redis_url: str, namespace: str, url: str) -> None:
        self.redis_url, self.namespace, self.url = redis_url, namespace, url
        self.told: list[str] = []
        self.reports: list[str] = []
        self.fails_at = ""
        self.up = True
        self.room = PLENTY
        self.before: list[str] = []  # applications
        self.models = ["tiny"]  # that Serve runs
        self.states = [{"p": "RUNNING"}]  # of applications, look by look
        self.logs: Path | None = None
        self.lasts = False
        self.keeper = Keeper(self)

    def does(self, what: str) -> None:
        self.told.append(what)
        if what == self.fails_at:
            raise RuntimeError(f"{what} failed")

    # ---- the ground

    def checked(self, settings: Settings) -> Settings:
        self.does("check")
        return settings

    @contextmanager
    def stores(self, settings: Settings) -> Iterator[Settings]:
        self.does("stores")
        try:
            yield settings.model_copy(update={"redis_url": SecretStr(self.redis_url)})
        finally:
            self.told.append("stores end")

    @contextmanager
    def ray(self, settings: Settings) -> Iterator[None]:
        assert settings.redis_dsn == self.redis_url, "as the stores are"
        self.does("ray")
        try:
            yield
        finally:
            self.told.append("ray ends")

    def resources(self) -> dict[str, float]:
        return self.room

    def tend(self) -> bool:
        return self.up

    # ---- Serve

    def deploy(self, settings: Settings) -> None:
        self.does("deploy")
        worker = {"role": "both", "model": "tiny"}
        gateway = {"url": self.url, "grpc": "127.0.0.1:5"}
        facts = {"worker": worker, "gateway": gateway}
        asyncio.run(self.register(*((name, facts.get(name, {})) for name in SERVICES)))

    async def register(self, *replicas: tuple[str, dict[str, str]]) -> None:
        redis = connect(self.redis_url)
        for service, facts in replicas:
            replica = Replica(service, f"{service}-1", "h:1", "h", 1, "http://m", facts)
            await Registration(redis, self.namespace, replica, 3600)._once()
        await redis.aclose()

    def delete_all(self, namespace: str, but: Collection[str] = ()) -> None:
        assert namespace == self.namespace
        self.told.append(f"delete all but {list(but)}")

    def applications(self) -> dict[str, Any]:
        states = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {
            name: SimpleNamespace(
                status=state,
                message="",
                deployments={"router": SimpleNamespace(status="UPDATING")},
            )
            for name, state in states.items()
        }


class Keeper:
    replaced = False

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, *_: Any) -> "Keeper":
        """As one is made."""
        return self

    def start(self) -> None:
        self._world.does("keep models")

    def settle(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self._world.does("models settle")

    def stop(self) -> None:
        self._world.told.append("models are left")

    def wait(self) -> None:
        self._world.told.append("nothing more is deployed")


@pytest.fixture
def pages() -> dict[str, tuple[int, str]]:
    """What the gateway says."""
    return {"/readyz": (200, ""), "/v1/models/tiny": (200, "{}")}


@pytest.fixture
def world(
    redis_url: str,
    namespace: str,
    pages: dict[str, tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    with serving(pages) as address:
        made = World(redis_url, namespace, f"http://{address}")
        monkeypatch.setattr(app, "deploy", made.deploy)
        monkeypatch.setattr(app, "deployed", lambda _: made.before)
        monkeypatch.setattr(app, "deployed_models", lambda _: made.models)
        monkeypatch.setattr(app, "delete_all", made.delete_all)
        monkeypatch.setattr(Stack, "_applications", lambda _: made.applications())
        monkeypatch.setattr(module, "ModelKeeper", made.keeper)
        yield made


@pytest.fixture
def settings(world: World, tmp_path: Path) -> Settings:
    return Settings(
        namespace=world.namespace, data_dir=tmp_path / "data", models=[TINY], lease_s=0.6
    )


@pytest.fixture
def stack(world: World, settings: Settings) -> Stack:
    return Stack(settings, world, report=world.reports.append)


BEGINS = ["check", "stores", "ray", "deploy", "keep models", "models settle"]
GOES = "delete all but []"
ENDS = ["models are left", GOES, "nothing more is deployed", GOES, "ray ends", "stores end"]


def test_it_begins_in_order_and_ends_the_other_way_round(
    stack: Stack, world: World, settings: Settings
) -> None:
    with stack as running:
        assert world.told == BEGINS
        assert (running.url, running.grpc) == (world.url, "127.0.0.1:5")
        assert (running.redis_url, running.namespace) == (world.redis_url, world.namespace)
        assert find_running(settings) == running, "by the other commands"
        assert stat.S_IMODE(state_file(settings).stat().st_mode) == 0o600, "there is a key in it"
        with pytest.raises(RuntimeError, match="already runs here"), holding(settings):
            pass
        assert asyncio.run(tenant_of(running.key, world)) == "local"
        assert stack.metrics_url == "http://m"
        assert asyncio.run(wanted(world)) == {"tiny"}
    assert world.told == BEGINS + ENDS
    assert not state_file(settings).exists()
    with holding(settings):
        pass


async def tenant_of(key: str, world: World) -> str | None:
    redis = connect(world.redis_url)
    record = await KeyStore(redis, world.namespace).find(key_hash(key))
    await redis.aclose()
    return record and record.tenant


async def wanted(world: World) -> set[str]:
    redis = connect(world.redis_url)
    names = set(await WantedModels(redis, world.namespace).all())
    await redis.aclose()
    return names


@pytest.mark.parametrize(
    ("fails_at", "told"),
    [
        ("check", ["check"]),
        ("stores", BEGINS[:2]),
        ("ray", [*BEGINS[:3], "stores end"]),
        ("deploy", [*BEGINS[:4], "delete all but ['before']", "ray ends", "stores end"]),
        ("keep models", [*BEGINS[:5], GOES, *ENDS[-2:]]),
        ("models settle", [*BEGINS, *ENDS]),
    ],
)
@pytest.mark.parametrize("logs", [None, Path("/var/log/here")])
def test_a_start_that_fails_leaves_nothing_but_what_was_there_before(
    fails_at: str,
    told: list[str],
    logs: Path | None,
    stack: Stack,
    world: World,
    settings: Settings,
) -> None:
    world.fails_at, world.before, world.logs = fails_at, ["before"], logs
    with pytest.raises(RuntimeError, match=f"{fails_at} failed") as error, stack:
        pass
    assert world.told == told
    assert ("/var/log/here" in str(error.value)) == (logs is not None), "where to look"
    assert not state_file(settings).exists()
    settings.data_dir.mkdir(exist_ok=True)
    with holding(settings):
        pass


def test_without_room_nothing_is_deployed(settings: Settings, world: World) -> None:
    world.room = {"CPU": 1.0}
    large = settings.model_copy(update={"router": RouterSettings(ray={"num_cpus": 2})})
    stack = Stack(large, world, report=world.reports.append)
    with pytest.raises(RuntimeError, match="PENSTOCK_ROUTER__RAY"), stack:
        pass
    assert world.told == ["check", "stores", "ray", "ray ends", "stores end"]


def test_what_was_deployed_may_stay(stack: Stack, world: World) -> None:
    with stack:
        stack.detach()
    assert world.told == [*BEGINS, "models are left", "ray ends", "stores end"]


def test_who_runs_here_already_is_not_disturbed(
    stack: Stack, world: World, settings: Settings
) -> None:
    settings.data_dir.mkdir()
    with holding(settings), pytest.raises(RuntimeError, match="Another Penstock"), stack:
        pass
    assert world.told == ["check"]


@pytest.mark.parametrize(("page", "left"), [("/readyz", 503), ("/v1/models/tiny", 404)])
def test_it_is_up_when_its_gateway_serves_the_models(
    page: str,
    left: int,
    stack: Stack,
    world: World,
    pages: dict[str, tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages[page] = (left, "")
    monkeypatch.setattr(module, "_START_TIMEOUT_S", -stack._settings.drains_within_s)
    with pytest.raises(RuntimeError, match="not up after 0 s"), stack:
        pass
    assert world.told[-3:] == ["delete all but []", "ray ends", "stores end"]


def test_a_replica_that_does_not_come_is_waited_for_by_name(
    stack: Stack, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_START_TIMEOUT_S", -stack._settings.drains_within_s)
    deploy: Callable[[Settings], None] = world.deploy

    def but_the_router(settings: Settings) -> None:
        deploy(settings)
        asyncio.run(gone())

    async def gone() -> None:
        redis = connect(world.redis_url)
        await leave(redis, world.namespace, "router", "router-1")
        await redis.aclose()

    monkeypatch.setattr(app, "deploy", but_the_router)
    with pytest.raises(RuntimeError, match=r"not up after 0 s: router$"), stack:
        pass


def test_why_an_earlier_start_failed_ends_no_later_one(
    stack: Stack, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)
    world.before = ["p"]
    world.states = [{"p": "DEPLOYING"}] * 4 + [{"p": "RUNNING"}]  # so that it is looked for one
    redis = connect(world.redis_url)

    async def earlier() -> None:
        await tell(redis, world.namespace, StartFailure("router", "no room on the disk", ""))
        await redis.aclose()

    asyncio.run(earlier())
    with stack:
        assert world.told == BEGINS


def test_what_it_replaces_is_gone_before_it_is_up(stack: Stack, world: World) -> None:
    """Of its own alone: what Serve is at elsewhere is nothing to wait for."""
    world.before = ["p"]
    world.states = [{"p": "DEPLOYING", "new": "DEPLOYING"}] * 3 + [{"p": "RUNNING"}]
    with stack:
        assert "waiting for: the new router" in world.reports


def test_models_of_before_that_are_not_wanted_are_removed_once_all_is_up(
    stack: Stack, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []

    async def remove(redis: Any, settings: Settings, workers: Any, name: str) -> None:
        assert "deploy" in world.told
        removed.append(name)

    monkeypatch.setattr(module, "remove_model", remove)
    world.models = ["tiny", "old"]
    with stack:
        pass
    assert removed == ["old"]
    assert "not served any more: old" in world.reports


def test_it_is_tended_until_somebody_takes_it_down(stack: Stack, world: World) -> None:
    assert stack.tend()
    assert world.reports == []
    world.up = False
    assert not stack.tend()
    assert world.reports == ["Penstock was taken down"]


@pytest.mark.parametrize("lasts", [True, False])
def test_what_another_serves_from_now_on_stays_where_the_ground_does(
    lasts: bool, stack: Stack, world: World
) -> None:
    with stack:
        assert stack.tend()
        world.keeper.replaced, world.lasts = True, lasts
        assert not stack.tend()
        assert "another `penstock up` serves" in world.reports[-1]
    assert ("delete all but []" in world.told) is not lasts
    assert world.told[-2:] == ["ray ends", "stores end"]


def test_a_setting_that_there_is_not_is_told(
    stack: Stack, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_QUEU_LIMIT", "3")
    with stack:
        pass
    assert world.reports[0] == "PENSTOCK_QUEU_LIMIT is set, but there is no such setting"


def test_one_in_a_lost_ones_place_begins_without_models(world: World, settings: Settings) -> None:
    """Its keeper brings them: no worker is waited for, nor missed."""
    world.models = []
    with Stack(settings, world, report=world.reports.append, again=True):
        assert world.told == BEGINS
        assert asyncio.run(wanted(world)) == {"tiny"}
    assert world.told == BEGINS + ENDS
