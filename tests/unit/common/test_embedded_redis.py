"""The embedded Redis: behind a password that nobody is shown, and back with its data."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from services.common.embedded_redis import EmbeddedRedis
from services.common.secrets import redacted


def test_a_stranger_is_refused(redis_server: EmbeddedRedis) -> None:
    with redis.Redis(port=redis_server.port) as stranger:
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


def test_it_listens_on_the_loopback_only(redis_server: EmbeddedRedis) -> None:
    connections = psutil.Process(redis_server.pid).net_connections()
    addresses = {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    assert addresses == {("127.0.0.1", redis_server.port)}


def test_ctrl_c_in_the_terminal_is_not_for_it(redis_server: EmbeddedRedis) -> None:
    """It is stopped last, by who started it."""
    assert os.getsid(redis_server.pid) == redis_server.pid != os.getsid(0)


def test_a_killed_server_comes_back_on_its_port_with_its_data(tmp_path: Path) -> None:
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


def test_one_that_cannot_start_says_why_and_is_not_left_behind(redis_server: EmbeddedRedis) -> None:
    second = EmbeddedRedis(port=redis_server.port)
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
