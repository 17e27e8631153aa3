"""A ground of several machines: a Ray cluster that was there before and stays (`penstock up
--address`). What its hosts share is nobody's to start here: Redis and Qdrant are given by URL.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from services.cli.ground.ground import Report
from services.cli.ground.joined_ray import JoinedRay, uses_tls
from services.cli.ground.reached import check_qdrant, check_redis
from services.cli.interruptible import run
from services.common.config import AUTO, Settings, is_loopback
from services.common.locks.secrets import redacted

_LOOK_EVERY_S = 2.0  # whether Serve still runs what was deployed


class ClusterGround:
    """A Ground that is joined and left. Where nothing else is set, replicas listen on the address
    of the node that they run on."""

    lasts = True

    def __init__(self, address: str, report: Report) -> None:
        """`address`: of the cluster's state service, HOST:PORT, or "auto"."""
        self._address = address
        self._report = report
        self._ray: JoinedRay | None = None
        self._namespace = ""
        self._looks = ThreadPoolExecutor(1, "serve")
        self._runs: Future[bool] | None = None  # the last look's answer
        self._look = 0.0

    @property
    def _joined(self) -> JoinedRay:
        assert self._ray is not None
        return self._ray

    @property
    def logs(self) -> Path | None:
        return None

    def checked(self, settings: Settings) -> Settings:
        """The models are not looked at: they lie on the hosts of the workers."""
        _check_given(settings)
        self._ray = JoinedRay(self._address, settings)
        for line in _in_the_clear(settings, self._address):
            self._report(line)
        return _on_nodes(settings)

    @contextmanager
    def stores(self, settings: Settings) -> Iterator[Settings]:
        self._report(f"redis: {redacted(settings.redis_dsn)}")
        run(check_redis(settings))
        run(check_qdrant(settings))
        yield settings

    @contextmanager
    def ray(self, settings: Settings) -> Iterator[None]:
        self._report("ray: joining")
        self._namespace = settings.namespace
        ray = self._joined
        try:
            ray.start()
            nodes = ray.nodes()
            self._report(f"ray: a cluster of {len(nodes)} nodes: {', '.join(sorted(nodes))}")
            if not all(is_loopback(node) for node in nodes):
                _check_reached_from_elsewhere(settings)
            yield
        finally:
            self._looks.shutdown()
            ray.stop()

    def resources(self) -> dict[str, float]:
        return self._joined.resources()

    def tend(self) -> bool:
        """Nothing of it is this process's to start again. Serve is asked in a thread: it answers
        when its controller does, and whoever tends is to hear meanwhile that it is to stop."""
        from services.app import application_name

        if self._runs is not None:
            if not self._runs.done():
                return True
            if not self._runs.result():
                return False
        if time.monotonic() >= self._look:
            self._look = time.monotonic() + _LOOK_EVERY_S
            own = application_name(self._namespace)
            self._runs = self._looks.submit(self._joined.runs, own)
        return True


def _check_given(settings: Settings) -> None:
    needed = {
        "PENSTOCK_REDIS_URL": "redis_url" in settings.model_fields_set,
        "PENSTOCK_QDRANT_URL": bool(settings.qdrant_url),
        "PENSTOCK_INTERNAL_SECRET": bool(settings.internal_secret.get_secret_value()),
    }
    missing = [name for name, given in needed.items() if not given]
    if missing:
        raise ValueError(
            f"--address needs {', '.join(missing)}: what the hosts of a cluster share is not "
            "started here"
        )
    if urlsplit(settings.redis_dsn).scheme == "unix":
        raise ValueError("setting PENSTOCK_REDIS_URL: other hosts do not reach a socket")


def _in_the_clear(settings: Settings, address: str) -> list[str]:
    """What others on the way between the hosts could read, in words."""
    told = []
    if settings.gateway.tls_cert is None:
        told.append(
            "the door has no TLS: keys and texts travel in the clear; see "
            "PENSTOCK_GATEWAY__TLS_CERT"
        )
    if settings.tls_dir is None:
        told.append(
            "no TLS between the services: their secret and all texts travel in the clear; see "
            "PENSTOCK_TLS_DIR"
        )
    if not uses_tls() and not is_loopback(address.rpartition(":")[0].strip("[]")):
        told.append(
            "no TLS between Ray's nodes: its token, with which one runs code on them, travels in "
            "the clear, and so do the settings with their passwords; see RAY_USE_TLS"
        )
    return told


def _on_nodes(settings: Settings) -> Settings:
    changes: dict[str, object] = {
        "ray_token": SecretStr(""),
        "ray_token_file": None,
    }  # not the replicas'
    if "bind_host" not in settings.model_fields_set:
        changes["bind_host"] = AUTO
    if "host" not in settings.gateway.model_fields_set:
        changes["gateway"] = settings.gateway.model_copy(update={"host": AUTO})
    return settings.model_copy(update=changes)


def _check_reached_from_elsewhere(settings: Settings) -> None:
    for name, url in (
        ("PENSTOCK_REDIS_URL", settings.redis_dsn),
        ("PENSTOCK_QDRANT_URL", settings.qdrant_url),
    ):
        if is_loopback(urlsplit(url).hostname or ""):
            raise RuntimeError(f"setting {name}: the cluster's other hosts do not reach a loopback")
