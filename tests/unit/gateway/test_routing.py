"""A request that the policy sends to another model is that model's: by its permission, its limits,
its price, and in the ledger, the record and the metrics."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from protos.tokenizer_pb2 import PromptPlan, TextDelta
from services.common.config import MeteringSettings
from services.common.policy import Policy, load_rules
from services.gateway import metrics
from services.gateway.identity.limits import Bound, Limit
from services.gateway.identity.principal import Principal
from services.gateway.metering.meter import Meter
from services.gateway.metering.refusals import refused as no_room
from services.gateway.metering.run import Held, Room, Run, Verdict
from tests.support.gateway_parts import (
    MODEL,
    Opened,
    SharedMeter,
    Tokenizers,
    gateway_parts,
    principal,
)
from tests.unit.gateway.test_generate import Front, asks, refused, says, served, usage

OTHER = "other"
PRICES = {MODEL: {"prompt": 1, "output": 1}, OTHER: {"prompt": 10, "output": 10}}
ROUTES = b"rules: [{name: there, pattern: secret, action: route, model: other}]"


def routes(then: Callable[[Opened], None]) -> Callable[[Opened], None]:
    """As a tokenizer does, whose policy sends secrets to the other model."""

    def script(opened: Opened) -> None:
        if "secret" in opened.request.text and opened.request.model != OTHER:
            opened.say(TextDelta(model=OTHER))
            opened.finish()
        else:
            then(opened)

    return script


@pytest.fixture
def parts() -> Iterator[Any]:
    shared = SharedMeter()
    with gateway_parts(metering=MeteringSettings(prices=PRICES), shared=shared) as parts:  # type: ignore[arg-type]
        parts.tokenizers = Tokenizers(routes(says("Hello")))
        parts.policy.current = Policy.of(load_rules(ROUTES))
        parts.shared = shared
        yield parts


def limit(name: str, model: str, most: float = 1000) -> Bound:
    return Bound("tenant:acme", Limit(name=name, of="tokens", most=most, per="day", model=model))


def knows(parts: Any, who: Principal, *limits: Bound) -> None:
    parts.auth.keys["Bearer k"] = Principal(
        who.tenant, who.user, who.roles, who.permissions, models=who.models, limits=limits
    )


async def settled(parts: Any, count: int) -> list[Run]:
    meter: Meter = parts.meter
    await asyncio.gather(*meter._upkeep._settling)
    assert len(parts.shared.settled) == count
    return list(parts.shared.settled)


async def test_who_answers_is_who_is_paid(parts):
    knows(parts, principal(), limit("asked", MODEL), limit("answers", OTHER))
    before = metrics.cost.labels(OTHER)._value.get()
    ended = metrics.generations.labels(OTHER, "ok")._value.get()
    front = Front(asks("a secret"))
    told = await served(parts, front)
    assert [run.bounds[0].limit.name for run in parts.shared.reserved] == ["asked", "answers"]
    assert parts.shared.reserved[1].held.cost == 10 * parts.shared.reserved[0].held.cost
    (run,) = await settled(parts, 1)
    assert (run.who["model"], run.used.cost) == (OTHER, 110_000)
    assert front.cost is not None
    assert front.cost.nanos == 110_000
    assert [answer.model for answer in front.finished] == [OTHER]
    assert told["model"] == OTHER
    assert told["cost"] == pytest.approx(110e-6)
    (made,) = [d for d in told["decisions"] if d["subject"] == "model"]
    assert (made["choice"], made["reasons"]) == (OTHER, {"asked": MODEL})
    assert metrics.cost.labels(OTHER)._value.get() == pytest.approx(before + 110e-6)
    assert metrics.generations.labels(OTHER, "ok")._value.get() == ended + 1
    assert parts.meter._upkeep._running == {}


async def test_a_model_that_the_key_may_not_use_answers_nobody(parts):
    knows(parts, principal(models=frozenset({MODEL})), limit("asked", MODEL))
    error = await refused(parts, Front(asks("a secret")))
    assert error.reason == "model_not_allowed"
    assert [opened.request.model for opened in parts.tokenizers.opened] == [MODEL]
    (run,) = await settled(parts, 1)
    assert (run.status, run.who["model"], run.used.cost) == ("refused", MODEL, 0)


async def test_its_limits_may_have_no_room(parts):
    knows(parts, principal(), limit("asked", MODEL), limit("answers", OTHER))
    reserve = parts.shared.reserve

    async def no_room_there(run: Run) -> Verdict:
        verdict: Verdict = await reserve(run)
        if run.who["model"] == OTHER:
            return Verdict((Room(run.bounds[0], 0, 9),), run.bounds[0], 9.0)
        return verdict

    parts.shared.reserve = no_room_there
    error = await refused(parts, Front(asks("a secret")))
    expected = no_room(Verdict((), limit("answers", OTHER), 9.0), Held(0, 0), "USD")
    assert error.message == expected.message
    assert await settled(parts, 0) == []
    assert [run.id for run in parts.shared.released] == [parts.shared.reserved[0].id]
    assert parts.meter._upkeep._running == {}


async def test_several_prompts_go_together_and_before_any_text(parts):
    def slow(opened: Opened) -> None:
        if opened.request.model == MODEL:
            opened.say(TextDelta(text="No", token_ids=[1], plan=PromptPlan()))
        else:
            says("Yes")(opened)

    parts.tokenizers = Tokenizers(routes(slow))
    front = Front(asks("plain"), asks("a secret"))
    await served(parts, front)
    assert front.texts == {0: "Yes", 1: "Yes"}
    (run,) = await settled(parts, 1)
    assert run.who["model"] == OTHER
    assert run.used.prompt == 2 * usage().prompt_tokens


async def test_a_policy_that_is_never_content_ends(parts):
    def always(opened: Opened) -> None:
        opened.say(TextDelta(model=OTHER if opened.request.model == MODEL else MODEL))
        opened.finish()

    parts.tokenizers = Tokenizers(always)
    assert (await refused(parts, Front())).reason == "policy_changed"
    assert len(parts.tokenizers.opened) == 3
