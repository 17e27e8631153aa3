"""The router's servers: links from the tokenizers, and its status."""

from functools import partial
from typing import Any

import grpc

from protos import router_pb2, router_pb2_grpc
from services.common.config import Settings
from services.common.discovery import Directory
from services.common.give_back import keep_pages
from services.common.link import LinkServer
from services.common.redis import Redis
from services.common.served_models import ServedModels
from services.common.service import Service
from services.common.telemetry.telemetry import Telemetry
from services.router import metrics, pipeline
from services.router.admission import Admission
from services.router.quarantine import Quarantine
from services.router.workers import Worker, Workers


class RouterService(Service):
    """Requests of tokenizers come over links, see pipeline.py; replicas share nothing but Redis."""

    name = "router"
    grpc_services = ("penstock.v1.Router",)

    def __init__(self, settings: Settings, redis: Redis, telemetry: Telemetry, id: str) -> None:
        super().__init__(settings, redis, telemetry, id)
        self._routers = Directory(redis, settings.namespace, "router", settings.lease_s)
        self._models = ServedModels(redis, settings, self._models_changed)
        self._workers = Workers(redis, settings, id, self._workers_changed)
        self._admission = Admission(
            redis, settings, id, self._workers.capacity, lambda: len(self._routers.replicas)
        )
        quarantine = Quarantine(self._workers.poke)
        self._router = pipeline.Router(
            settings, telemetry, self._workers, self._models, self._admission, quarantine
        )
        metrics.breakers_open.set_function(self._workers.breakers_open)
        metrics.READY_WORKERS.watch(lambda: self._workers.ready_counts(self._models.with_workers()))
        self._links = LinkServer(
            "/penstock.v1.Router/Link",
            partial(pipeline.serve, self._router),
            max_requests=settings.router.max_requests,
        )

    async def start(self, server: grpc.aio.Server) -> None:
        keep_pages()
        await self._routers.start()
        await self._models.start()
        await self._workers.start()
        await self._admission.start()
        router_pb2_grpc.add_RouterServicer_to_server(StatusServicer(self), server)
        self._links.add_to(server)

    def check(self) -> None:
        """Raises when admission can grant nothing any more."""
        self._admission.check()

    async def drain(self, grace_s: float) -> None:
        self._router.warming.stop()
        await self._links.drain(grace_s)

    async def stop(self) -> None:
        await self._admission.stop()
        await self._workers.stop()
        await self._models.stop()
        await self._routers.stop()

    async def status(self) -> router_pb2.RouterStatus:
        """What this router sees; admission over all routers."""
        models = self._workers.models() | self._models.with_workers()
        held, waiting = await self._admission.status(models)
        return router_pb2.RouterStatus(
            workers=[_status_of(worker) for worker in self._workers.all()],
            queued=waiting,
            admitted=held,
            capacity=sum(self._workers.capacity(model) for model in models),
        )

    def _models_changed(self) -> None:
        self._workers.poke()
        self._refuse_what_nobody_serves()

    def _workers_changed(self) -> None:
        self._refuse_what_nobody_serves()
        self._admission.poke()

    def _refuse_what_nobody_serves(self) -> None:
        if self._models.seen:
            served = self._models.with_workers() | self._workers.models()
            self._admission.refuse_what_nobody_serves(served)


class StatusServicer(router_pb2_grpc.RouterServicer):
    """`GetStatus`; the link's method is mounted beside it."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def GetStatus(
        self, request: router_pb2.RouterStatusRequest, context: Any
    ) -> router_pb2.RouterStatus:
        return await self._service.status()


def _status_of(worker: Worker) -> router_pb2.WorkerStatus:
    return router_pb2.WorkerStatus(
        id=worker.id,
        address=worker.replica.address,
        role=worker.role,
        model=worker.model,
        state=worker.link.state.value,
        waiting=worker.load.waiting,
        running=worker.load.running,
        free_blocks=worker.load.free_blocks,
        total_blocks=worker.load.total_blocks,
        steps=worker.link.vitals.steps,
        known_blocks=len(worker.holder.blocks),
        breaker=worker.breaker.state.value,
    )
