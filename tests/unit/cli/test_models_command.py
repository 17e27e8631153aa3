"""`penstock models`: what it says of a running Penstock's models, and when it returns."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.cli.commands import models
from services.cli.main import main, parser
from services.cli.running import Running
from services.cli.stack.wanted_models import WantedModels
from services.common.config import ModelSpec, Settings
from services.common.discovery import Registration, Replica
from services.common.redis import Redis, connect
from services.common.served_models import READING, Checkpoint, entry, forget
from services.gateway.identity.audit import AuditLog
from tests.support.waiting import until

Looks = Callable[[int], Awaitable[None]]

DEMO = Path("models/demo").resolve()


@dataclass
class Install:
    """A stack that runs, as far as the command can see."""

    redis: Redis
    wanted: WantedModels
    settings: Settings
    registered: list[Registration]

    async def worker(self, model: str, role: str = "both") -> None:
        facts = {"role": role, "model": model}
        number = len(self.registered)
        await self._register(Replica("worker", f"w{number}", "h:1", "h", 1, facts=facts))

    async def listed(self, name: str) -> None:
        registration = entry(self.redis, self.settings, checkpoint(name))
        await registration.start()
        self.registered.append(registration)

    async def reads(self, why_not: str, *names: str) -> None:
        """The tokenizer has these models, or why not."""
        facts = {str(checkpoint(name)): why_not for name in names}
        reading = Replica("tokenizer", "t", "", "", 0, facts=facts)
        told = Registration(self.redis, self.settings.namespace, reading, 60, under=READING)
        await told.start()
        self.registered.append(told)

    async def _register(self, replica: Replica) -> None:
        registration = Registration(self.redis, self.settings.namespace, replica, lease_s=60)
        await registration.start()
        self.registered.append(registration)


def checkpoint(name: str) -> Checkpoint:
    return Checkpoint(name, "d", "t", f"/of/{name}")


def spec(name: str) -> ModelSpec:
    return ModelSpec(name=name, path=f"/of/{name}").sized(0, 1)


@pytest.fixture
async def install(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Install]:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(models, "_LOOK_EVERY_S", 0.02)
    running = Running("http://h", "h:1", redis_url, namespace, "psk", 1)
    monkeypatch.setattr(models, "find_running", lambda _settings: running)
    redis = connect(redis_url)
    wanted = WantedModels(redis, namespace)
    install = Install(redis, wanted, Settings(namespace=namespace), [])
    yield install
    for registration in install.registered:
        await registration.stop()
    await redis.aclose()


async def command(*arguments: str) -> int:
    return await asyncio.to_thread(models.main, parser().parse_args(["models", *arguments]))


async def test_each_model_is_listed_with_its_workers_and_what_it_waits_for(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    apart = ModelSpec(name="apart", path="/of/apart").sized(1, 1)
    await install.wanted.start_with([spec("whole"), spec("new"), apart], "keeper")
    for role in ("both", "both"):
        await install.worker("whole", role)
    await install.worker("apart", "decode")
    await install.worker("gone")
    await install.wanted.add(spec("unread"))
    await install.worker("unread")
    for name in ("whole", "apart", "gone", "new", "unread"):
        await install.listed(name)
    await install._register(Replica("tokenizer", "t", "h:1", "h", 1))
    await install.reads("", "whole", "apart")
    await install.wanted.failed("broken", "no room")
    assert await command("list") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    assert rows == [
        ["apart", "/of/apart", "1", "waits for prefill worker of apart"],
        ["broken", "", "0", "failed: no room"],
        ["gone", "/of/gone", "1", "leaves"],
        ["new", "/of/new", "0", "waits for worker of new"],
        ["unread", "/of/unread", "1", "waits for t to read it: soon"],
        ["whole", "/of/whole", "2", "served"],
    ]


class Said(list[str]):
    """What the command reports: it runs in a thread of its own, and what is captured of a thread
    that prints may lack a line."""

    async def has(self, line: str) -> None:
        """Waits until the command has said it."""
        await until(lambda: line in self, 60, line)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    said = Said()
    monkeypatch.setattr(models, "_report", said.append)
    return said


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Waits until the command has looked so many times more at who knows a model."""
    made = 0
    knowing = models._Stack.knowing

    def counted(stack: models._Stack, name: str) -> list[str]:
        nonlocal made
        made += 1
        return knowing(stack, name)

    async def more(count: int) -> None:
        last = made + count
        await until(lambda: made >= last, 60, "it looks")

    monkeypatch.setattr(models._Stack, "knowing", counted)
    return more


