"""The tokenizer's models follow the registry: what comes is read, what goes is left."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.common import served_models
from services.common.config import ModelSpec, Settings
from services.common.discovery import Registration, Replica
from services.common.errors import PenstockError
from services.common.redis import Redis
from services.tokenizer import catalog as module
from services.tokenizer.catalog import Catalog
from services.tokenizer.models import Models, ServedModel
from tests.support.tokenizers import write_tokenizer
from tests.support.waiting import until


@pytest.fixture
def settings(namespace: str) -> Settings:
    return Settings(namespace=namespace, lease_s=0.6, model_memory_s=1.0)


def checkpoint(folder: Path, name: str, window: int = 512) -> ModelSpec:
    path = folder / name
    path.mkdir()
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": window}))
    return ModelSpec(name=name, path=str(path))


async def serving(redis: Redis, settings: Settings, spec: ModelSpec) -> Registration:
    entry = served_models.entry(redis, settings, spec)
    await entry.start()
    return entry


async def missing(catalog: Catalog, name: str) -> bool:
    try:
        await catalog.find(name)
    except PenstockError as error:
        return error.reason == "model_not_found"
    return False


async def test_models_come_and_go_with_their_workers(
    redis: Redis, settings: Settings, tmp_path: Path, model: ServedModel
) -> None:
    first = await serving(redis, settings, checkpoint(tmp_path, "first"))
    catalog = Catalog(redis, settings, Models([model]))
    await catalog.start()
    assert {m.name for m in catalog.models.info()} == {"tiny", "first"}, "those of the start"
    second = await serving(redis, settings, checkpoint(tmp_path, "second", window=64))
    catalog.models.bound("second", 32)  # its workers' room is known before it is read
    found = await catalog.find("second")
    assert (found.name, found.window) == ("second", 32), "asked for before the view was renewed"
    assert await missing(catalog, "third")

    await first.stop()
    assert await served_models.ServedModels(redis, settings).has("first"), "it may be back"
    assert not await missing(catalog, "first")
    await until(lambda: "first" not in catalog.models, 10, "its memory is over")
    assert await missing(catalog, "first")
    assert not await missing(catalog, "second"), "its worker renews it"
    await second.stop()
    await served_models.forget(redis, settings.namespace, "second")
    await until(lambda: "second" not in catalog.models, 10)
    assert not await missing(catalog, "tiny"), "what it was told of at its start stays"
    await catalog.stop()


async def test_a_request_waits_for_its_model_to_be_read(
    redis: Redis, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a checkpoint that cannot be read yet is tried again."""
    spec = checkpoint(tmp_path, "late")
    hidden = Path(spec.path).rename(tmp_path / "hidden")
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    tried: list[Any] = []
    load = module.load
    monkeypatch.setattr(module, "load", lambda *given: (tried.append(given), load(*given))[1])
    catalog = Catalog(redis, settings, Models())
    await catalog.start()
    entry = await serving(redis, settings, spec)
    asked = asyncio.create_task(catalog.find("late"))
    await until(lambda: len(tried) >= 2, 10)
    assert not asked.done()
    hidden.rename(spec.path)
    assert (await asked).name == "late"
    await entry.stop()
    await catalog.stop()


async def test_a_checkpoint_that_cannot_be_read_holds_up_neither_the_start_nor_a_request(
    redis: Redis, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    entry = await serving(redis, settings, ModelSpec(name="odd", path=str(tmp_path / "none")))
    catalog = Catalog(redis, settings, Models())
    async with asyncio.timeout(10):
        await catalog.start()
        assert await missing(catalog, "odd")
    await catalog.stop()
    await entry.stop()


async def test_another_checkpoint_of_the_same_name_takes_its_place(
    redis: Redis, settings: Settings, tmp_path: Path
) -> None:
    old, new = checkpoint(tmp_path, "old"), checkpoint(tmp_path, "new", window=100)
    entry = await serving(redis, settings, ModelSpec(name="m", path=old.path))
    catalog = Catalog(redis, settings, Models())
    await catalog.start()
    before = await catalog.find("m")
    await entry.stop()
    entry = await serving(redis, settings, ModelSpec(name="m", path=new.path))
    await until(lambda: catalog.models["m"].window == 100, 10)
    assert before.window == 512, "who took it keeps it"
    await entry.stop()
    await catalog.stop()


async def test_an_entry_that_is_no_model_is_passed_over(
    redis: Redis, settings: Settings, tmp_path: Path
) -> None:
    """The view of the others goes on."""
    odd = [
        Replica("model", "no path", "", "", 0),
        Replica("model", "?name", "", "", 0, facts={"path": "/odd"}),
    ]
    catalog = Catalog(redis, settings, Models())
    await catalog.start()
    entries = [Registration(redis, settings.namespace, each, 60.0) for each in odd]
    for each in entries:
        await each.start()
    for each in odd:
        assert await missing(catalog, each.id)
    entries.append(await serving(redis, settings, checkpoint(tmp_path, "good")))
    await until(lambda: "good" in catalog.models, 10)
    assert [m.name for m in catalog.models.info()] == ["good"]
    for each in entries:
        await each.stop()
    await catalog.stop()
