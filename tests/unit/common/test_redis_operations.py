"""What docs/operations.md says of Redis: backup while it runs, restore, two passwords at once."""

import shutil
from pathlib import Path

import pytest
import redis as client

from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import RedisAway, connect
from services.gateway.identity.key_record import key_hash
from services.gateway.identity.keys import KeyStore


async def created(server: EmbeddedRedis) -> str:
    own = connect(server.url)
    key, _ = await KeyStore(own, "penstock").create(tenant="acme")
    await own.aclose()
    return key


async def knows(server: EmbeddedRedis, key: str) -> bool:
    own = connect(server.url)
    record = await KeyStore(own, "penstock").find(key_hash(key))
    await own.aclose()
    return record is not None


def appended(folder: Path) -> Path:
    """The file that is written; newer servers have a folder of several."""
    return max(folder.rglob("*.aof"), key=lambda path: path.stat().st_mtime_ns)


async def test_a_copy_of_a_running_redis_is_a_backup(tmp_path: Path) -> None:
    data, backup = tmp_path / "redis", tmp_path / "backup"
    with EmbeddedRedis(data) as server:
        before = await created(server)
        with client.Redis.from_url(server.url) as own:
            own.config_set("appendfsync", "always")
            own.set("more", "x")
        shutil.copytree(data, backup)
        after = await created(server)
        assert await knows(server, after)
    shutil.rmtree(data)
    shutil.copytree(backup, data)
    with EmbeddedRedis(data) as restored:
        assert await knows(restored, before)
        assert not await knows(restored, after), "made after the backup"


async def test_a_copy_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    data = tmp_path / "redis"
    with EmbeddedRedis(data) as server:
        before = await created(server)
        with client.Redis.from_url(server.url) as own:
            own.set("last", "x" * 1000)
    file = appended(data)
    file.write_bytes(file.read_bytes()[:-100])
    with EmbeddedRedis(data) as restored:
        assert await knows(restored, before)
        with client.Redis.from_url(restored.url) as own:
            assert own.get("last") is None


async def test_a_password_is_changed_while_both_hold() -> None:
    with EmbeddedRedis() as server:
        new = connect(server.url.replace(server.password, "the-new-password"))
        stands = connect(server.url)
        await stands.ping()
        with pytest.raises(RedisAway):
            await new.ping()
        with client.Redis.from_url(server.url) as own:
            own.execute_command("ACL", "SETUSER", "default", ">the-new-password")
            await new.ping()
            await stands.ping()
            own.execute_command("ACL", "SETUSER", "default", f"<{server.password}")
        await stands.ping()  # a connection that stands goes on
        late = connect(server.url)
        with pytest.raises(RedisAway):
            await late.ping()
        await new.ping()
        for one in (new, stands, late):
            await one.aclose()
