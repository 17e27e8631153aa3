"""The gateway service: the HTTP server and the public gRPC service on one event loop."""

import asyncio
import gc
import time
from collections.abc import Mapping
from functools import partial

import grpc

from services.common.blobs import Blobs
from services.common.config import GatewaySettings, Settings
from services.common.fairness.fair_threads import FairThreads
from services.common.give_back import keep_pages
from services.common.locks.certificates import CertificateFiles
from services.common.peers import Peers
from services.common.policy import PolicyFile
from services.common.redis import Redis
from services.common.service import Service
from services.common.telemetry.metrics import BoundedNames
from services.common.telemetry.metrics_server import Page
from services.common.telemetry.telemetry import Telemetry
from services.common.transport import host_port
from services.gateway.api.admin.routes import admin_application, admin_settings
from services.gateway.api.grpc.server import GrpcServer
from services.gateway.api.resources.files import delete_unused
from services.gateway.api.rest.routes import application
from services.gateway.api.rest.turns import turn_of
from services.gateway.batches.batches import Batches, Control
from services.gateway.batches.lines import Lines
from services.gateway.connections.http_server import HttpServer
from services.gateway.identity.identity import Identity
from services.gateway.intake import Intake
from services.gateway.jobs.jobs import Jobs, Kind
from services.gateway.metering.meter import Meter
from services.gateway.models import ModelCatalog
from services.gateway.neighbours import Neighbours, address
from services.gateway.parts import Gateway
from services.gateway.runs.conversations.conversations import Conversations
from services.gateway.runs.known_scores import KnownScores
from services.gateway.runs.lasting.runs import Runs
from services.gateway.runs.records import Records
from services.gateway.runs.shared_records import SharedRecords
from services.gateway.stores.files.file_expiry import FileExpiry
from services.gateway.stores.files.files import Files
from services.gateway.stores.files.orphans import Orphans
from services.gateway.stores.files.uploads import Uploads
from services.gateway.stores.indexing.indexing import Indexing
from services.gateway.stores.indexing.reindexing import Reindexing
from services.gateway.stores.indexing.served_embedders import ServedEmbedders
from services.gateway.stores.lookout import Lookout
from services.gateway.stores.retrieval.client import RetrievalClient
from services.gateway.stores.vector_stores.store_records import StoreRecords
from services.gateway.stores.vector_stores.vector_stores import VectorStores
from services.gateway.targets import Targets

_LAST_WORDS_S = 2.0  # of calls that outlast the grace
_GC_THRESHOLDS = (5_000, 10, 10)
_LOOKS_FOR_UPLOADS_EVERY_S = 30.0


