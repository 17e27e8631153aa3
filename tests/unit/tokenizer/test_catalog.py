"""The tokenizer's models follow the registry: what comes is read, what goes is left, and of two
checkpoints of a name the one that its workers stand for is chosen."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common import served_models
from services.common.config import Settings
from services.common.discovery import Directory, Registration, Replica
from services.common.errors import PenstockError
from services.common.redis import Redis
from services.common.served_models import READING, Checkpoint, ServedModels, adapted
from services.tokenizer.checkpoints import catalog as module
from services.tokenizer.checkpoints.catalog import Catalog
from services.tokenizer.checkpoints.pools import Pools
from tests.support.served import checkpoint_of, listing
from tests.support.tokenizers import write_tokenizer
from tests.support.waiting import until


@pytest.fixture
def settings(namespace: str) -> Settings:
    return Settings(namespace=namespace, lease_s=0.6, model_memory_s=1.0)


@pytest.fixture
async def catalog(redis: Redis, settings: Settings) -> AsyncIterator[Catalog]:
    """Started; its registry was empty."""
    pools = Pools(redis, settings)
    await pools.start()
    made = Catalog(redis, settings, "tokenizer-1", pools)
    await made.start()
    yield made
    await made.stop()
    await pools.stop()


def checkpoint(folder: Path, name: str, window: int = 512, model: str = "") -> Checkpoint:
    path = folder / name
    path.mkdir()
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": window}))
    return checkpoint_of(path, model or name)


async def missing(catalog: Catalog, name: str) -> bool:
    try:
        await catalog.find(name)
    except PenstockError as error:
        return error.reason == "model_not_found"
    return False


async def names(catalog: Catalog) -> set[str]:
    return {model.name for model in await catalog.all()}


def worker_of(redis: Redis, settings: Settings, served: Checkpoint, **facts: str) -> Registration:
    told = {"model": served.model, "digest": served.digest, "max_running": "8", **facts}
    id = f"worker-{served.digest[:8]}"
    replica = Replica("worker", id, "h:1", "h", 1, facts=told)
    return Registration(redis, settings.namespace, replica, settings.lease_s)


async def test_models_come_and_go_with_their_workers(
    redis: Redis, settings: Settings, catalog: Catalog, tmp_path: Path
) -> None:
    assert await missing(catalog, "first")
    long = settings.model_copy(update={"model_memory_s": 3600.0})
    first = await listing(redis, long, checkpoint(tmp_path, "first"))
    assert await names(catalog) == {"first"}, "as the registry is now"
    second = await listing(redis, settings, checkpoint(tmp_path, "second", window=64))
    found = await catalog.find("second")
    assert (found.name, found.window) == ("second", 64), "asked for before the view was renewed"
    assert await missing(catalog, "third")

    await first.stop()
    assert await ServedModels(redis, settings).has("first"), "it may be back"
    assert not await missing(catalog, "first")
    brief = await listing(redis, settings, checkpoint(tmp_path, "brief"))
    await catalog.find("brief")
    await brief.stop()
    await until(lambda: missing(catalog, "brief"), 10, "its memory is over")
    assert not await missing(catalog, "first"), "its own is not"
    assert not await missing(catalog, "second"), "its worker renews it"
    await second.stop()
    await served_models.forget(redis, settings, lambda one: one.model == "second")
    await until(lambda: missing(catalog, "second"), 10)


async def test_an_adapter_is_its_model_by_another_name(
    redis: Redis,
    settings: Settings,
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read once: window, room and standing are the model's."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(module, "_RETRY_S", (0.1,))
    base = checkpoint(tmp_path, "base")
    served = adapted(base, "pirate", "d1")
    await listing(redis, settings, served)
    with pytest.raises(PenstockError) as refused:
        await catalog.find("pirate")
    assert refused.value.reason == "model_not_read"
    await listing(redis, settings, base)
    worker = worker_of(redis, settings, base, max_model_len="100")
    await worker.start()

    async def read() -> bool:
        return {one.name: one.parent for one in await catalog.all()} == {
            "base": "",
            "pirate": "base",
        }

    await until(read, 10)
    found, own = await catalog.find("pirate"), await catalog.find("base")
    assert found.tokenizer is own.tokenizer
    assert (found.routed_as, found.checkpoint) == ("base", served.digest)
    assert served.digest not in (base.digest, adapted(base, "pirate", "d2").digest)
    await until(lambda: window_is(catalog, "pirate", 100), 10)
    assert (await catalog.exactly("pirate", served.digest)).name == "pirate"


async def test_an_adapter_does_not_wait_for_a_model_that_is_read_no_more(
    redis: Redis,
    settings: Settings,
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That was served no more amid its first reading, and is again."""
    monkeypatch.setattr(module, "_RETRY_S", (0.02,))
    load, go_on = module.load, threading.Event()
    monkeypatch.setattr(module, "load", lambda *given: (go_on.wait(), load(*given))[1])
    base = checkpoint(tmp_path, "base")
    served = adapted(base, "pirate", "d1")
    entry = await listing(redis, settings, base)
    try:
        await until(lambda: str(base) in catalog._readings, 10)
        adapter = await listing(redis, settings, served)
        await until(lambda: str(served) in catalog._readings, 10)
        await entry.stop()
        await until(lambda: str(base) not in catalog._readings, 10)
        reading = catalog._readings[str(served)]
        await until(lambda: reading.why_not.endswith("its model 'base' is not read"), 10)
    finally:
        go_on.set()
    entry = await listing(redis, settings, base)
    await until(lambda: reading.model is not None, 10)
    for each in (entry, adapter):
        await each.stop()


