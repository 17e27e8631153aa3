"""Ranks on other hosts than their engine's, each at an address of its own on this machine: tokens
are those of one device, and what is lost is noticed, and leaves nothing behind."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.locks.certificates import dns_name
from services.worker.engine import EngineClient, EngineConfig, EngineDied, Request
from services.worker.engine.adapters import peft
from services.worker.engine.engine import Engine
from services.worker.engine.parallel.meeting import interface_of
from services.worker.engine.parallel.seats import Lock, Spread
from tests.support import adapters
from tests.support.authority import Authority
from tests.support.checkpoint import write_checkpoint
from tests.support.keepers import OWN, Keeper, kept
from tests.unit.engine.driving import SMALL, drive, greedy, make_engine, make_prompts
from tests.unit.engine.process.test_engine_process import Listener, wait_until_gone

LOCK = Lock(os.urandom(32))
HOW: dict[str, Any] = {"dtype": "float32", "max_batched_tokens": 48}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), hidden=128, seed=0)


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Keeper]]:
    """Two ranks, with certificates."""
    files = Authority().issue(tmp_path_factory.mktemp("tls") / "worker", dns_name("worker"))
    with kept(folder, 2, Lock(LOCK.secret, str(files), dns_name("worker"))) as (spread, (keeper,)):
        yield make_engine(folder, tensor_parallel=2, spread=spread, **HOW), keeper


@pytest.fixture(scope="module")
def apart(two: tuple[Engine, Keeper]) -> Engine:
    return two[0]


@pytest.fixture(scope="module")
def keeper(two: tuple[Engine, Keeper]) -> Keeper:
    return two[1]


def test_tokens_are_those_of_one_device(apart: Engine, folder: Path) -> None:
    """Also with an adapter; what its ranks are sent is larger than a TLS record."""
    one = make_engine(folder, **HOW)
    files = adapters.make(folder.parent / "adapter", folder, seed=1, rank=3)
    read = replace(peft.read(files, folder, 64), id="a")
    asked = [
        Request(f"{index}", prompt, greedy(12), adapter="a" if index % 2 else "")
        for index, prompt in enumerate(make_prompts(6, seed=2))
    ]
    told = []
    for engine in (one, apart):
        assert engine.load_adapter(read) == ""
        told.append(drive(engine, asked).tokens)
    assert told[0] == told[1]


def test_blocks_go_there_and_come_back(apart: Engine) -> None:
    size = apart.info.kv_bytes_per_block
    content = bytes(index * 7 % 251 for index in range(3 * size))
    apart._runner.cache.write([4, 9, 2], content)
    assert bytes(apart._runner.cache.read([9, 4])) == content[size : 2 * size] + content[:size]


def test_ranks_listen_at_their_own_address_alone(apart: Engine, keeper: Keeper) -> None:
    """Where they wait for the engine nobody does any more; gloo, and where it meets, stay."""
    own = apart.executor._team._members[0]._process.pid  # type: ignore[attr-defined]
    for pid, host in ((own, OWN), (keeper.rank, keeper.host)):
        found = psutil.Process(pid).net_connections("inet")
        at = {c.laddr for c in found if c.status == psutil.CONN_LISTEN}
        assert {address.ip for address in at} == {host}
        assert keeper.port not in {address.port for address in at}
    ports = psutil.Process(keeper.process.pid).net_connections("inet")
    assert not [c for c in ports if c.status == psutil.CONN_LISTEN]


def test_a_stranger_in_place_of_a_keeper_is_told_in_words(folder: Path) -> None:
    with kept(folder, 2, LOCK) as (spread, _):
        other = Spread(spread.seats, Lock(os.urandom(32)))
        with pytest.raises(ValueError, match=r"rank 1 at 127\.0\.0\.3 is not reached: "):
            make_engine(folder, tensor_parallel=2, spread=other, **HOW)


def test_what_it_cannot_load_it_tells(folder: Path, tmp_path: Path) -> None:
    with kept(folder, 2, LOCK) as (spread, _):
        away = replace(spread.seats[1], model=str(tmp_path / "not-there"))
        with pytest.raises(ValueError, match=r"rank 1 of 2 at .*not-there"):
            make_engine(
                folder, tensor_parallel=2, spread=Spread((spread.seats[0], away), LOCK), **HOW
            )


def test_a_rank_that_is_unlike_the_first_is_refused(folder: Path, tmp_path: Path) -> None:
    """As of hosts where `auto` means another thing; what it has of its own may differ."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with kept(folder, 2, LOCK) as (spread, (keeper,)):
        seats = spread.seats[0], replace(spread.seats[1], model=str(other))
        unlike = "rank 1 of 2 at 127.0.0.3 has max_model_len 64, the first "
        with pytest.raises(ValueError, match=unlike):
            make_engine(folder, tensor_parallel=2, spread=Spread(seats, LOCK), **HOW)
        keeper.process.wait(10)


