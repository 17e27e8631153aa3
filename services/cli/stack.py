"""All of Penstock on this machine: Redis, Ray, and the graph of services/app.py."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.cli.ray_cluster import RayCluster
from services.cli.running import Running, find_running, state_file
from services.common.config import ModelSpec, Settings, unknown_names
from services.common.discovery import Directory, Replica
from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import connect
from services.common.secrets import private_folder, redacted
from services.gateway.keys import KeyStore, key_hash
from services.worker.engine.model_config import UnsupportedModel, read_config

Report = Callable[[str], None]
_START_TIMEOUT_S = 300.0  # a large checkpoint takes long to load; progress shows what is waited for
_LAPTOP_TENANT = "local"


class Stack:
    """Starts everything in order, reports what is being waited for, and leaves nothing behind.

    with Stack(settings, prefill=1, decode=1, report=print) as running: ...
    """

    def __init__(self, settings: Settings, *, prefill: int, decode: int, report: Report) -> None:
        # Absolute: Ray's processes may have another working directory.
        self._settings = settings.model_copy(update={"data_dir": settings.data_dir.resolve()})
        self._prefill = prefill
        self._decode = decode
        self._report = report
        self._undo = ExitStack()

    def __enter__(self) -> Running:
        with self._undo:
            running = self._start()
            self._undo = self._undo.pop_all()
        return running

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _start(self) -> Running:
        other = find_running(self._settings)
        if other is not None:
            raise RuntimeError(
                f"Penstock already runs here at {other.url} (pid {other.pid}); "
                "stop it, or choose another PENSTOCK_DATA_DIR"
            )
        for name in unknown_names(os.environ):
            self._report(f"{name} is set, but there is no such setting")
        # What can be told now is told now, not by a replica that fails a minute later.
        for model in self._settings.models:
            _check_checkpoint(model)
        _check_port(self._settings.gateway.host, self._settings.gateway.port)
        private_folder(self._settings.data_dir)
        settings = self._start_redis()
        self._start_ray()
        gateway = asyncio.run(self._start_services(settings))
        running = Running(
            url=gateway.facts["url"],
            grpc=gateway.facts["grpc"],
            redis_url=settings.redis_url,
            namespace=settings.namespace,
            key=asyncio.run(_laptop_key(settings)),
            pid=os.getpid(),
        )
        self._write_state(running)
        return running

    def _start_redis(self) -> Settings:
        if "redis_url" in self._settings.model_fields_set:
            self._report(f"redis: {redacted(self._settings.redis_url)}")
            return self._settings
        redis = self._undo.enter_context(EmbeddedRedis(self._settings.data_dir / "redis"))
        self._report(f"redis: {redacted(redis.url)} (embedded)")
        return self._settings.model_copy(update={"redis_url": redis.url})

    def _start_ray(self) -> None:
        self._report("ray: starting")
        cluster = RayCluster(self._settings.data_dir)
        self._undo.callback(cluster.stop)
        cluster.start()
        from ray import serve

        from services.app import APPLICATION

        # Drains the replicas; what remains of Serve goes with Ray.
        self._undo.callback(serve.delete, APPLICATION)

    async def _start_services(self, settings: Settings) -> Replica:
        """Returns the gateway once every replica is registered and the gateway is ready."""
        from ray import serve

        from services.app import APPLICATION, build

        graph = build(settings, prefill=self._prefill, decode=self._decode)
        deploying = asyncio.create_task(
            asyncio.to_thread(serve.run, graph, name=APPLICATION, route_prefix=None)
        )
        redis = connect(settings.redis_url)
        wanted = _wanted(settings, self._prefill, self._decode)
        views = {
            service: Directory(redis, settings.namespace, service, settings.lease_s)
            for service in {service for service, _ in wanted}
        }
        try:
            for view in views.values():
                await view.start()
            await self._wait(deploying, lambda: _missing(wanted, views))
            gateway = next(iter(views["gateway"].replicas.values()))
            await self._wait(deploying, lambda: _not_ready(gateway.facts["url"]))
            await deploying
            return gateway
        finally:
            for view in views.values():
                await view.stop()
            await redis.aclose()

    async def _wait(self, deploying: asyncio.Task[Any], missing: Callable[[], list[str]]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        said: list[str] = []
        while waiting := await asyncio.to_thread(missing):
            if waiting != said:
                self._report("waiting for: " + ", ".join(waiting))
                said = waiting
            if deploying.done():
                deploying.result()  # raises what Serve says of a deployment that failed
            if time.monotonic() > deadline:
                raise RuntimeError(f"not up after {_START_TIMEOUT_S:.0f} s: {', '.join(waiting)}")
            await asyncio.sleep(0.2)

    def _write_state(self, running: Running) -> None:
        path = state_file(self._settings)
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(running)))
        self._undo.callback(path.unlink, missing_ok=True)


def _check_checkpoint(model: ModelSpec) -> None:
    """Raises RuntimeError that says what a local checkpoint lacks; hub ids are left to the hub."""
    folder = Path(model.path)
    if not folder.is_dir():
        if folder.is_absolute() or model.path.startswith(("~", ".")) or model.path.count("/") != 1:
            raise RuntimeError(f"model {model.name!r}: there is no folder {model.path}")
        return
    try:
        read_config(folder)
    except UnsupportedModel as error:
        raise RuntimeError(f"model {model.name!r}: {error}") from error
    for pattern in ("*.safetensors", "tokenizer.json"):
        if not any(folder.glob(pattern)):
            raise RuntimeError(f"model {model.name!r}: {folder} has no {pattern}")


def _check_port(host: str, port: int) -> None:
    """Raises RuntimeError when something listens there already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RuntimeError(f"port {port} on {host}: {error.strerror}; try --port 0") from error


