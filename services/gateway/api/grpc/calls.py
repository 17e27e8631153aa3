"""What all calls have in common: an id, an end as gateway.proto has it, and their count."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from protos import gateway_pb2
from services.common.errors import PenstockError
from services.gateway import metrics
from services.gateway.api.grpc.fields import param_of
from services.gateway.api.rest.http import CLIENT_GONE, http_status, internal
from services.gateway.api.rest.lasting import refuse_key
from services.gateway.ids import REQUEST
from services.gateway.metering.prices import Cost
from services.gateway.metering.refusals import LimitError

log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext, which has no type stubs
Reply = TypeVar("Reply")

INFERENCE = "penstock.v1.Inference"
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
    return f"/{INFERENCE}/{route}"


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
