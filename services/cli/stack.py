"""All of Penstock on this machine: Redis, Ray, and the graph of services/app.py."""

import asyncio
import json
import os
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from services.cli.checkpoints import made_local
from services.cli.doors import held_ports
from services.cli.model_keeper import ModelKeeper
from services.cli.ray_cluster import RayCluster
from services.cli.replicas import check_room, missing, wanted
from services.cli.running import Running, holding, state_file
from services.cli.supervisor import LOST
from services.cli.wanted_models import WantedModels
from services.common.config import ModelSpec, Settings, unknown_names
from services.common.discovery import Directory, Replica
from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import Redis, RedisAway, RedisError, connect
from services.common.secrets import private_folder, redacted
from services.common.socket_folder import SocketFolder
from services.common.start_failures import first_told, forget
from services.gateway.keys import KeyStore, key_hash

Report = Callable[[str], None]
_START_TIMEOUT_S = 300.0  # a large checkpoint takes long to load; progress shows what is waited for
_LOOK_EVERY_S = 1.0  # for replicas that failed to start
_LAPTOP_TENANT = "local"
_PEM_BEGIN = "-----BEGIN CERTIFICATE-----"
_PEM_END = "-----END CERTIFICATE-----"


class Stack:
    """Starts everything in order, reports what is being waited for, and leaves nothing behind.

    with Stack(settings, report=print) as running: ...
    """

    def __init__(self, settings: Settings, *, report: Report, again: bool = False) -> None:
        """`again`: in place of one that was lost."""
        # Absolute: Ray's processes may have another working directory.
        self._settings = settings.model_copy(update={"data_dir": settings.data_dir.resolve()})
        self._report = report
        self._again = again
        self._redis: EmbeddedRedis | None = None
        self._sockets = SocketFolder()
        self._ray = RayCluster(self._settings.data_dir, self._sockets.path)
        self._undo = ExitStack()

    @property
    def drains_within_s(self) -> float:
        """How long its end may take for running streams."""
        return self._settings.drains_within_s

    @property
    def logs(self) -> Path | None:
        """Folder of the logs of all processes; None before the start."""
        return self._ray.logs

    def told_key(self, running: Running) -> str:
        """The local tenant's key where only this host can use it, else where it lies: what a server
        prints, in a container above all, ends in logs that others read."""
        if self._settings.on_loopback:
            return running.key
        return f"kept in {_key_file(self._settings)}; others: penstock keys create --tenant NAME"

    def __enter__(self) -> Running:
        with self._undo:
            self._undo.callback(self._sockets.close)
            try:
                running = self._start()
            except (RuntimeError, OSError) as error:
                if self._ray.logs is None:
                    raise
                raise RuntimeError(f"{error}\nlogs of all processes: {self._ray.logs}") from error
            self._undo = self._undo.pop_all()
        return running

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def tend(self) -> None:
        """To be called often while it is up: starts again what ended. What it cannot start again
        ends this process with `LOST`, for its supervisor to start all anew."""
        try:
            if self._redis is not None and self._redis.ended:
                self._report("redis ended: starting it again")
                self._redis.start()
            for line in self._ray.tend():
                self._report(line)
        except Exception as error:
            self._report(str(error))
            os._exit(LOST)  # at once: what Ray does at an exit needs the parts that are lost

    def _start(self) -> Running:
        for name in unknown_names(os.environ):
            self._report(f"{name} is set, but there is no such setting")
        # What can be told now is told now, not by a replica that fails a minute later.
        self._settings = self._settings.model_copy(update={"models": self._local_models()})
        private_folder(self._settings.data_dir)
        self._undo.enter_context(holding(self._settings))
        self._check_door()
        settings = asyncio.run(self._with_models(self._start_redis()))
        self._start_ray()
        check_room(settings, self._ray.resources())
        key = asyncio.run(_laptop_key(settings))
        gateway = asyncio.run(self._start_services(settings, key))
        self._keep_models(settings)
        self.metrics_url = gateway.metrics_url
        running = Running(
            url=gateway.facts["url"],
            grpc=gateway.facts["grpc"],
            redis_url=settings.redis_dsn,
            namespace=settings.namespace,
            key=key,
            pid=os.getpid(),
        )
        self._write_state(running)
        return running

    def _local_models(self) -> list[ModelSpec]:
        if self._again:  # what is wrong with one by now keeps the others from nothing
            return self._settings.models
        return [made_local(model, self._report) for model in self._settings.models]

    def _check_door(self) -> None:
        here = self._settings.on_node("127.0.0.1")  # the one of this Ray
        self._settings = self._undo.enter_context(held_ports(here))

    def _start_redis(self) -> Settings:
        if "redis_url" in self._settings.model_fields_set:
            self._report(f"redis: {redacted(self._settings.redis_dsn)}")
            asyncio.run(_check_redis(self._settings.redis_dsn))
            return self._settings
        redis = self._redis = EmbeddedRedis(self._settings.data_dir / "redis", self._sockets)
        self._undo.enter_context(redis)
        self._report(f"redis: {redacted(redis.url)} (embedded)")
        return self._settings.model_copy(update={"redis_url": SecretStr(redis.url)})

    async def _with_models(self, settings: Settings) -> Settings:
        """Those that a stack is started with. One that takes the place of a lost one starts with
        none, and its keeper with what was wanted of that one: one model that does not come back
        keeps the others from nothing."""
        redis = connect(settings.redis_dsn)
        wanted_models = WantedModels(redis, settings.namespace)
        try:
            if not self._again or not (await wanted_models.look()).known:
                await wanted_models.start_with(settings.models)
            return settings.model_copy(update={"models": []}) if self._again else settings
        finally:
            await redis.aclose()

    def _keep_models(self, settings: Settings) -> None:
        keeper = ModelKeeper(settings, self._ray.resources, self._report)
        keeper.start()
        self._undo.callback(keeper.stop)
        keeper.settle(_START_TIMEOUT_S)

    def _start_ray(self) -> None:
        self._report("ray: starting")
        self._undo.callback(self._ray.stop)
        self._ray.start()
        # Drains the replicas; what remains of Serve goes with Ray.
        self._undo.callback(self._take_down)

    def _take_down(self) -> None:
        from services.app import delete_all

        delete_all()

    async def _start_services(self, settings: Settings, key: str) -> Replica:
        """Returns a gateway once every replica is registered and it serves the models."""
        from services.app import deploy

        redis = connect(settings.redis_dsn)
        waited_for = wanted(settings)
        views = {
            service: Directory(redis, settings.namespace, service, settings.lease_s)
            for service in {service for service, _ in waited_for}
        }
        try:
            await forget(redis, settings.namespace)
            await asyncio.to_thread(deploy, settings)
            for view in views.values():
                await view.start()
            await self._wait(redis, lambda: missing(waited_for, views))
            gateway = next(iter(views["gateway"].replicas.values()))
            await self._wait(redis, lambda: _not_ready(gateway.facts["url"]))
            names = [model.name for model in settings.models]
            url, cert = gateway.facts["url"], settings.gateway.tls_cert
            await self._wait(redis, lambda: _not_served(url, key, names, cert))
            return gateway
        finally:
            for view in views.values():
                await view.stop()
            await redis.aclose()

    async def _wait(self, redis: Redis, missing: Callable[[], list[str]]) -> None:
        """Raises RuntimeError with the reason of the first replica that does not start: here none
        fails for a reason that a second attempt would not meet."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        look = 0.0
        said: list[str] = []
        while waiting := await asyncio.to_thread(missing):
            if waiting != said:
                self._report("waiting for: " + ", ".join(waiting))
                said = waiting
            if time.monotonic() > look:
                if reason := await _failure(redis, self._settings.namespace):
                    raise RuntimeError(reason)
                look = time.monotonic() + _LOOK_EVERY_S
            if time.monotonic() > deadline:
                raise RuntimeError(f"not up after {_START_TIMEOUT_S:.0f} s: {', '.join(waiting)}")
            await asyncio.sleep(0.2)

    def _write_state(self, running: Running) -> None:
        path = state_file(self._settings)
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(running)))
        self._undo.callback(path.unlink, missing_ok=True)


async def _failure(redis: Redis, namespace: str) -> str:
    """Why a replica does not start, as itself says, or else Serve; empty while all is well."""
    applications = await asyncio.to_thread(_applications)
    if told := await first_told(redis, namespace):
        return str(told)
    failed = (a.message for a in applications.values() if a.status == "DEPLOY_FAILED")
    return next(failed, "")


def _applications() -> dict[str, Any]:
    """Serve's own idea of each."""
    from ray import serve

    return dict(serve.status().applications)


