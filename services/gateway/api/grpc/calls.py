"""What all calls have in common: an id, an end as gateway.proto has it, and their count."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import grpc

from protos import gateway_conversations_pb2, gateway_pb2, gateway_stores_pb2
from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.common.redis import RedisAway
from services.gateway import metrics
from services.gateway.api.grpc.fields import param_of
from services.gateway.api.rest.http import CLIENT_GONE, http_status, internal
from services.gateway.api.rest.lasting import refuse_key
from services.gateway.identity.permissions import admit
from services.gateway.identity.principal import Principal
from services.gateway.ids import REQUEST
from services.gateway.intake import Intake, Place
from services.gateway.metering.prices import Cost
from services.gateway.metering.refusals import LimitError
from services.gateway.parts import Gateway
from services.gateway.runs.text_stream import client_too_slow
from services.gateway.stores.vector_stores.vector_stores import storage_away

log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext, which has no type stubs
Reply = TypeVar("Reply")

Enter = Callable[[Intake, str], AbstractContextManager[Place]]
"""How a call takes its place: Intake.slot, or for looking at things Intake.visit."""

SERVICES = {
    service.full_name: service
    for file in (gateway_pb2, gateway_stores_pb2, gateway_conversations_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
"""The public ones, by their full names."""
_SERVICE_OF = {method.name: name for name, one in SERVICES.items() for method in one.methods}
LASTING = ("Chat", "Complete")  # what an idempotency key is for
_LAST_WORD_S = 2.0  # for a client that does not read to take its error


class Asked(NamedTuple):
    """front.Asked."""

    request_id: str
    route: str
    endpoint: str
    authorization: str | None
    traceparent: str | None


def endpoint(route: str) -> str:
    """As permissions.py has it."""
    return f"/{_SERVICE_OF[route]}/{route}"


def metadata_of(context: Context) -> dict[str, str]:
    """By name. Of a name that is there twice all values, as HTTP joins them: who shows two keys
    shows none, as readers differ in which of them counts."""
    found: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


async def tell_headers(context: Context, headers: Mapping[str, str]) -> None:
    if headers:
        await context.send_initial_metadata(tuple(headers.items()))


Handler = Callable[[object, Context], Awaitable[Any]]


def single(handler: Handler, reply: Any) -> Any:
    """A method of one reply. All methods are for streams of requests: so gRPC leaves a call's
    message unread until it is asked for it. On the wire one request is a stream of one."""
    return grpc.stream_unary_rpc_method_handler(
        handler, response_serializer=reply.SerializeToString
    )


def streaming(handler: Handler, reply: Any) -> Any:
    """The same of several replies."""
    return grpc.stream_stream_rpc_method_handler(
        handler, response_serializer=reply.SerializeToString
    )


class Writer:
    """The replies of a call that has several."""

    def __init__(self, context: Context, settings: GatewaySettings) -> None:
        self.headers: dict[str, str] = {}  # to be told with the first
        self._context = context
        self._timeout_s = settings.write_timeout_s
        self._begun = False

    async def write(self, message: Any) -> None:
        """Raises RESOURCE_EXHAUSTED where the client does not read it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self._begun:
                    # By itself: if it goes with a message that is given up, gRPC takes it for
                    # unsent and fails to tell the error.
                    self._begun = True
                    await self._context.send_initial_metadata(tuple(self.headers.items()))
                await self._context.write(message)
        except TimeoutError:
            raise client_too_slow() from None


async def caller(gateway: Gateway, metadata: Mapping[str, str], route: str) -> Principal:
    """Raises UNAUTHENTICATED, PERMISSION_DENIED."""
    principal = await gateway.auth.identify(metadata.get("authorization"))
    return admit(principal, endpoint(route))


@contextlib.asynccontextmanager
async def admitted(
    gateway: Gateway, metadata: Mapping[str, str], route: str, enter: Enter
) -> AsyncIterator[tuple[Principal, Place]]:
    """For what of a tenant is kept in Redis: who asks, and his place."""
    principal = await caller(gateway, metadata, route)
    try:
        with enter(gateway.intake, principal.tenant) as place:
            yield principal, place
    except RedisAway:
        raise storage_away() from None


def cost_of(cost: Cost) -> gateway_pb2.Cost:
    return gateway_pb2.Cost(amount=cost.amount, currency=cost.currency)


async def answered(
    route: str, context: Context, answer: Callable[[str, dict[str, str]], Awaitable[Reply]]
) -> Reply | None:
    """Runs a call with a request id; errors end it with gateway.proto's trailing metadata."""
    id = REQUEST.new()
    status = 200
    began = time.monotonic()
    context.set_trailing_metadata((("x-request-id", id),))
    try:
        metadata = metadata_of(context)
        if route not in LASTING:
            refuse_key(metadata)
        return await answer(id, metadata)
    except PenstockError as error:
        failure, status = error, http_status(error)
    except asyncio.CancelledError:
        status = CLIENT_GONE
        raise
    except Exception:
        log.exception("%s failed", route)
        failure, status = internal(), 500
    finally:
        metrics.requests.labels(route, status).inc()
        metrics.duration.labels(route).observe(time.monotonic() - began)
    with contextlib.suppress(TimeoutError):  # the client reads nothing; what is said waits for it
        async with asyncio.timeout(_LAST_WORD_S):
            await context.abort(failure.code, failure.message, tuple(_trailers(id, failure)))
    return None


def _trailers(id: str, error: PenstockError) -> Iterable[tuple[str, str]]:
    yield "x-request-id", id
    if error.param:
        yield "x-param", param_of(error.param)
    if error.retry_after_s > 0:
        yield "retry-after", str(math.ceil(error.retry_after_s))
    if isinstance(error, LimitError):
        yield from error.headers.items()