async def window_is(catalog: Catalog, name: str, tokens: int) -> bool:
    return (await catalog.find(name)).window == tokens


async def test_models_of_lost_workers_stay_known(
    redis: Redis, settings: Settings, catalog: Catalog, tmp_path: Path
) -> None:
    """Longer than those of workers that were stopped."""
    lost = await listing(redis, settings, checkpoint(tmp_path, "lost"))
    stopped = await listing(redis, settings, checkpoint(tmp_path, "stopped"))
    await catalog.find("stopped")
    assert lost._task is not None
    lost._task.cancel()
    await stopped.stop()
    await until(lambda: missing(catalog, "stopped"), 10)
    assert not await missing(catalog, "lost")


async def test_none_of_many_who_ask_at_once_hears_that_a_new_model_is_missing(
    redis: Redis, settings: Settings, catalog: Catalog, tmp_path: Path
) -> None:
    """While others ask for what is not there."""
    looks = 0
    refresh = catalog._listed._directory.refresh

    async def look() -> None:
        nonlocal looks
        looks += 1
        await refresh()

    catalog._listed.look._look = look
    flood = [asyncio.create_task(missing(catalog, f"none-{n}")) for n in range(100)]
    await asyncio.sleep(0)
    entry = await listing(redis, settings, checkpoint(tmp_path, "new"))
    found = await asyncio.gather(*(missing(catalog, "new") for _ in range(100)))
    assert not any(found)
    assert all(await asyncio.gather(*flood))
    assert looks <= 3
    await entry.stop()


