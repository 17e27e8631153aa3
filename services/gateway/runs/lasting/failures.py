"""How runs that outlive their connections are refused, and how they end before their answers do."""

import grpc

from services.common.errors import PenstockError, invalid, unavailable

MOVED = "run_moved"
MAX_KILLED = 3  # gateways under one run; it may be the run that they die of


def away() -> PenstockError:
    return unavailable(
        "stored runs cannot be reached now: Redis is away",
        stage="gateway",
        reason="runs_unavailable",
    )


def key_reused() -> PenstockError:
    return invalid(
        "This Idempotency-Key was used with another request.",
        "Idempotency-Key",
        reason="idempotency_key_reused",
        stage="gateway",
    )


def nothing_to_resume() -> PenstockError:
    """Another run would say something else: what its client has would not be its beginning."""
    return PenstockError(
        grpc.StatusCode.NOT_FOUND,
        "There is no run of this Idempotency-Key to go on with: it was never begun, has failed, "
        "was deleted or is no longer kept. Without 'Last-Event-ID' it is begun anew.",
        stage="gateway",
        reason="run_not_found",
        param="Last-Event-ID",
    )


def gave_up() -> PenstockError:
    return PenstockError(
        grpc.StatusCode.UNAVAILABLE,
        f"{MAX_KILLED} gateways were lost under this request",
        stage="gateway",
        reason="gateways_lost",
    )


def lost() -> PenstockError:
    """Another gateway has it, or it was deleted."""
    return unavailable("this gateway has the run no more", stage="gateway", reason=MOVED)


def cancelled() -> PenstockError:
    return PenstockError(
        grpc.StatusCode.CANCELLED, "the request was cancelled", stage="client", reason="cancelled"
    )


def too_large() -> PenstockError:
    return PenstockError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "your stored runs have reached their limit; delete some first",
        stage="gateway",
        reason="too_many_runs",
    )
