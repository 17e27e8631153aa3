"""A stack on a ground that may hold an earlier one: what it replaces, leaves and takes along."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis as redis_sync
from ray import serve

from services import app
from services.cli.stack import model_keeper
from services.cli.stack import stack as module
from services.cli.stack.stack import Stack
from services.cli.stack.wanted_models import WantedModels
from services.common.config import ModelSpec, Settings
from services.common.discovery import Registration, Replica, leave
from services.common.redis import connect
from services.common.start_failures import StartFailure, tell


class Ground:
    """Nothing is under it; `there` is what Serve runs."""

    logs = None
    lasts = True

    def __init__(self) -> None:
        self.there = True

    def checked(self, settings: Settings) -> Settings:
        return settings

    @contextmanager
    def stores(self, settings: Settings) -> Iterator[Settings]:
        yield settings

    @contextmanager
    def ray(self, settings: Settings) -> Iterator[None]:
        yield

    def resources(self) -> dict[str, float]:
        return {}

    def tend(self) -> bool:
        return self.there


class Serve:
    """Applications by name, each with the state of its deployments; those that are deployed are
    registered at once."""

    def __init__(self, redis_url: str) -> None:
        self.url = redis_url
        self.applications: dict[str, Any] = {}
        self.deployed: list[list[str]] = []
        self.fails = ""  # why a replica does not start
        self.update = "HEALTHY"  # of what is replaced
        self.starts = True  # whether what is deployed is registered, and what it replaces gone
        self._registered: list[Registration] = []

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=dict(self.applications))

    def delete(self, name: str, _blocking: bool) -> None:
        self.applications.pop(name)

    def deploy(self, settings: Settings) -> None:
        names = [app.application_name(settings.namespace, m.name) for m in settings.models]
        self.deployed.append(names)
        for name in (settings.namespace, *names):
            self.applications[name] = self._application(name in self.applications)
        if self.starts:
            self.register(settings)

    def register(self, settings: Settings) -> None:
        asyncio.run(self._register(settings))

    def _application(self, replaces: bool) -> SimpleNamespace:
        status = self.update if replaces else "HEALTHY"
        return SimpleNamespace(
            status="RUNNING" if status == "HEALTHY" else "DEPLOYING",
            message="",
            deployments={"part": SimpleNamespace(status=status)},
        )

    async def _register(self, settings: Settings) -> None:
        client = connect(self.url)
        if self.fails:
            await tell(client, settings.namespace, StartFailure("router", self.fails, ""))
        n = len(self.deployed)
        facts = {"url": f"http://there-{n}", "grpc": "there:1"}
        replicas = [Replica(s, f"{s}-{n}", "h:1", "h", 1, facts=facts) for s in _SERVICES]
        for model in settings.models:
            told = {"role": "both", "model": model.name}
            replicas.append(Replica("worker", f"w-{model.name}-{n}", "h:1", "h", 1, facts=told))
        old, self._registered = self._registered, []
        for replica in replicas:
            lease = Registration(client, settings.namespace, replica, lease_s=60)
            await lease._once()
            self._registered.append(lease)
        for lease in old:
            await leave(client, settings.namespace, lease._replica.service, lease._replica.id)
        await client.aclose()


_SERVICES = ("gateway", "retrieval", "tokenizer", "router")


@pytest.fixture
def runs(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Serve:
    runs = Serve(redis_url)
    monkeypatch.setattr(serve, "status", runs.status)
    monkeypatch.setattr(serve, "delete", runs.delete)
    monkeypatch.setattr(app, "deploy", runs.deploy)
    monkeypatch.setattr(module, "not_ready", lambda url: [])
    monkeypatch.setattr(module, "not_served", lambda *_: [])
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)
    return runs


Made = Callable[..., Stack]


@pytest.fixture
def made(redis_url: str, namespace: str, tmp_path: Path, runs: Serve) -> Made:
    """A stack with so called models."""
    told: Any = {"PENSTOCK_REDIS_URL": redis_url, "namespace": namespace, "data_dir": tmp_path}

    def stack(*models: str, report: Callable[[str], None] = print, **own: Any) -> Stack:
        specs = [ModelSpec(name=name, path="/m").sized(0, 1) for name in models]
        settings = Settings.model_validate({**told, "models": specs, "lease_s": 0.6})
        return Stack(settings, Ground(), report=report, **own)

    return stack


def wanted(redis_url: str, namespace: str) -> set[str]:
    async def look() -> set[str]:
        client = connect(redis_url)
        try:
            return set(await WantedModels(client, namespace).all())
        finally:
            await client.aclose()

    return asyncio.run(look())


def test_a_stack_takes_along_what_it_brought_and_nothing_else(
    made: Made, runs: Serve, namespace: str
) -> None:
    runs.applications = {"model-x": runs._application(False), "other": runs._application(False)}
    with made("a", "b"):
        assert set(runs.applications) == {
            "model-x", "other", namespace, f"{namespace}:a", f"{namespace}:b"
        }  # fmt: skip
    assert set(runs.applications) == {"model-x", "other"}


def test_what_is_detached_stays_and_models_that_its_successor_has_not_end(
    made: Made, runs: Serve, namespace: str, redis_url: str
) -> None:
    first = made("a", "b")
    with first:
        first.detach()
    assert set(runs.applications) == {namespace, f"{namespace}:a", f"{namespace}:b"}
    said: list[str] = []
    second = made("b", "c", report=said.append)
    with second:
        assert set(runs.applications) == {namespace, f"{namespace}:b", f"{namespace}:c"}
        assert "not served any more: a" in said
        second.detach()
    assert wanted(redis_url, namespace) == {"b", "c"}


def test_a_successor_that_does_not_start_takes_along_only_its_own(
    made: Made, runs: Serve, namespace: str, redis_url: str
) -> None:
    first = made("a", "b")
    with first:
        first.detach()
    runs.fails, runs.update = "no such policy", "UPDATING"
    with pytest.raises(RuntimeError, match="no such policy"):
        made("b", "c").__enter__()
    assert set(runs.applications) == {namespace, f"{namespace}:a", f"{namespace}:b"}
    assert wanted(redis_url, namespace) == {"a", "b"}, "whoever keeps those of before, keeps them"


def test_a_successor_is_up_when_serve_has_replaced_all(
    made: Made, runs: Serve, namespace: str
) -> None:
    first = made("a")
    with first:
        first.detach()
    runs.update = "UPDATING"
    said: list[str] = []
    waited = threading.Event()

    def report(line: str) -> None:
        said.append(line)
        if "the new part" in line:
            waited.set()
            runs.update = "HEALTHY"
            for name in (namespace, f"{namespace}:a"):
                runs.applications[name] = runs._application(True)

    second = made("a", report=report)
    with second:
        assert waited.is_set(), said
    assert not runs.applications


def test_a_successor_is_up_when_what_is_new_serves(made: Made, runs: Serve) -> None:
    """Serve may say that all runs while it has not begun to replace what was there before."""
    first = made("a")
    with first:
        first.detach()
    runs.starts = False
    said: list[str] = []

    def report(line: str) -> None:
        said.append(line)
        if line.startswith("waiting for") and not runs.starts:
            runs.starts = True
            threading.Thread(target=runs.register, args=[second._settings]).start()

    second = made("a", report=report)
    with second as running:
        told = ", ".join(["gateway", "retrieval", "tokenizer", "router", "worker of a"])
        assert f"waiting for: {told}" in said
        assert running.url == "http://there-2"


def test_a_stranger_s_failure_is_none_of_ours(
    made: Made, runs: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = runs._application(False)
    strange.status, strange.message = "DEPLOY_FAILED", "of a stranger"
    runs.applications = {"model-x": strange}
    left = [["the gateway's links"], ["the gateway's links"], []]
    monkeypatch.setattr(module, "not_ready", lambda _: left.pop(0))
    with made("a"):
        assert not left, "it was waited for, and failures were looked for"


def test_it_is_over_when_somebody_else_took_it_down(
    made: Made, runs: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    stack = made("a", report=said.append)
    with stack:
        assert stack.tend()
        stack._ground.there = False  # type: ignore[attr-defined]
        assert not stack.tend()
        monkeypatch.delattr(app, "delete_all")  # Serve may not even be there to be asked
    assert said[-1] == "Penstock was taken down"


@pytest.mark.parametrize("lasts", [True, False])
def test_it_is_over_when_another_one_has_deployed_anew(
    made: Made, runs: Serve, namespace: str, lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it finds then is the other's, where it can outlive this one."""
    monkeypatch.setattr(model_keeper, "_LOOK_EVERY_S", 0.05)
    said: list[str] = []
    first, second = made("a", report=said.append), made("b")
    first._ground.lasts = lasts
    second._settings = second._settings.model_copy(
        update={"data_dir": second._settings.data_dir / "of-another-host"}
    )
    with first:
        assert first.tend()
        with second:
            assert second.tend()
            deadline = time.monotonic() + 10
            while first.tend() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert f"another `penstock up` serves '{namespace}' from now on" in said
            second.detach()
    left = {namespace, f"{namespace}:b"}
    assert set(runs.applications) == (left if lasts else set())


def test_models_are_kept_only_once_they_are_served(
    made: Made, runs: Serve, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that is still there would end the models of before, were they not wanted."""
    seen: list[int] = []
    client = redis_sync.Redis.from_url(redis_url)
    key = f"{namespace}:{{models}}:keeper"
    monkeypatch.setattr(module, "not_served", lambda *_: seen.append(client.exists(key)))
    with made("a"):
        assert seen == [0]
        assert client.exists(key)
    client.close()