async def test_a_request_waits_for_its_model_to_be_read(
    redis: Redis,
    settings: Settings,
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a checkpoint that cannot be read yet is tried again."""
    spec = checkpoint(tmp_path, "late")
    hidden = Path(spec.path).rename(tmp_path / "hidden")
    monkeypatch.setattr(module, "_RETRY_S", (0.05,))
    tried: list[Any] = []
    load = module.load
    monkeypatch.setattr(module, "load", lambda *given: (tried.append(given), load(*given))[1])
    entry = await listing(redis, settings, spec)
    asked = asyncio.create_task(catalog.find("late"))
    await until(lambda: len(tried) >= 2, 10)
    assert not asked.done()
    hidden.rename(spec.path)
    assert (await asked).name == "late"
    await entry.stop()


class PanicException(BaseException):
    """As of a library's Rust code."""


@pytest.mark.parametrize(
    "odd", [TypeError("unhashable"), RuntimeError("jinja's"), PanicException("at src/lib.rs")]
)
async def test_whatever_reading_dies_of_is_told_and_it_is_tried_again(
    redis: Redis,
    settings: Settings,
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    odd: BaseException,
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", (0.02,))
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    load, failures = module.load, 5

    def strange(*given: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0 or not mended.is_set():
            raise odd
        return load(*given)

    mended = asyncio.Event()
    monkeypatch.setattr(module, "load", strange)
    told = Directory(redis, settings.namespace, READING, settings.lease_s)
    await told.start()
    served = checkpoint(tmp_path, "m")
    entry = await listing(redis, settings, served)
    assert await names(catalog) == set()
    with pytest.raises(PenstockError) as refused:
        await catalog.find("m")
    assert (refused.value.code, refused.value.reason) == (
        grpc.StatusCode.UNAVAILABLE,
        "model_not_read",
    ), "it is served, so it is no 404"

    def why() -> str:
        reading = told.replicas.get("tokenizer-1")
        return reading.facts.get(str(served), "") if reading else ""

    await until(lambda: str(odd) in why(), 10, "the registry tells it")
    await until(lambda: failures < 0, 10)
    logged = [r for r in caplog.records if "cannot be tokenized for" in r.message]
    assert len(logged) == 1, "once, however often it is tried"
    mended.set()

    async def served_now() -> bool:
        return await names(catalog) == {"m"}

    await until(served_now, 10)
    await until(lambda: str(served) in told.replicas["tokenizer-1"].facts and not why(), 10)
    await told.stop()
    await entry.stop()


async def test_while_a_checkpoint_is_replaced_both_are_read_and_all_choose_the_same(
    redis: Redis, settings: Settings, catalog: Catalog, tmp_path: Path
) -> None:
    old = checkpoint(tmp_path, "old", window=64, model="m")
    new = checkpoint(tmp_path, "new", window=100, model="m")
    entries = [await listing(redis, settings, served) for served in (old, new)]
    workers = [
        worker_of(redis, settings, old, began="1", max_model_len="77"),
        worker_of(redis, settings, new, began="2", max_running="4", max_model_len="80"),
    ]
    for worker in workers:
        await worker.start()

    async def chosen(*replaced: str) -> tuple[str, int]:
        found = await catalog.find("m", replaced)
        return found.checkpoint, found.window

    async def is_chosen(served: Checkpoint) -> bool:
        return (await chosen())[0] == served.digest

    await until(lambda: is_chosen(old), 10, "it can take more")
    await until(lambda: has_room(catalog, old), 10)
    assert await chosen() == (old.digest, 77), "in its workers' window, which yarn makes longer"
    await until(lambda: has_room(catalog, new), 10)
    assert await chosen(old.digest) == (new.digest, 80), "told to be replaced"
    assert (await catalog.exactly("m", new.digest)).checkpoint == new.digest
    before = await catalog.find("m")
    await workers[0].stop()
    await until(lambda: is_chosen(new), 10)
    assert (await catalog.exactly("m", old.digest)).window == 77, "for what was begun with it"
    assert [(m.name, m.window) for m in await catalog.all()] == [("m", 80)]
    assert before.window == 77, "who took it keeps it"
    with pytest.raises(PenstockError) as refused:
        await catalog.exactly("m", "another")
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    for each in (workers[1], *entries):
        await each.stop()


async def has_room(catalog: Catalog, served: Checkpoint) -> bool:
    return catalog._pools.room(served.model, served.digest) is not None


async def test_a_checkpoint_that_lies_elsewhere_on_each_host_is_read_once(
    redis: Redis,
    settings: Settings,
    catalog: Catalog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their workers write one entry in turn. Where this host lacks one path, the other is tried."""
    monkeypatch.setattr(module, "_RETRY_S", (0.02,))
    here = checkpoint(tmp_path, "m")
    there = replace(here, path=str(tmp_path / "elsewhere"))
    loads: list[str] = []
    load = module.load
    monkeypatch.setattr(
        module, "load", lambda served, *more: (loads.append(served.path), load(served, *more))[1]
    )
    entries = [await listing(redis, settings, there)]
    await until(lambda: there.path in loads, 10)
    entries.append(await listing(redis, settings, here))
    assert (await catalog.find("m")).checkpoint == here.digest
    count = len(loads)
    for served in (there, here, there):
        entries.append(await listing(redis, settings, served))
        await catalog.all()
    assert len(loads) == count
    for entry in entries:
        await entry.stop()


async def test_an_entry_that_is_no_model_is_passed_over(
    redis: Redis, settings: Settings, catalog: Catalog, tmp_path: Path
) -> None:
    """The view of the others goes on."""
    whole = {"model": "?name", "digest": "d", "text_digest": "t", "path": "/odd"}
    odd = [
        Replica("model", "no path", "", "", 0),
        Replica("model", "?name", "", "", 0, facts=whole),
    ]
    entries = [Registration(redis, settings.namespace, each, 60.0) for each in odd]
    for each in entries:
        await each.start()
    for each in odd:
        assert await missing(catalog, each.id)
    entries.append(await listing(redis, settings, checkpoint(tmp_path, "good")))
    assert await names(catalog) == {"good"}
    for each in entries:
        await each.stop()


async def test_a_checkpoint_that_cannot_be_read_holds_up_neither_the_start_nor_a_request(
    redis: Redis, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    gone = replace(checkpoint(tmp_path, "odd"), path=str(tmp_path / "none"))
    entry = await listing(redis, settings, gone)
    catalog = Catalog(redis, settings, "tokenizer-1", Pools(redis, settings))
    async with asyncio.timeout(10):
        await catalog.start()
        with pytest.raises(PenstockError, match="can be read"):
            await catalog.find("odd")
        assert await catalog.all() == []
    await catalog.stop()
    await entry.stop()
