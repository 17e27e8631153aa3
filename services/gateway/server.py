"""The gateway service: the HTTP server and the public gRPC service on one event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import gateway_pb2_grpc
from services.common.config import GatewaySettings, Settings
from services.common.peers import Peers
from services.common.redis import Redis
from services.common.service import Service
from services.common.telemetry import Telemetry
from services.common.transport import host_port, listen
from services.gateway.auth import Authenticator
from services.gateway.files import Files
from services.gateway.grpc_api import Inference
from services.gateway.intake import Intake
from services.gateway.keys import KeyStore
from services.gateway.models import ModelCatalog
from services.gateway.pipeline import Gateway
from services.gateway.records import Records
from services.gateway.retrieval_client import RetrievalClient
from services.gateway.revocations import Revocations
from services.gateway.routes import application
from services.gateway.vector_stores import VectorStores

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_CLOSE_S = 2  # for the last bytes of connections when the server ends
_INFERENCE = "penstock.v1.Inference"


class GatewayService(Service):
    """Facts in the registry: `url`, where the HTTP API is, and `grpc`, host:port of the public
    gRPC service. The Host's own server holds nothing of the gateway but its health.
    """

    name = "gateway"
    grpc_services = ()

    def __init__(self, settings: Settings, redis: Redis, telemetry: Telemetry, id: str) -> None:
        super().__init__(settings, redis, telemetry, id)
        self.gateway = _assemble(settings, redis, telemetry, id)
        self._http: _HttpServer | None = None
        self._grpc: _GrpcServer | None = None
        self._ports: dict[str, int] = {}

    async def start(self, server: grpc.aio.Server) -> None:
        self.gateway.revocations.start()
        await self.gateway.tokenizers.start()
        await self.gateway.retrieval.start()
        own = self.settings.gateway
        listener = _listen(own.host, own.port)
        self._http = _HttpServer(self.gateway, listener)
        await self._http.start()
        self._grpc = _GrpcServer(self.gateway)
        grpc_port = await self._grpc.start(own.host, _grpc_port(own))
        self._ports = {"http": listener.getsockname()[1], "grpc": grpc_port}

    def describe(self) -> dict[str, str]:
        host = self.settings.gateway.host
        host = self.settings.peer_host if host in ("0.0.0.0", "::") else host
        ports = self._ports
        return {
            "url": f"http://{host_port(host, ports['http'])}",
            "grpc": host_port(host, ports["grpc"]),
        }

    def check(self) -> None:
        if self._http is not None:
            self._http.check()

    async def drain(self, grace_s: float) -> None:
        """Still listens, to answer /readyz and new requests with 503, until all have ended."""
        if self._grpc is not None:
            await self._grpc.drain()
        await asyncio.gather(self.gateway.intake.drain(grace_s), self.gateway.stores.drain(grace_s))

    async def stop(self) -> None:
        await asyncio.gather(*(s.stop() for s in (self._http, self._grpc) if s is not None))
        await self.gateway.revocations.stop()
        await self.gateway.stores.stop()
        await self.gateway.models.stop()
        await self.gateway.retrieval.stop()
        await self.gateway.tokenizers.stop()


def _assemble(settings: Settings, redis: Redis, telemetry: Telemetry, id: str) -> Gateway:
    own, namespace = settings.gateway, settings.namespace
    tokenizers = Peers(redis, settings, "tokenizer", peer_id=id)
    retrieval = RetrievalClient(redis, settings)
    files = Files(redis, namespace, own)
    keys = KeyStore(redis, namespace)
    auth = Authenticator(keys, own)
    return Gateway(
        settings=settings,
        telemetry=telemetry,
        auth=auth,
        revocations=Revocations(redis, keys.news, auth.revoked, auth.recheck),
        tokenizers=tokenizers,
        models=ModelCatalog(tokenizers),
        retrieval=retrieval,
        files=files,
        stores=VectorStores(redis, namespace, files, retrieval, telemetry, own.max_files),
        records=Records(own.records_kept),
        intake=Intake(own.max_requests, own.max_held_bytes),
    )


def _grpc_port(own: GatewaySettings) -> int:
    """Beside the HTTP port, so that it is known and stays; free when that one is."""
    if own.grpc_port is not None:
        return own.grpc_port
    return own.port + 1 if own.port else 0


def _listen(host: str, port: int) -> socket.socket:
    """Bound here, so that port 0 is known before the server starts, and a taken port is OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named: without it the first events of an
    # answer wait up to 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


class _Uvicorn(uvicorn.Server):
    """Without signal handlers: the host decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _HttpServer:
    def __init__(self, gateway: Gateway, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _Uvicorn(
            uvicorn.Config(
                application(gateway),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here believes in the client's address
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSE_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(
            self._server.serve(sockets=[self._listener]), name="http server"
        )
        while not self._server.started:
            if self._task.done():
                await self._task  # raises what it failed of
                raise RuntimeError("the HTTP server ended at its start")
            await asyncio.sleep(0.005)

    def check(self) -> None:
        if self._task is None or self._task.done():
            raise RuntimeError("the HTTP server is down")

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()


class _GrpcServer:
    """The public gRPC service with its health and reflection.

    Apart from the Host's server, whose port is internal and which takes the large messages of
    peers: here a message over the limit is refused unread, before anybody has shown a key.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", gateway.settings.gateway.body_limit_bytes),
                ("grpc.so_reuseport", 0),  # a port already taken is an error
            ]
        )
        gateway_pb2_grpc.add_InferenceServicer_to_server(Inference(gateway), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Returns the port. Raises RuntimeError when it is taken."""
        port = listen(self._server, host, port)
        await self._server.start()
        for name in ("", _INFERENCE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def drain(self) -> None:
        """Health says that it ends; the intake refuses new requests."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        await self._server.stop(_CLOSE_S)
