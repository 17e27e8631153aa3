"""A chat's search is paid for like tokens: at the embedding model's price, under its own line in
the ledger, within the limits that count tokens and cost."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos.retrieval_pb2 import SearchReply
from services.common.config import MeteringSettings
from services.common.errors import PenstockError
from services.gateway.identity.limits import Bound, Limit
from services.gateway.metering.run import Verdict
from tests.support.gateway_parts import (
    EMBEDDING_MODEL,
    MODEL,
    SharedMeter,
    Tokenizers,
    gateway_parts,
    principal,
)
from tests.unit.gateway.generating import Front, refused, says, served, usage
from tests.unit.gateway.test_generate import FOUND, leaning, rewriting_by

PRICES = MeteringSettings.model_validate(
    {
        "prices": {
            MODEL: {"prompt": 1.0, "output": 2.0},
            EMBEDDING_MODEL: {"prompt": 10.0, "cached": 2.0},
            "other": {"prompt": 100.0, "output": 100.0},
        }
    }
)
LIMITS = [
    {"of": "requests", "per": "minute", "most": 5},
    {"of": "concurrent", "most": 1},
    {"of": "tokens", "per": "minute", "most": 1000},
    {"of": "cost", "per": "day", "most": 1},
    {"of": "requests", "per": "hour", "most": 9, "model": EMBEDDING_MODEL},
]


@pytest.fixture
def meter() -> SharedMeter:
    return SharedMeter()


@pytest.fixture
def parts(meter: SharedMeter) -> Iterator[Any]:
    with gateway_parts(PRICES, meter) as parts:
        parts.tokenizers = Tokenizers(says("Hello", used=usage(8, 0, 3)))
        limits = tuple(
            Bound("key", Limit.model_validate({"name": f"l{n}", **one}))
            for n, one in enumerate(LIMITS)
        )
        parts.auth.keys["Bearer k"] = replace(principal(), limits=limits)
        parts.retrieval.reply = SearchReply(passages=FOUND, tokens=7)
        yield parts


def lines(meter: SharedMeter) -> dict[str, tuple[str, str, int, int]]:
    """Of the ledger, by route."""
    return {
        run.who["route"]: (run.who["model"], run.status, run.used.prompt, run.used.cost)
        for run in meter.settled
    }


async def test_it_has_a_line_of_its_own_and_its_cost_is_the_requests(parts, meter):
    front = Front(leaning())
    await served(parts, front)
    assert lines(meter) == {
        "search": (EMBEDDING_MODEL, "ok", 7, 70_000),
        "Test": (MODEL, "ok", 8, 14_000),
    }
    assert [run.id for run in meter.settled] == [f"{front.request_id}:search", front.request_id]
    assert front.cost.nanos == 84_000


async def test_it_is_no_further_request_among_those_that_limits_count(parts, meter):
    await served(parts, Front(leaning()))
    chat, search = ([(b.limit.of, b.limit.model) for b in run.bounds] for run in meter.reserved)
    assert [of for of, _ in chat] == ["requests", "concurrent", "tokens", "cost"]
    assert search == [("tokens", None), ("cost", None), ("requests", EMBEDDING_MODEL)]
    chat, search = meter.reserved
    assert (search.who["tenant"], search.who["user"]) == (chat.who["tenant"], chat.who["user"])
    assert search.held.tokens > 0


async def test_a_budget_without_room_for_it_ends_the_request(parts, meter):
    async def only_the_chat(run: Any) -> Verdict:
        meter.reserved.append(run)
        return Verdict() if run.who["route"] == "Test" else Verdict(blocked_by=run.bounds[-1])

    meter.reserve = only_the_chat
    error = await refused(parts, Front(leaning()))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert parts.retrieval.searches == parts.tokenizers.opened == []
    assert all(run.used.cost == 0 for run in meter.settled)


async def test_a_search_that_failed_costs_nothing(parts, meter):
    away = PenstockError(grpc.StatusCode.UNAVAILABLE, "away", stage="retrieval")
    parts.retrieval.reply = away
    front = Front(leaning())
    await served(parts, front)
    assert lines(meter)["search"] == (EMBEDDING_MODEL, "failed", 0, 0)
    assert front.cost.nanos == 14_000


async def test_a_model_that_rewrote_has_a_line_too(parts, meter):
    rewriting_by(parts, says("When was Ada Brandt born?", used=usage(20, 0, 6)))
    front = Front(leaning())
    await served(parts, front)
    assert lines(meter)["rewrite"] == ("other", "ok", 20, 2_600_000)
    assert front.cost.nanos == 2_600_000 + 70_000 + 14_000


async def test_a_limit_in_its_way_leaves_the_rule(parts, meter):
    async def not_the_model(run: Any) -> Verdict:
        return Verdict(blocked_by=run.bounds[-1]) if run.who["model"] == "other" else Verdict()

    meter.reserve = not_the_model
    rewriting_by(parts, says("x"))
    await served(parts, Front(leaning()))
    assert parts.retrieval.searches[0].query == "Ada Brandt When was she born?"


async def test_what_was_embedded_before_costs_what_cached_tokens_do(parts, meter):
    parts.retrieval.reply = SearchReply(passages=FOUND, tokens=7, cached=True, age_s=3)
    front = Front(leaning())
    await served(parts, front)
    (search,) = [run for run in meter.settled if run.who["route"] == "search"]
    assert (search.used.prompt, search.used.cached, search.used.cost) == (7, 7, 14_000)