class Started:
    """An engine's process, and two ranks of which one is elsewhere."""

    def __init__(self, folder: Path, spread: Spread, keeper: Keeper) -> None:
        config = EngineConfig(model=str(folder), tensor_parallel=2, spread=spread, **(SMALL | HOW))
        self.listener = Listener()
        self.client = EngineClient(config, self.listener)
        self.keeper = keeper

    async def __aenter__(self) -> "Started":
        await self.client.start()
        self.ranks = [psutil.Process(self.client.pid).children()[0].pid, self.keeper.rank]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.stop()
        for pid in self.ranks:
            await asyncio.to_thread(wait_until_gone, pid)

    async def decodes(self) -> None:
        self.client.add(Request("0", [3, 4, 5], greedy(2000)))
        await self.listener.until(lambda: len(self.listener.tokens.get("0", [])) > 2)

    async def dies(self, words: str) -> EngineDied:
        with pytest.raises(EngineDied, match=words) as caught:
            await self.client.wait_closed()
        return caught.value


async def test_a_killed_rank_is_noticed(folder: Path) -> None:
    with kept(folder, 2, LOCK) as (spread, (keeper,)):
        async with Started(folder, spread, keeper) as it, asyncio.timeout(60):
            await it.decodes()
            os.kill(it.ranks[1], signal.SIGKILL)
            async with asyncio.timeout(4):
                death = await it.dies(r"rank 1 of 2 at 127\.0\.0\.3 was ended by signal 9")
            assert death.killed


async def test_a_lost_host_is_noticed(folder: Path) -> None:
    """While nothing runs; its keeper says nothing, and its rank has gone with it."""
    with kept(folder, 2, LOCK) as (spread, (keeper,)):
        async with Started(folder, spread, keeper) as it, asyncio.timeout(60):
            keeper.process.kill()
            async with asyncio.timeout(4):
                death = await it.dies(r"rank 1 of 2 at 127\.0\.0\.3 is lost with its host")
            assert death.killed


async def test_a_rank_that_hangs_is_ended(folder: Path) -> None:
    with kept(folder, 2, LOCK) as (spread, (keeper,)):
        async with Started(folder, spread, keeper) as it, asyncio.timeout(60):
            await it.decodes()
            os.kill(it.ranks[1], signal.SIGSTOP)
            death = await it.dies(r"rank 1 of 2 at 127\.0\.0\.3 shows no life for 5 s")
            assert not death.killed


async def test_nothing_is_left_of_an_engine_that_is_killed(folder: Path) -> None:
    """Of a rank that is stopped neither, nor of its keeper."""
    with kept(folder, 2, LOCK) as (spread, (keeper,)):
        async with Started(folder, spread, keeper) as it, asyncio.timeout(60):
            os.kill(it.ranks[1], signal.SIGSTOP)
            assert it.client.pid is not None
            os.kill(it.client.pid, signal.SIGKILL)
            await asyncio.to_thread(keeper.process.wait, 10)


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9") == "lo"
    with pytest.raises(ValueError, match=r"has the address 240\.0\.0\.1"):
        interface_of("240.0.0.1")


def test_seats_are_as_many_as_ranks(folder: Path) -> None:
    with pytest.raises(ValueError, match="spread has seats for 0 ranks, tensor_parallel is 2"):
        EngineConfig(model=str(folder), tensor_parallel=2, spread=Spread((), LOCK))
