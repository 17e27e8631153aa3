"""The chart's Redis on this machine: a real server, started by the rendered script with the
rendered configuration and passwords, on a port of the loopback and without TLS."""

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.common.children import dying_with_parent
from services.common.embedded_redis import binary
from tests.deploy.manifests import Pod, Release, secret_value
from tests.support.laptop import free_port
from tests.support.waiting import until

_OF_TLS = re.compile(r"^(tls-.*|port 0)$", re.MULTILINE)


class ChartRedis:
    """Runs from `start` to `close`."""

    def __init__(self, release: Release, folder: Path) -> None:
        self._folder = folder
        self._release = release
        self.port = free_port()
        self.log = folder / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, **environment: str) -> None:
        """With other passwords than those of the release, if any. Raises RuntimeError with what the
        script said when it ends."""
        self._folder.mkdir(parents=True, exist_ok=True)
        [pod] = self._release.pods_of("redis")
        [container] = pod.spec["containers"]
        given = {e["name"]: secret_value(self._release, e) for e in container["env"]}
        self._write_files(pod)
        path = f"{Path(binary()).parent}:{os.environ['PATH']}"  # redis-server, redis-cli
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*dying_with_parent(), "sh", str(self._folder / "start.sh")],
                env={**given, **environment, "PATH": path},
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        await until(self._is_up, 20, "redis-server answers")

    def _write_files(self, pod: Pod) -> None:
        [volume] = [v for v in pod.spec["volumes"] if "configMap" in v]
        files = self._release.one("ConfigMap", volume["configMap"]["name"])["data"]
        for name, text in files.items():
            text = text.replace("--tls --insecure ", f"-p {self.port} ")
            for folder in ("/run/redis", "/etc/redis", "/data"):
                text = text.replace(folder, str(self._folder))
            if name == "redis.conf":
                text = _OF_TLS.sub("", text) + f"bind 127.0.0.1\nport {self.port}\n"
            (self._folder / name).write_text(text)

    def _is_up(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(self.log.read_text())
        with suppress(FileNotFoundError):
            return self.ready()
        return False

    def here(self, url: str) -> str:
        """A URL of the rendered Redis, as one of this server."""
        split = urlsplit(url)
        who, at, _ = split.netloc.rpartition("@")
        return split._replace(scheme="redis", netloc=f"{who}{at}127.0.0.1:{self.port}").geturl()

    def ready(self) -> bool:
        """What the pod's probes ask."""
        done = subprocess.run(
            ["sh", str(self._folder / "ready.sh")],
            env={"PATH": f"{Path(binary()).parent}:{os.environ['PATH']}"},
            capture_output=True,
        )
        return done.returncode == 0

    def as_user(self, name: str, password: str) -> "redis.Redis":
        return redis.Redis(
            port=self.port,
            username=name,
            password=password,
            decode_responses=True,
            retry=Retry(NoBackoff(), 0),
        )

    def as_admin(self) -> "redis.Redis":
        return self.as_user("admin", (self._folder / "admin").read_text())

    def refused(self) -> list[str]:
        """What users were refused, and so would have needed: a command or a key each. Not CLIENT,
        of which a newer Redis counts what a library says of itself as harmless, nor who came with
        another password: that may be anybody on this machine who takes this for his own Redis."""
        with self.as_admin() as admin:
            entries = [e for e in admin.acl_log() if e["reason"] != "auth"]
            return [e["object"] for e in entries if e["object"] != "client"]

    def close(self) -> None:
        if self._process is not None:  # and what its script left running beside it, as a pod's end
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()
