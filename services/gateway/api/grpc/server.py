"""The public gRPC server: its services with their health and reflection, within bounds.

Apart from the Host's server, whose port is internal and which takes the large messages of peers.
"""

import asyncio
import logging

import grpc
from grpc._cython.cygrpc import ExecuteBatchError
from grpc_health.v1 import health, health_pb2

from services.common.config import GatewaySettings
from services.common.locks.certificates import CertificateFiles
from services.common.transport import listen
from services.gateway.api.grpc.calls import SERVICES
from services.gateway.api.grpc.services import services
from services.gateway.api.grpc.strangers import PLACES, Strangers
from services.gateway.parts import Gateway

_CLOSE_S = 2  # for the last bytes of calls when the server ends


def _options(own: GatewaySettings) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1),  # with its neighbours
        ("grpc.max_receive_message_length", own.body_limit_bytes),
        # What a stranger sends beyond 64 KiB stays on its side: without the probe, a stream's
        # window grows only when its handler asks for the message.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_allowed_incoming_connections", own.max_connections),
        ("grpc.max_concurrent_streams", own.max_requests),  # of one connection
        ("grpc.server_handshake_timeout_ms", round(own.head_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", 300_000),  # without a call
        ("grpc.keepalive_time_ms", 30_000),  # then a ping, which a dead peer does not answer
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


def _worth_keeping(record: logging.LogRecord) -> bool:
    """Whether a line of gRPC's is worth keeping: not that a caller was gone before its answer, with
    a stack trace for each. Anybody could fill the disk."""
    return not (record.exc_info and isinstance(record.exc_info[1], ExecuteBatchError))


class GrpcServer:
    def __init__(self, gateway: Gateway) -> None:
        own = gateway.settings.gateway
        self._health = health.aio.HealthServicer()
        # Calls beyond their tenants' or the strangers' places end at once: here is room to say so.
        most = 2 * own.max_requests + PLACES
        self._server = grpc.aio.server(options=_options(own), maximum_concurrent_rpcs=most)
        shown = tuple(SERVICES) if gateway.settings.reflects else None
        self._strangers = Strangers(self._health, shown)
        self._server.add_generic_rpc_handlers((*services(gateway), *self._strangers.handlers()))

    async def start(
        self, host: str, port: int, certificates: CertificateFiles | None = None
    ) -> int:
        """Returns the port. Raises RuntimeError when it is taken. With certificates it speaks TLS,
        and nothing else."""
        logging.getLogger("grpc._cython.cygrpc").addFilter(_worth_keeping)
        port = listen(self._server, host, port, certificates)
        await self._server.start()
        for name in ("", *SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def drain(self) -> None:
        """Health says that it ends; new requests are the intake's to refuse."""
        await self._health.enter_graceful_shutdown()

    def close_door(self, grace_s: float) -> None:
        """Listens no more; clients are told to connect anew, elsewhere, and running calls have so
        long to end."""
        self._leaving = asyncio.create_task(self._server.stop(grace_s), name="grpc leaves")

    async def stop(self) -> None:
        await self._server.stop(_CLOSE_S)
