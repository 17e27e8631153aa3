"""What hosts a service: one `grpc.aio` server with health and reflection, a lease in the registry,
metrics, health checks and drain. The same host runs under Ray Serve (services/app.py) and alone
(`python -m services.<name>`).
"""

import asyncio
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import host_pb2_grpc
from services.common.config import AUTO, Settings, unknown_names
from services.common.discovery import DRAINING, Registration, Replica, host_id, new_replica_id
from services.common.draining import HOST_SERVICE, HostServicer
from services.common.garbage import set_aside
from services.common.give_back import give_back_memory
from services.common.grpc_options import (
    HEALTH_CONNECTIONS,
    KEEPALIVE_ALLOWED,
    MESSAGE_LIMITS,
    bounded,
)
from services.common.open_files import allow_connections
from services.common.redis import Redis, connect
from services.common.telemetry.logs import configure_logging
from services.common.telemetry.metrics import tell_build
from services.common.telemetry.metrics_server import MetricsServer, Page
from services.common.telemetry.telemetry import Telemetry
from services.common.transport import Transport, health_server, host_port, listen
from services.common.versions import version
from services.common.waiting import first_done

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 1.0
_SWITCH_S = 0.001
"""How long a thread that computes in Python keeps the loop, and with it all streams, waiting;
Python's own 5 ms are for each turn of the loop."""
SERVER_OPTIONS = [
    *MESSAGE_LIMITS,
    *KEEPALIVE_ALLOWED,
    ("grpc.so_reuseport", 0),  # a port already taken is an error, not a second listener
]