async def _check_redis(url: str) -> None:
    """Raises RuntimeError when it does not answer, or not to us."""
    redis = connect(url)
    try:
        await redis.ping()
    except (*RedisAway, RedisError) as error:
        raise RuntimeError(f"Redis at {redacted(url)}: {error}") from error
    finally:
        await redis.aclose()


def _not_ready(url: str) -> list[str]:
    import httpx

    try:
        # Whatever its certificate is: only whether it answers is asked. No proxy is asked instead.
        answer = httpx.get(f"{url}/readyz", timeout=2.0, verify=False, trust_env=False)
    except httpx.HTTPError:
        return ["the gateway's port"]
    return [] if answer.status_code == 200 else ["the gateway's links"]


def _not_served(url: str, key: str, models: list[str], cert: Path | None) -> list[str]:
    """`cert` is the door's own. The key goes to nobody else: where another answers (a node of a
    cluster may have one of its own), the models are not asked for."""
    import httpx

    try:
        verify = True if cert is None else _trusting(cert)
    except OSError:  # what is wrong with it, the gateway says
        return []
    headers = {"Authorization": f"Bearer {key}"}
    found = []
    with httpx.Client(headers=headers, timeout=10.0, verify=verify, trust_env=False) as http:
        for name in models:
            try:
                answer = http.get(f"{url}/v1/models/{name}")
            except httpx.HTTPError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    return []
                return ["the gateway's port"]
            if answer.status_code != 200:
                found.append(f"model {name}")
    return found


def _trusting(cert: Path) -> ssl.SSLContext:
    """Exactly the first certificate of the file, by whatever name or address it is reached; not who
    else its authority, which may be in the file as well, has issued for. Raises OSError."""
    own, end, _ = cert.read_bytes().decode("ascii", "replace").partition(_PEM_END)
    context = ssl.create_default_context(cadata=own[max(own.find(_PEM_BEGIN), 0) :] + end)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


def _key_file(settings: Settings) -> Path:
    return settings.data_dir / "key"


async def _laptop_key(settings: Settings) -> str:
    """The key of the local tenant: kept beside the data, made anew when Redis does not know it."""
    path = _key_file(settings)
    redis = connect(settings.redis_dsn)
    try:
        store = KeyStore(redis, settings.namespace)
        if path.exists():
            kept = path.read_text().strip()
            record = await store.find(key_hash(kept))
            if record is not None and record.holds:
                return kept
        key, _ = await store.create(tenant=_LAPTOP_TENANT, name="laptop")
    finally:
        await redis.aclose()
    path.touch(mode=0o600)
    path.write_text(key)
    return key
