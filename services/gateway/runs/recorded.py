"""What holds for every request that is computed: who asks, its place, its bounds and its record."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from services.common.errors import PenstockError
from services.common.telemetry.spans import Within
from services.gateway import metrics
from services.gateway.api.rest.http import internal
from services.gateway.identity.permissions import admit
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.metering.meter import Metered, status_of
from services.gateway.parts import Gateway
from services.gateway.runs.front import Asked
from services.gateway.runs.records import Journal, client_context

log = logging.getLogger(__name__)

_LAST_WORD_S = 1.0  # after the deadline, for the downstream's own account of it

Settle = Callable[[Metered, PenstockError | None], object]


async def recorded(
    gateway: Gateway,
    asked: Asked,
    work: Callable[[Principal, Place, Journal], Awaitable[None]],
    principal: Principal | None = None,
    settle: Settle | None = None,
) -> None:
    """Who asks (`principal`, where that is known), and whether there is a place; then runs `work`
    within its bounds and keeps its record, however it ends. Of a stranger's or a refused request
    nothing is kept. `settle`: the meter's last word, where that is not `end`.

    Raises PenstockError; and CancelledError when the client has gone, after cancelling downstream.
    """
    journal = Journal(asked.request_id, asked.route)
    root = place = None
    span = gateway.telemetry.span
    told = {"route": asked.route, "request_id": asked.request_id}
    try:
        with span("request", client_context(asked.traceparent), **told) as root:
            with span("authenticate"):
                if principal is None:
                    principal = await gateway.auth.identify(asked.authorization)
                    admit(principal, asked.endpoint)
                journal.tenant = principal.tenant
            with gateway.intake.slot(principal.tenant) as place:
                async with asyncio.timeout(
                    gateway.settings.gateway.request_timeout_s + _LAST_WORD_S
                ):
                    await work(principal, place, journal)
    except PenstockError as error:
        journal.fail(error)
        raise
    except TimeoutError:
        late = PenstockError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "the request did not end in time",
            stage="gateway",
            reason="deadline",
        )
        journal.fail(late)
        raise late from None
    except asyncio.CancelledError:
        gone = "its client cancelled it or went away"
        journal.fail(
            PenstockError(grpc.StatusCode.CANCELLED, gone, stage="client", reason="cancelled")
        )
        raise
    except Exception:
        journal.fail(internal())
        raise
    finally:
        if (metered := journal.metered) is not None:
            (settle or gateway.meter.end)(metered, journal.error)
            journal.metered, journal.cost = None, metered.cost
        if root is not None:
            journal.close(gateway.telemetry.record(root, journal.decisions, journal.below))
            if place is not None and not journal.goes_on:
                gateway.records.keep(journal)
                with Within(root):  # which has ended: for the line in the log
                    _account(gateway, journal)


def _account(gateway: Gateway, journal: Journal) -> None:
    model = journal.served or metrics.UNKNOWN
    metrics.generations.labels(model, status_of(journal.error)).inc()
    spent = {"completion": journal.tokens}  # what has come, of an answer that is not whole
    if (used := journal.usage) is not None:
        spent = {
            "prompt": used.prompt_tokens,
            "cached": used.cached_tokens,
            "completion": used.completion_tokens,
        }
    tenant = gateway.tenants_told.of(journal.tenant)
    for kind, count in spent.items():
        metrics.tokens.labels(model, kind).inc(count)
        metrics.tenant_tokens.labels(tenant, kind).inc(count)
    log.info(
        "%s %s: %s in %.0f ms, %d tokens",
        journal.request_id,
        journal.route,
        (journal.error.reason or journal.error.code.name.lower()) if journal.error else "ok",
        journal.duration_s * 1000,
        journal.tokens,
    )