class Service(ABC):
    """One service's own part. The host calls start, describe, check at any time, drain, stop."""

    name: ClassVar[str]
    grpc_services: ClassVar[tuple[str, ...]]  # full names, for health and reflection

    def __init__(self, settings: Settings, redis: Redis, telemetry: Telemetry, id: str) -> None:
        self.settings = settings
        self.redis = redis
        self.telemetry = telemetry
        self.id = id

    @abstractmethod
    async def start(self, server: grpc.aio.Server) -> None:
        """Adds the servicers and starts whatever they need; returns when requests can be served."""

    def describe(self) -> dict[str, str]:
        """Facts for the registry (role, model, url …)."""
        return {}

    def pages(self) -> Mapping[str, Page]:
        """What the metrics port shows beside the metrics, by path; asked once, after `start`."""
        return {}

    def check(self) -> None:
        """Raises when the replica should be replaced. Cheap, called every few seconds."""

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests and returns when the running ones ended, or after `grace_s`."""

    async def stop(self) -> None:
        """Releases everything. Called once, also after a failed start."""


class Host:
    """Runs one Service in this process, on the running event loop."""

    def __init__(self, service_class: type[Service], settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        if AUTO in (self.settings.bind_host, self.settings.gateway.host):
            raise ValueError("PENSTOCK_BIND_HOST=auto is of a Ray node, and none runs this process")
        self.id = new_replica_id(service_class.name)
        configure_logging(service_class.name, self.settings.log_level)
        for name in unknown_names(os.environ):
            log.warning("%s is set, but there is no such setting", name)
        self._redis = connect(self.settings.redis_dsn)
        self._telemetry = Telemetry(service_class.name, self.id)
        tell_build(service_class.name)
        self.service = service_class(self.settings, self._redis, self._telemetry, self.id)
        self._health = health.aio.HealthServicer()
        self._own = self.settings.of_service(service_class.name)
        self._transport = Transport.of(self.settings, service_class.name)
        options = [*SERVER_OPTIONS, *bounded(self._own.internal_connections)]
        self._server = self._transport.server(options, health=self._health)
        self._health_server: grpc.aio.Server | None = None
        self._registration: Registration | None = None
        self._listed_draining: Registration | None = None
        self._metrics: MetricsServer | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._draining: asyncio.Task[None] | None = None
        self.replica: Replica | None = None
        self.failed = asyncio.Event()  # a check failed: the replica takes no more requests

    async def start(self) -> Replica:
        """Serves and registers. Raises what the service's own start raises, after cleaning up."""
        sys.setswitchinterval(_SWITCH_S)
        try:
            await self.service.start(self._server)
            set_aside()
            self.replica = await self._serve()
        except BaseException:
            await self.stop(grace_s=0)
            raise
        self._watches = [
            asyncio.create_task(self._check_often(), name="check"),
            asyncio.create_task(give_back_memory(), name="memory"),
        ]
        log.info("%s serves on %s", self.id, self.replica.address)
        return self.replica

    async def _serve(self) -> Replica:
        host = self.settings.bind_host
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        servicer = HostServicer(self.drain, self.settings.drains_within_s)
        host_pb2_grpc.add_HostServicer_to_server(servicer, self._server)
        if self.settings.reflects:
            always = (HOST_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            names = (*self.service.grpc_services, *always)
            reflection.enable_server_reflection(names, self._server)
        allow_connections(self._own.internal_connections + HEALTH_CONNECTIONS)
        port = self._transport.listen(self._server, host, self._own.internal_port)
        await self._server.start()
        if self._own.health_port is not None:
            self._health_server = health_server(self._health)
            listen(self._health_server, host, self._own.health_port)
            await self._health_server.start()
        for name in ("", *self.service.grpc_services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        replica = Replica(
            service=self.service.name,
            id=self.id,
            address=host_port(self.settings.peer_host, port),
            host_id=host_id(self.settings.peer_host),
            pid=os.getpid(),
            metrics_url=self._start_metrics(host),
            version=version(),
            facts=self.service.describe(),
        )
        self._registration = await self._register(replica)
        return replica

    async def _register(self, replica: Replica, under: str = "") -> Registration:
        registration = Registration(
            self._redis, self.settings.namespace, replica, self.settings.lease_s, under
        )
        await registration.start()
        return registration

    def _start_metrics(self, host: str) -> str:
        pages = {"/healthz": _lives, **self.service.pages()}
        self._metrics = MetricsServer(pages, asyncio.get_running_loop())
        port = self._metrics.start(host, self._own.metrics_port)
        return f"http://{host_port(self.settings.peer_host, port)}/metrics"

    def check(self) -> None:
        """Raises when the replica should be replaced."""
        self.service.check()

    async def _check_often(self) -> None:
        """Takes a failed replica out of the registry and of health at once: whoever replaces it
        (Serve, a supervisor) may be slower than its callers are."""
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            try:
                self.check()
            except Exception as error:
                log.error("%s failed its check: %s", self.id, error)
                break
        await self._leave()
        self.failed.set()

    async def _leave(self) -> None:
        """Nobody looks for it any more."""
        await self._health.enter_graceful_shutdown()
        if self._registration is not None:
            await self._registration.stop()

    def drain(self, grace_s: float | None = None) -> asyncio.Task[None]:
        """Leaves the registry, refuses new requests and lets running ones finish for `grace_s`. A
        drain that has begun before goes on as it was."""
        if self._draining is None:
            grace = self.settings.drain_grace_s if grace_s is None else grace_s
            self._draining = asyncio.create_task(self._drain(grace), name="drain")
        return self._draining

    async def _drain(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()  # first: Redis may hang, and be waited for
        if self.replica is not None:
            log.info("%s drains", self.id)
            self._listed_draining = await self._register(self.replica, DRAINING)
        await self._leave()
        if self.replica is not None:
            await self.service.drain(grace_s)
            log.info("%s is drained", self.id)

    async def stop(self, grace_s: float | None = None) -> None:
        """Drains, if that has not begun before, then ends all."""
        for watch in self._watches:
            watch.cancel()
        drain = self.drain(grace_s)
        await asyncio.wait([drain])
        if not drain.cancelled() and (error := drain.exception()) is not None:
            log.error("%s could not drain: %r", self.id, error)  # what follows ends all the same
        if self._listed_draining is not None:
            await self._listed_draining.stop()
        grace = self.settings.drain_grace_s if grace_s is None else grace_s
        await self._server.stop(grace=min(grace, 1.0))
        if self._health_server is not None:
            await self._health_server.stop(None)
        await self.service.stop()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        self._telemetry.close()
        await self._redis.aclose()


async def _lives() -> dict[str, str]:
    """That the process and its loop live, draining or not: what a liveness probe asks."""
    return {"status": "ok"}


async def _serve_until_signal(service_class: type[Service]) -> int:
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    host = Host(service_class)
    await host.start()
    ends = [asyncio.create_task(event.wait()) for event in (signalled, host.failed)]
    await first_done(*ends)
    for end in ends:
        end.cancel()
    await host.stop()
    return 1 if host.failed.is_set() else 0


def run(service_class: type[Service]) -> None:
    """`python -m services.<name>`: serves until SIGTERM or SIGINT, then drains and exits with 0; or
    until its own check fails, then exits with 1 for a supervisor to start it anew. On uvloop, as
    Ray's processes are.
    """
    sys.exit(uvloop.run(_serve_until_signal(service_class)))
