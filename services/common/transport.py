"""The one way to dial and the one way to listen between services: gRPC behind two locks.

    transport = Transport.of(settings, "router")
    server = transport.server(options, health=health)    # mount servicers, then
    port = transport.listen(server, host, 0)
    channel = transport.dial(address, "worker", options) # as any grpc.aio channel

Every call carries the install's secret as metadata; a server refuses a call without it before it
reads the first message. Open to strangers is only whether the server is well
(`grpc.health.v1.Health/Check`), because Kubernetes' probes cannot send metadata; their message is
not read either.

With `PENSTOCK_TLS_DIR` connections are mutual TLS besides: both ends show a certificate of the
install's authority and check the other's name, and callers.py says whom a method answers. Probes
know no TLS; for them a health port without any lock tells the same and nothing else.
"""

import hmac
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from prometheus_client import Counter

from services.common.config import Settings
from services.common.grpc_options import HEALTH_CONNECTIONS, Options, bounded
from services.common.locks.callers import allowed, may_call
from services.common.locks.certificates import CertificateFiles, channel_credentials, dns_name
from services.common.locks.secrets import kept_secret

_Handler = Any  # grpc.RpcMethodHandler, which has no type stubs

_KEY = "penstock-secret-bin"
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_HEALTH_OPTIONS = [("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", 16)]
_ANSWER_S = 5.0

_refused = Counter(
    "penstock_refused_calls_total", "Internal calls without the secret, or not allowed", ["why"]
)


