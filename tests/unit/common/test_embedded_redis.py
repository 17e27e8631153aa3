"""The embedded Redis: for one user only, behind a password, and back with its data."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.common.embedded_redis import EmbeddedRedis
from services.common.locks.secrets import redacted
from services.common.redis import connect


def test_without_the_password_it_says_nothing(redis_server: EmbeddedRedis) -> None:
    once = Retry(NoBackoff(), 0)
    with redis.Redis(unix_socket_path=str(redis_server.socket), retry=once) as stranger:
        for command in ("PING", "KEYS *", "CONFIG GET requirepass"):
            with pytest.raises(redis.exceptions.AuthenticationError):
                stranger.execute_command(command)
    assert redis_server.password in redis_server.url
    assert redis_server.password not in redacted(redis_server.url)


def test_the_password_is_on_no_command_line_and_in_no_environment(
    redis_server: EmbeddedRedis,
) -> None:
    process = psutil.Process(redis_server.pid)
    assert redis_server.password not in " ".join(process.cmdline())
    assert redis_server.password not in " ".join(process.environ().values())


async def test_a_flood_of_connections_finds_no_door(redis_server: EmbeddedRedis) -> None:
    """Silent connections fill `maxclients`, without a password, wherever others may connect."""
    connections = psutil.Process(redis_server.pid).net_connections("all")
    ports = [c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN]
    paths = {c.laddr for c in connections if c.family == socket.AF_UNIX and c.laddr}
    assert paths == {str(redis_server.socket)}
    folder = redis_server.socket.parent.stat()
    assert (stat.S_IMODE(folder.st_mode), folder.st_uid) == (0o700, os.geteuid())
    client = connect(redis_server.url)
    most = (await client.config_get("maxclients"))["maxclients"]
    try:
        await client.config_set("maxclients", 20)
        with ExitStack() as strangers:
            for port in ports * 40:
                silent = strangers.enter_context(socket.socket())
                silent.connect(("127.0.0.1", port))
            await client.connection_pool.disconnect()
            assert await client.ping()
    finally:
        await client.config_set("maxclients", most)
        await client.aclose()


def test_ctrl_c_in_the_terminal_is_not_for_it(redis_server: EmbeddedRedis) -> None:
    """It is stopped last, by who started it."""
    assert os.getsid(redis_server.pid) == redis_server.pid != os.getsid(0)


def test_a_long_path_of_the_data_is_none_of_the_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / "redis"
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
    assert (folder / "appendonly.aof").exists()


def test_a_killed_server_comes_back_where_it_was_with_its_data(tmp_path: Path) -> None:
    folder = tmp_path / 'with a space and a "quote"' / "redis"
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as client:
        url = server.url
        client.set("kept", "well")
        psutil.Process(server.pid).kill()
        psutil.Process(server.pid).wait()
        assert server.ended
        server.start()
        assert server.url == url
        assert client.get("kept") == b"well"
    assert EmbeddedRedis(folder).password == server.password
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("error", [redis.TimeoutError, redis.BusyLoadingError])
def test_one_that_loads_its_data_is_waited_for(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    ping, answers = redis.Redis.ping, iter((error("one moment"), error("one more")))

    def slow(client: redis.Redis) -> Any:
        if (answer := next(answers, None)) is not None:
            raise answer
        return ping(client)

    monkeypatch.setattr(redis.Redis, "ping", slow)
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
    assert next(answers, None) is None


def test_one_that_cannot_start_says_why_and_is_not_left_behind() -> None:
    second = EmbeddedRedis()
    second.socket.mkdir()
    with pytest.raises(RuntimeError, match=r"did not start:\n(.|\n)*in use"):
        second.start()
    with pytest.raises(RuntimeError, match="not running"):
        _ = second.pid
    assert not second.ended, "there is none to bring back"
    second.stop()


@pytest.mark.skipif(not shutil.which("setpriv"), reason="nothing else tells of a parent's death")
def test_it_ends_with_who_started_it() -> None:
    script = (
        "import time\n"
        "from services.common.embedded_redis import EmbeddedRedis\n"
        "print(EmbeddedRedis().start().pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    server = psutil.Process(int(owner.stdout.readline()))
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs([server], timeout=20)
    assert not alive