class GatewayService(Service):
    """Facts in the registry: `url`, where the HTTP API is, and `grpc`, host:port of the public
    gRPC service. The Host's own server holds nothing of the gateway but its health.
    """

    name = "gateway"
    grpc_services = ()

    def __init__(self, settings: Settings, redis: Redis, telemetry: Telemetry, id: str) -> None:
        super().__init__(settings, redis, telemetry, id)
        self._blobs = Blobs.of(settings)
        self.gateway = _assemble(settings, redis, telemetry, id, self._blobs)
        self._orphans = Orphans(redis, settings.namespace, self._blobs)
        self._expiry = FileExpiry(
            redis, settings.namespace, self.gateway.files, partial(delete_unused, self.gateway)
        )
        turn = f"{settings.namespace}:{{files}}:uploads:turn"
        look, what = self.gateway.uploads.look, "uploads that expired"
        self._unfinished = Lookout(redis, turn, _LOOKS_FOR_UPLOADS_EVERY_S, look, what)
        self._targets = Targets(redis, settings)
        self._neighbours = Neighbours(redis, settings, id)
        self._http: HttpServer | None = None
        self._admin: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        self._ports: dict[str, int] = {}

    async def start(self, server: grpc.aio.Server) -> None:
        # A large body is parsed into up to 260,000 objects at once. By default Python looks for
        # garbage after every 700 new ones, which makes most of that parse's time.
        gc.set_threshold(*_GC_THRESHOLDS)
        keep_pages()
        intake = self.gateway.intake
        await self._blobs.claim(self.redis)
        await self.gateway.policy.start()
        self.gateway.identity.start()
        self.gateway.records.start()
        self.gateway.meter.start()
        self.gateway.files.room.start()
        self._orphans.start()
        self._expiry.start()
        self._unfinished.start()
        await self.gateway.tokenizers.start()
        await self.gateway.retrieval.start()
        self.gateway.runs.start(self.gateway)
        gateway = self.gateway
        kinds: list[Kind] = [Control(gateway), Lines(gateway), *gateway.stores.kinds]
        self.gateway.jobs.start(kinds, lambda: intake.leaving or intake.draining)
        own = self.settings.gateway
        certificates = _certificates(own)
        rest = application(self.gateway)
        self._http = HttpServer(rest, own, own.host, own.port, certificates)
        admin_port = self.settings.identity.admin_port
        ports = {"http": own.port, "grpc": _grpc_port(own), "admin": admin_port or 0}
        await self._neighbours.admit(ports)
        await self._http.start()
        if admin_port is not None:
            self._admin = _admin_server(self.gateway, admin_port)
            await self._admin.start()
        self._grpc = GrpcServer(self.gateway)
        grpc_port = await self._grpc.start(own.host, _grpc_port(own), certificates)
        self._ports = {"http": self._http.port, "grpc": grpc_port}

    def describe(self) -> dict[str, str]:
        host, ports = address(self.settings), self._ports
        scheme = "https" if self.settings.gateway.tls_cert else "http"
        facts = {
            "url": f"{scheme}://{host_port(host, ports['http'])}",
            "grpc": host_port(host, ports["grpc"]),
        }
        if self._admin is not None:
            scheme = "https" if self.settings.identity.admin_tls_cert else "http"
            door = host_port(address(self.settings, "admin"), self._admin.port)
            facts["admin"] = f"{scheme}://{door}"
        return facts

    def pages(self) -> Mapping[str, Page]:
        return {"/targets": self._targets.page, **self.gateway.policy.pages()}

    def check(self) -> None:
        for server in (self._http, self._admin):
            if server is not None:
                server.check()

    async def drain(self, grace_s: float) -> None:
        """Is not ready at once, and takes new requests until load balancers have seen that. Then it
        still listens, to answer /readyz and new requests with 503.

        Once another gateway serves behind the same ports nobody has to be told: it listens no more,
        and takes what comes on the connections that it has until their clients have moved.
        """
        assert self._http is not None
        assert self._grpc is not None
        if self._admin is not None:
            self._admin.close_door()
        intake, leaves_after_s = self.gateway.intake, self.settings.gateway.leaves_after_s
        intake.leaving = True
        await self._grpc.drain()
        self._http.part()
        until = time.monotonic() + leaves_after_s
        closing = None
        if await self._neighbours.comes(self._ports, leaves_after_s):
            left_s = until - time.monotonic()
            self._close_door(max(left_s, 0.0) + grace_s)
            await self._http.emptied(left_s)
        else:
            if leaves_after_s:  # its clients have heard of it
                self._grpc.close_door(grace_s + _LAST_WORDS_S)
            closing = asyncio.create_task(self._close_door_beside_another(grace_s), name="door")
        try:
            await asyncio.gather(
                intake.drain(grace_s),
                self.gateway.jobs.drain(grace_s),
            )
        finally:
            if closing is not None:
                closing.cancel()

    async def _close_door_beside_another(self, within_s: float) -> None:
        """Who connects from then on comes to the other, and hears no refusal here."""
        if await self._neighbours.comes(self._ports, within_s):
            self._close_door(within_s)

    def _close_door(self, grace_s: float) -> None:
        """Listens no more; running calls have so long to end."""
        assert self._http is not None
        assert self._grpc is not None
        self._grpc.close_door(grace_s + _LAST_WORDS_S)
        self._http.close_door()

    async def stop(self) -> None:
        await asyncio.gather(
            *(s.stop() for s in (self._http, self._admin, self._grpc) if s is not None)
        )
        await self.gateway.jobs.stop()
        await self.gateway.runs.stop()
        await self.gateway.policy.stop()
        await self.gateway.identity.stop()
        await self.gateway.meter.stop()
        await self.gateway.records.stop()
        await self._orphans.stop()
        await self._expiry.stop()
        await self._unfinished.stop()
        await self.gateway.files.room.stop()
        await self.gateway.models.stop()
        await self.gateway.retrieval.stop()
        await self.gateway.tokenizers.stop()
        self.gateway.threads.stop()