class Transport:
    """Dials and serves with one secret, and with the certificate of one identity, if any."""

    def __init__(
        self,
        secret: str,
        certificates: CertificateFiles | None = None,
        *,
        identity: str = "",
        also: str = "",
    ) -> None:
        """`identity`: whose certificates they are; `also`: a second secret, taken as well."""
        self._secret = secret.encode()
        self._taken = [one.encode() for one in (secret, also) if one]
        self._certificates = certificates
        self._identity = identity

    @classmethod
    def of(cls, settings: Settings, identity: str) -> "Transport":
        """`identity`: the service that this process is, or "cli". With `internal_secret`, or else
        with the secret that the data directory keeps.

        Raises OSError when it can neither be read nor made there, and CertificateError.
        """
        given = settings.internal_secret.get_secret_value()
        secret = given or kept_secret(settings.data_dir, "internal-secret")
        also = settings.internal_secret_also.get_secret_value()
        if settings.tls_dir is None:
            return cls(secret, also=also)
        files = CertificateFiles.of_identity(settings.tls_dir, identity)
        return cls(secret, files, identity=identity, also=also)

    def dial(self, address: str, service: str, options: Options = ()) -> "Channel":
        """A channel to a `service` of this install, connected when it is first used."""
        pair = (_KEY, self._secret)
        if self._certificates is None:
            return Channel(grpc.aio.insecure_channel(address, options=options), pair)
        certificate = self._certificates.current()
        channel = grpc.aio.secure_channel(
            address,
            channel_credentials(certificate),
            options=[*options, ("grpc.ssl_target_name_override", dns_name(service))],
        )
        files = self._certificates
        return Channel(channel, pair, lambda: files.current() is not certificate)

    def server(
        self, options: Options = (), health: health_aio.HealthServicer | None = None
    ) -> grpc.aio.Server:
        """A server that knows its callers; `health` is what it tells strangers of itself."""
        lock = _Lock(self._taken, health, self._identity if self._certificates else None)
        return grpc.aio.server(interceptors=[lock], options=options)

    def listen(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Returns the port (0 takes a free one). Raises RuntimeError when it is taken."""
        return listen(server, host, port, self._certificates)


def health_server(health: health_aio.HealthServicer) -> grpc.aio.Server:
    """A server that tells anyone whether it is well, and nothing else; to be listened with by
    `listen`, without certificates."""
    nobody = secrets.token_bytes(32)
    options = [*_HEALTH_OPTIONS, *bounded(HEALTH_CONNECTIONS)]
    return grpc.aio.server(interceptors=[_Lock([nobody], health)], options=options)


async def refuses_strangers(
    address: str, method: str, tls: grpc.ChannelCredentials | None = None
) -> bool:
    """Whether a server that is not ours refuses a call that shows no secret. Raises RuntimeError
    when it does not answer."""
    dialled = grpc.aio.secure_channel(address, tls) if tls else grpc.aio.insecure_channel(address)
    async with dialled as channel:
        try:
            await channel.unary_unary(method)(b"", timeout=_ANSWER_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise RuntimeError(f"{address} does not answer: {error.details()}") from error
            return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False


def listen(
    server: grpc.aio.Server, host: str, port: int, certificates: CertificateFiles | None = None
) -> int:
    """Returns the port (0 takes a free one). Raises RuntimeError when it is taken."""
    address = host_port(host, port)
    if certificates is None:
        bound: int = server.add_insecure_port(address)
    else:
        bound = server.add_secure_port(address, certificates.server_credentials())
    return bound


def dial_door(address: str, shown: bytes | None = None, name: str = "") -> grpc.aio.Channel:
    """A channel to what strangers may call: the public gRPC API, a health port. `shown`: the
    certificate, PEM, that it is expected to show, whoever signed it, and one of its names; None: no
    TLS."""
    if shown is None:
        return grpc.aio.insecure_channel(address)
    options = [("grpc.ssl_target_name_override", name)]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(shown), options=options)


def end_call(call: grpc.aio.Call) -> None:
    """Cancels a call that was made here, in gRPC's core too: for grpc.aio one whose write failed is
    over, and its `cancel` does nothing, but while messages are unread the core goes on to hold it
    (and a task that waits for its status)."""
    call.cancel()
    call._cython_call.cancel("ended by its caller")


def host_port(host: str, port: int) -> str:
    """An address as gRPC wants it, of a name or an IP address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Lock(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets through who knows a secret, and answers the others without reading their message.

    A streaming handler is what makes gRPC leave the message unread, whatever the method is.
    """

    def __init__(
        self,
        known: Sequence[bytes],
        health: health_aio.HealthServicer | None,
        itself: str | None = None,
    ) -> None:
        """`itself`: the identity that is called, where callers show certificates."""
        self._known = known
        self._health = health
        self._itself = itself
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)
        self._health_check = grpc.stream_stream_rpc_method_handler(
            self._tell_health,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )

    async def intercept_service(
        self, proceed: Callable[[Any], Awaitable[_Handler]], details: Any
    ) -> _Handler:
        shown = next((value for key, value in details.invocation_metadata if key == _KEY), b"")
        if any(hmac.compare_digest(shown, secret) for secret in self._known):
            handler = await proceed(details)
            return handler if self._itself is None else self._for_named(details.method, handler)
        if details.method == _HEALTH_CHECK and self._health is not None:
            return self._health_check
        _refused.labels("secret").inc()
        return self._refusal

    def _for_named(self, method: str, handler: _Handler) -> _Handler:
        """`handler`, for those who may call it. Only a handler is told who calls."""
        if handler is None:  # no such method
            return None
        callers, itself = allowed(method), self._itself or ""
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        behaviour = getattr(handler, kind)

        async def check(context: Any) -> None:
            names = context.auth_context().get("peer_dns", ())  # not its URIs, nor its common name
            if may_call(callers, itself, names, context.peer()):
                return
            _refused.labels("name").inc()
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "this certificate's name may not call this method, or not from there",
            )

        async def one(request: Any, context: Any) -> Any:
            await check(context)
            return await behaviour(request, context)

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            await check(context)
            async for message in behaviour(request, context):
                yield message

        return handler._replace(**{kind: many if inspect.isasyncgenfunction(behaviour) else one})

    async def _tell_health(self, _messages: object, context: Any) -> None:
        assert self._health is not None
        await context.write(await self._health.Check(health_pb2.HealthCheckRequest(), context))


async def _refuse(_messages: object, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "PENSTOCK_INTERNAL_SECRET is not the same here, or was not sent",
    )


class Channel(grpc.aio.Channel):  # type: ignore[misc]
    """A channel whose calls carry one more metadata pair. Not an interceptor: those stay in the way
    of each message of a stream."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        pair: tuple[str, bytes],
        outdated: Callable[[], bool] = lambda: False,
    ) -> None:
        self._channel = channel
        self._pair = pair
        self._outdated = outdated

    @property
    def outdated(self) -> bool:
        """Whether certificates have changed since it was dialled: it would connect anew with the
        old ones, so who keeps a channel for long dials another one."""
        return self._outdated()

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

    async def __aenter__(self) -> "Channel":
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