async def test_adding_waits_for_the_workers_and_then_for_the_model_to_be_known(
    install: Install, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    await install._register(Replica("tokenizer", "t", "h:1", "h", 1))
    await install.wanted.start_with([], "keeper")
    adding = asyncio.create_task(
        command("add", str(DEMO), "--name", "second", "--prefill", "0", "--decode", "1")
    )
    await said.has("waiting for: worker of second")
    assert (await install.wanted.all())["second"].path == str(DEMO)
    await install.worker("second")
    await said.has("waiting for: model second")
    assert not adding.done()
    await install.listed("second")
    await install.reads("no such file", "second")
    await said.has("waiting for: t to read it: no such file")
    await install.reads("", "second")
    assert await adding == 0
    assert capsys.readouterr().out == "second is served\n"
    with pytest.raises(RuntimeError, match="there is a model called 'second'"):
        await command("add", str(DEMO), "--name", "second")


async def test_who_stops_waiting_hears_that_it_is_added_all_the_same(
    install: Install, said: Said
) -> None:
    await install.wanted.start_with([], "keeper")
    stack = models._Stack(install.redis, install.settings)
    audit = AuditLog(install.redis, install.settings.namespace, 60)
    adding = asyncio.create_task(models._add(spec("s"), install.wanted, stack, audit))
    await said.has("waiting for: worker of s")
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert said[-1] == "it is added all the same; `penstock models remove s` ends it"


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        (lambda wanted: wanted.give_up("second", "no room"), "no room"),
        (lambda wanted: wanted.remove("second"), "it was removed meanwhile"),
    ],
)
async def test_one_that_will_not_be_served_is_not_waited_for(
    install: Install, happens: Callable[[WantedModels], AsyncIterator[None]], told: str
) -> None:
    await install.wanted.start_with([], "keeper")
    adding = asyncio.create_task(command("add", str(DEMO), "--name", "second"))

    async def wanted() -> bool:
        return "second" in await install.wanted.all()

    await until(wanted, 10)
    await happens(install.wanted)  # type: ignore[misc]
    with pytest.raises(RuntimeError, match=f"'second' is not served: {told}"):
        await adding


async def test_removing_waits_until_nothing_of_it_runs(
    install: Install, said: Said, looks: Looks, capsys: pytest.CaptureFixture[str]
) -> None:
    await install.wanted.start_with([spec("first"), spec("second")], "keeper")
    await install.wanted.runs(["first", "second"])
    await install.listed("second")
    await install.reads("", "first", "second")
    removing = asyncio.create_task(command("remove", "second"))
    await said.has("running requests finish first")
    assert set(await install.wanted.all()) == {"first"}
    await install.wanted.ended("second")
    await asyncio.sleep(5 * models._LOOK_EVERY_S)
    assert not removing.done(), "it is listed still"
    await forget(install.redis, install.settings, lambda one: one.model == "second")
    await looks(3)
    assert not removing.done(), "a tokenizer has it still"
    await install.reads("", "first")
    assert await removing == 0
    assert capsys.readouterr().out == "second is removed\n"
    [line] = await AuditLog(install.redis, install.settings.namespace).read(10)
    assert (line.action, line.what) == ("model.remove", "model:second")
    assert line.who.startswith("cli:")
    with pytest.raises(RuntimeError, match="no model or adapter called 'second'; there are: first"):
        await command("remove", "second")
    await install.wanted.add_adapter("first", "pirate", "/pirate")
    with pytest.raises(RuntimeError, match=r"there are: first, pirate$"):
        await command("remove", "second")


async def test_removing_an_adapter_waits_until_no_tokenizer_has_it(
    install: Install, said: Said, looks: Looks, capsys: pytest.CaptureFixture[str]
) -> None:
    adapted = spec("first").model_copy(update={"adapters": {"pirate": "/pirate"}})
    await install.wanted.start_with([adapted], "keeper")
    await install.reads("", "first", "pirate")
    removing = asyncio.create_task(command("remove", "pirate"))
    await said.has("running requests finish first")
    await looks(3)
    assert not removing.done()
    await install.reads("", "first")
    assert await removing == 0
    assert capsys.readouterr().out == "pirate is removed\n"


async def test_what_is_removed_and_yet_known_is_told(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_READ_S", 0.0)
    await install.wanted.start_with([spec("first")], "keeper")
    await install.reads("", "first")
    with pytest.raises(RuntimeError, match=r"'first' is removed, and yet known to t$"):
        await command("remove", "first")


def test_without_a_running_penstock_there_is_nothing_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    assert main(["models", "list"]) == 1
    assert str(tmp_path) in capsys.readouterr().err


async def test_one_that_was_left_on_a_cluster_is_listed_and_no_more(
    install: Install,
    redis_url: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(models, "find_running", lambda _settings: None)
    with pytest.raises(RuntimeError, match="no `penstock up` runs with"):
        await command("list")
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_NAMESPACE", namespace)
    await install.wanted.start_with([spec("whole")], "keeper")
    assert await command("list") == 0
    assert "whole" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="deploy again with all of them"):
        await command("remove", "whole")
    assert "whole" in await install.wanted.all()


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    ("given", "names"),
    [
        (
            ["--worker", '{"threads": "x"}'],
            r"^--worker \(threads\): Input should be",
        ),
        (["--name", "/odd"], "^--name: a model's name has"),
        (["--name", "a/b c"], "^--name: a model's name has"),
        (["--name", "a\n"], "^--name: a model's name has"),
    ],
)
async def test_a_wrong_argument_is_told_by_its_name(given: list[str], names: str) -> None:
    with pytest.raises(ValueError, match=names) as told:
        await command("add", str(DEMO), *given)
    assert "pydantic" not in str(told.value)