def _wanted(settings: Settings, prefill: int, decode: int) -> dict[tuple[str, str], int]:
    """How many replicas of each (service, what to call it) there must be."""
    roles = {"prefill": prefill, "decode": decode} if prefill else {"both": decode}
    wanted = {(name, name): 1 for name in ("retrieval", "gateway")}
    wanted["tokenizer", "tokenizer"] = settings.tokenizer.count
    wanted["router", "router"] = settings.router.count
    for model in settings.models:
        for role, replicas in roles.items():
            wanted["worker", _worker(role, model.name)] = replicas
    return wanted


def _worker(role: str, model: str) -> str:
    """What a worker is called: "prefill worker of demo"; of both roles "worker of demo"."""
    return f"worker of {model}" if role == "both" else f"{role} worker of {model}"


def _missing(wanted: dict[tuple[str, str], int], views: dict[str, Directory]) -> list[str]:
    def label(replica: Replica) -> str:
        if replica.service != "worker":
            return replica.service
        return _worker(replica.facts["role"], replica.facts["model"])

    found = [label(r) for view in views.values() for r in view.replicas.values()]
    return [name for (_, name), count in wanted.items() if found.count(name) < count]


def _not_ready(url: str) -> list[str]:
    import httpx

    try:
        answer = httpx.get(f"{url}/readyz", timeout=2.0)
    except httpx.HTTPError:
        return ["the gateway's port"]
    return [] if answer.status_code == 200 else ["the gateway's links"]


async def _laptop_key(settings: Settings) -> str:
    """The key of the local tenant: kept beside the data, made anew when Redis does not know it."""
    path = settings.data_dir / "key"
    redis = connect(settings.redis_url)
    try:
        store = KeyStore(redis, settings.namespace)
        if path.exists():
            kept = path.read_text().strip()
            record = await store.find(key_hash(kept))
            if record is not None and record.revoked is None:
                return kept
        key, _ = await store.create(tenant=_LAPTOP_TENANT, name="laptop")
    finally:
        await redis.aclose()
    path.touch(mode=0o600)
    path.write_text(key)
    return key
