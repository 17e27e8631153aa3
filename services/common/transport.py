"""The one way to dial and the one way to listen between services: gRPC behind a lock.

    transport = Transport.of(settings)
    server = transport.server(options, health=health)    # mount servicers, then
    port = listen(server, host, 0)
    channel = transport.dial(address, options)           # as any grpc.aio channel

Every call carries the install's secret as metadata; a server refuses a call without it before it
reads the first message. Open to strangers is only whether the server is well
(`grpc.health.v1.Health/Check`), because Kubernetes' probes cannot send metadata; their message is
not read either. Mutual TLS has its place here: the credentials of `dial` and `listen`.
"""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from prometheus_client import Counter

from services.common.config import Settings
from services.common.secrets import kept_secret

Options = Sequence[tuple[str, Any]]
_Handler = Any  # grpc.RpcMethodHandler, which has no type stubs

_KEY = "penstock-secret-bin"
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_MAX_MESSAGE_BYTES = 64 * 2**20
MESSAGE_LIMITS = [  # for both ends
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
]

# A peer that vanished without a word (its host, the path to it) is noticed in the sum of both.
KEEPALIVE_MS, KEEPALIVE_ANSWER_MS = 10_000, 5_000
KEEPALIVE = [  # of a channel
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
    ("grpc.http2.max_pings_without_data", 0),  # any number
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_MS),
]
KEEPALIVE_ALLOWED = [  # of a server, which would otherwise end a connection for its pings
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
]

_refused = Counter("penstock_refused_calls_total", "Internal calls without the install's secret")


class Transport:
    """Dials and serves with one secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    @classmethod
    def of(cls, settings: Settings) -> "Transport":
        """With `internal_secret`, or else with the secret that the data directory keeps.

        Raises OSError when it can neither be read nor made there.
        """
        given = settings.internal_secret.get_secret_value()
        return cls(given or kept_secret(settings.data_dir, "internal-secret"))

    def dial(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """A channel to a service of this install, connected when it is first used."""
        return _Channel(grpc.aio.insecure_channel(address, options=options), (_KEY, self._secret))

    def server(
        self, options: Options = (), health: health_aio.HealthServicer | None = None
    ) -> grpc.aio.Server:
        """A server that knows its callers; `health` is what it tells strangers of itself."""
        return grpc.aio.server(interceptors=[_Lock(self._secret, health)], options=options)


def listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Returns the port (0 takes a free one). Raises RuntimeError when it is taken."""
    bound: int = server.add_insecure_port(host_port(host, port))
    return bound


def host_port(host: str, port: int) -> str:
    """An address as gRPC wants it, of a name or an IP address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Lock(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets through who knows the secret, and answers the others without reading their message.

    A streaming handler is what makes gRPC leave the message unread, whatever the method is.
    """

    def __init__(self, secret: bytes, health: health_aio.HealthServicer | None) -> None:
        self._secret = secret
        self._health = health
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)
        self._health_check = grpc.stream_stream_rpc_method_handler(
            self._tell_health,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )

    async def intercept_service(
        self, proceed: Callable[[Any], Awaitable[_Handler]], details: Any
    ) -> _Handler:
        shown = next((value for key, value in details.invocation_metadata if key == _KEY), b"")
        if hmac.compare_digest(shown, self._secret):
            return await proceed(details)
        if details.method == _HEALTH_CHECK and self._health is not None:
            return self._health_check
        _refused.inc()
        return self._refusal

    async def _tell_health(self, _messages: object, context: Any) -> None:
        assert self._health is not None
        await context.write(await self._health.Check(health_pb2.HealthCheckRequest(), context))


async def _refuse(_messages: object, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "PENSTOCK_INTERNAL_SECRET is not the same here, or was not sent",
    )


class _Channel(grpc.aio.Channel):  # type: ignore[misc]
    """A channel whose calls carry one more metadata pair. Not an interceptor: those stay in the way
    of each message of a stream."""

    def __init__(self, channel: grpc.aio.Channel, pair: tuple[str, bytes]) -> None:
        self._channel = channel
        self._pair = pair

    def _carrying(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def start(*request: Any, metadata: Sequence[Any] | None = None, **options: Any) -> Any:
            return call(*request, metadata=(self._pair, *(metadata or ())), **options)

        return start

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._carrying(self._channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._carrying(self._channel.unary_stream(*method, **options))

    def stream_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._carrying(self._channel.stream_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._carrying(self._channel.stream_stream(*method, **options))

    async def __aenter__(self) -> "_Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
