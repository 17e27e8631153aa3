"""What a client hears of its limits."""

import grpc
import pytest

from services.gateway.identity.limits import Bound, Limit
from services.gateway.metering.refusals import duration, headers, refused
from services.gateway.metering.run import Held, Room, Verdict


def bound(of: str = "requests", most: float = 3, per: str | None = "minute", **more) -> Bound:
    return Bound("tenant:a", Limit(name="rule", of=of, most=most, per=per, **more))


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0ms"), (0.0201, "21ms"), (1, "1s"), (20.5, "20.5s"), (60, "1m0s"),
        (359.2, "6m0s"), (3600, "1h0m0s"), (3725, "1h2m5s"), (86_399.5, "24h0m0s"),
    ],
)  # fmt: skip
def test_times_are_told_as_openai_does(seconds, told):
    assert duration(seconds) == told


def test_headers_are_of_the_rule_that_leaves_least():
    rooms = [
        Room(bound("tokens", 1000), 400.7, 30),
        Room(bound("tokens", 9000, "hour"), 80, 1800),
        Room(bound("cost", 5, "day"), 0, 9),
    ]
    assert headers(rooms) == {
        "x-ratelimit-limit-tokens": "9000",
        "x-ratelimit-remaining-tokens": "80",
        "x-ratelimit-reset-tokens": "30m0s",
    }
    assert headers([]) == {}


def refusal(by: Bound, wait_s: float | None):
    return refused(Verdict((), by, wait_s), Held(120, 2_500_000), "EUR")


def test_a_refusal_names_the_limit_and_when_to_come_back():
    error = refusal(bound(), 19.2)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
    assert (error.retry_after_s, error.headers) == (19.2, {})
    assert "your tenant's limit 'rule': 3 requests per minute; try again in 19.2s" in error.message
    error = refusal(bound("cost", 2, "day", model="m"), 7000)
    assert (error.reason, error.headers) == ("insufficient_quota", {"x-should-retry": "false"})
    assert "may cost more than is left of your tenant's limit 'rule'" in error.message
    assert "2 EUR per day with the model 'm'" in error.message
    assert refusal(bound("concurrent", 2, None), 1).reason == "rate_limit_exceeded"


def test_what_waiting_does_not_help_is_no_429():
    error = refusal(bound("cost", 0.001, "day"), None)
    assert (error.code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, "max_tokens")
    assert "may take 0.0025 EUR" in error.message
    error = refusal(bound("tokens", 0), None)
    assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "limit_is_zero")
    assert error.retry_after_s == 0
