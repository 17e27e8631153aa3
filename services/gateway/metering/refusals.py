"""What a client hears of its limits: OpenAI's headers, and errors whose Retry-After is true."""

import math
from collections.abc import Mapping, Sequence

import grpc

from services.common.errors import PenstockError, unavailable
from services.gateway import metrics
from services.gateway.identity.limits import Bound
from services.gateway.metering.prices import NANO
from services.gateway.metering.run import Held, Room, Verdict

LATER_S = 60.0  # OpenAI's clients wait no longer by themselves, and try again sooner
EXPOSED = tuple(
    f"x-ratelimit-{what}-{of}"
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
"""The headers, for pages of other origins to read."""
_WORDS = {"requests": "requests", "tokens": "tokens", "concurrent": "requests at once"}


class LimitError(PenstockError):
    """No room in a limit. `headers`: what all limits leave, and whether to try again by itself."""

    headers: Mapping[str, str] = {}


def headers(rooms: Sequence[Room]) -> dict[str, str]:
    """x-ratelimit-…-requests and -tokens, of whichever rule leaves least of each."""
    told = {}
    for of in ("requests", "tokens"):
        own = [room for room in rooms if room.bound.limit.of == of]
        if own:
            room = min(own, key=lambda room: room.left)
            told[f"x-ratelimit-limit-{of}"] = f"{room.bound.limit.most:.0f}"
            told[f"x-ratelimit-remaining-{of}"] = f"{math.floor(room.left + 1e-6)}"
            told[f"x-ratelimit-reset-{of}"] = duration(room.reset_s)
    return told


def duration(seconds: float) -> str:
    """As OpenAI writes it: "6m0s", "1.5s", "20ms"."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours = whole // 3600
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes = f"{whole % 3600 // 60}m{whole % 60}s"
    return f"{hours}h{minutes}" if hours else minutes


def refused(verdict: Verdict, held: Held, currency: str) -> LimitError:
    """The error of a request that a limit has no room for."""
    bound = verdict.blocked_by
    assert bound is not None, "no rule stands in the way"
    metrics.limited.labels(bound.limit.of).inc()
    error = _error(verdict.wait_s, bound, held, currency)
    error.headers = headers(verdict.rooms)
    if verdict.wait_s is None or verdict.wait_s > LATER_S:
        error.headers = {**error.headers, "x-should-retry": "false"}
    return error


def _error(wait_s: float | None, bound: Bound, held: Held, currency: str) -> LimitError:
    limit = bound.limit
    rule = f"{_whose(bound)} limit '{limit.name}': {_most(bound, currency)}"
    if wait_s is None:
        return _never(rule, bound, held, currency)
    needs = {"tokens": "the request may take more", "cost": "the request may cost more"}
    calendar = limit.per in ("day", "month")
    return LimitError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{needs.get(limit.of, 'this is more')} than is left of {rule}; "
        f"try again in {duration(wait_s)}",
        stage="gateway",
        reason="insufficient_quota" if calendar else "rate_limit_exceeded",
        retry_after_s=wait_s,
    )


def _never(rule: str, bound: Bound, held: Held, currency: str) -> LimitError:
    """Waiting would not help: no 429, which clients try again."""
    limit = bound.limit
    if limit.most and limit.of in ("tokens", "cost"):
        needs = f"{held.tokens} tokens"
        if limit.of == "cost":
            needs = f"{held.cost / NANO:g} {currency}"
        return LimitError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request may take {needs}, more than {rule}; lower max_tokens or shorten it",
            stage="gateway",
            param="max_tokens",
            reason="request_too_large",
        )
    return LimitError(
        grpc.StatusCode.PERMISSION_DENIED,
        f"this is not allowed, by {rule}",
        stage="gateway",
        reason="limit_is_zero",
    )


def away() -> PenstockError:
    """One of the rules lets nothing through that it cannot count."""
    return unavailable(
        "your limits cannot be checked now", stage="gateway", reason="limits_unavailable"
    )


def _whose(bound: Bound) -> str:
    return "your tenant's" if bound.owner.startswith("tenant:") else "your"


def _most(bound: Bound, currency: str) -> str:
    limit = bound.limit
    what = f"{limit.most:g} {currency if limit.of == 'cost' else _WORDS[limit.of]}"
    per = f" per {limit.per}" if limit.per else ""
    return f"{what}{per}" + (f" with the model '{limit.model}'" if limit.model else "")