def _assemble(
    settings: Settings, redis: Redis, telemetry: Telemetry, id: str, blobs: Blobs
) -> Gateway:
    own, namespace = settings.gateway, settings.namespace
    tokenizers = Peers(redis, settings, "tokenizer", identity="gateway", peer_id=id)
    policy = PolicyFile.of_settings(settings.policy)
    retrieval = RetrievalClient(redis, settings, policy)
    files = Files(redis, namespace, own, blobs)
    store_records = StoreRecords(redis, namespace, own.max_files_in_stores, own.max_attribute_bytes)
    identity = Identity(settings, redis)
    tenants_told = BoundedNames(own.tenants_in_metrics)
    meter = Meter.of(redis, settings, tenants_told)
    jobs = Jobs(redis, namespace, id, settings.jobs)
    indexing = Indexing(
        files,
        store_records,
        retrieval,
        meter,
        telemetry,
        jobs,
        identity.standing,
        ServedEmbedders(settings, tokenizers, telemetry),
        settings.retrieval.max_document_chars,
    )
    reindexing = Reindexing(
        store_records,
        indexing.searchable,
        indexing.on_the_way,
        retrieval,
        meter,
        jobs,
        identity.standing,
        settings.retrieval.max_document_chars,
    )
    stores = VectorStores(files, store_records, indexing, reindexing, jobs, own.max_files)
    return Gateway(
        settings=settings,
        telemetry=telemetry,
        auth=identity.auth,
        identity=identity,
        meter=meter,
        tokenizers=tokenizers,
        models=ModelCatalog(tokenizers),
        retrieval=retrieval,
        policy=policy,
        files=files,
        uploads=Uploads(redis, namespace, own, blobs, files),
        stores=stores,
        runs=Runs(redis, namespace, id, settings.runs, turn_of),
        conversations=Conversations(redis, namespace, settings.runs, own.max_messages, files.room),
        jobs=jobs,
        batches=Batches(redis, namespace, settings.jobs, jobs, files),
        records=Records(own.records_kept, SharedRecords(redis, namespace, own, files.room)),
        scores=KnownScores(settings.retrieval.cache_max_age_s),
        intake=Intake(own.max_requests, own.max_held_bytes),
        threads=FairThreads(1, "gateway"),
        tenants_told=tenants_told,
    )


def _admin_server(gateway: Gateway, port: int) -> HttpServer:
    own = gateway.settings.identity
    certificates = None
    if own.admin_tls_cert is not None and own.admin_tls_key is not None:
        certificates = CertificateFiles("admin", own.admin_tls_cert, own.admin_tls_key, None)
    bounds = admin_settings(gateway.settings)
    return HttpServer(admin_application(gateway), bounds, own.admin_host, port, certificates)


def _certificates(own: GatewaySettings) -> CertificateFiles | None:
    """Those of the door, if it has any. Raises CertificateError."""
    if own.tls_cert is None or own.tls_key is None:
        return None
    return CertificateFiles("door", own.tls_cert, own.tls_key, None)


def _grpc_port(own: GatewaySettings) -> int:
    """Beside the HTTP port, so that it is known and stays; free when that one is."""
    if own.grpc_port is not None:
        return own.grpc_port
    return own.port + 1 if own.port else 0
