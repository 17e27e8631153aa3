"""What is counted, timed, traced and logged of a generation."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from protos.common_pb2 import (
    FINISH_STOP,
)
from protos.tokenizer_pb2 import TextDelta
from services.common.errors import PenstockError
from services.common.telemetry.logs import JsonLines
from services.common.telemetry.metrics import BoundedNames
from services.gateway import metrics
from services.gateway.runs import prompt as prompt_module
from services.gateway.runs import recorded
from services.gateway.runs.pipeline import serve
from tests.support.gateway_parts import MODEL, Opened, principal
from tests.support.waiting import until
from tests.unit.gateway.generating import (
    CODE,
    Front,
    answering_parts,
    asks,
    ends,
    refused,
    says,
    served,
    several,
    usage,
)


@pytest.fixture
def parts() -> Iterator[Any]:
    with answering_parts() as parts:
        yield parts


def samples(histogram: Any) -> dict[str, float]:
    (metric,) = histogram.collect()
    return {s.name.rpartition("_")[2]: s.value for s in metric.samples if "le" not in s.labels}


async def test_tokens_are_counted_by_kind_and_first_ones_timed(parts):
    names = ("prompt", "cached", "completion")
    kinds = {kind: metrics.tokens.labels(MODEL, kind) for kind in names}
    before = {kind: counter._value.get() for kind, counter in kinds.items()}
    first = samples(metrics.ttft.labels(MODEL))["count"]
    parts.tokenizers.script = says("a", "b", used=usage(50, 20, 7))
    await served(parts, Front(*several(2)))
    spent = {kind: counter._value.get() - before[kind] for kind, counter in kinds.items()}
    assert spent == {"prompt": 100, "cached": 40, "completion": 14}
    assert samples(metrics.ttft.labels(MODEL))["count"] == first + 1


def counted(model: str, outcome: str) -> float:
    return float(metrics.generations.labels(model, outcome)._value.get())


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (says("a"), "ok"),
        (ends(CODE.UNAVAILABLE, "half"), "failed"),
        (ends(CODE.INTERNAL), "failed"),
        (ends(CODE.DEADLINE_EXCEEDED), "failed"),
        (ends(CODE.RESOURCE_EXHAUSTED), "limited"),
        (ends(CODE.INVALID_ARGUMENT), "refused"),
        (ends(CODE.CANCELLED), "cancelled"),
    ],
)
async def test_generations_are_counted_by_whose_fault_their_end_is(parts, script, outcome):
    parts.tokenizers.script = script
    before = counted(MODEL, outcome)
    with suppress(PenstockError):
        await served(parts, Front())
    assert counted(MODEL, outcome) == before + 1


async def test_a_model_that_does_not_exist_gets_no_label(parts):
    before = counted(metrics.UNKNOWN, "refused")
    await refused(parts, Front(asks(model="of-no-label")))
    assert counted(metrics.UNKNOWN, "refused") == before + 1
    assert b"of-no-label" not in generate_latest()


async def test_tokens_are_told_by_tenant_up_to_a_number_of_them(parts):
    parts.tenants_told = parts.meter._tenants_told = BoundedNames(1)
    parts.auth.keys["Bearer late"] = principal(tenant="late-tenant")

    def spent(tenant: str) -> float:
        return float(metrics.tenant_tokens.labels(tenant, "completion")._value.get())

    before = spent("acme"), spent("other")
    await served(parts, Front())
    late = Front(key="Bearer late")
    await serve(parts, late)
    assert (spent("acme"), spent("other")) == (before[0] + 3, before[1] + 3)
    assert b"late-tenant" not in generate_latest()


async def test_a_requests_line_in_the_log_has_its_trace_and_no_text(parts):
    lines: list[dict[str, Any]] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonLines("gateway").format(record)))

    logger, reader = logging.getLogger(recorded.__name__), Reader()
    logger.addHandler(reader)
    logger.setLevel(logging.INFO)
    try:
        front = Front(asks(text="a secret question"))
        await served(parts, front)
    finally:
        logger.removeHandler(reader)
        logger.setLevel(logging.NOTSET)
    (line,) = [one for one in lines if front.request_id in one["message"]]
    (opened,) = parts.tokenizers.opened
    assert line["trace_id"] == opened.traceparent.split("-")[1]
    assert "secret" not in json.dumps(lines)


async def test_an_answers_rate_is_of_the_tokens_behind_its_first_arrival(monkeypatch):
    clock = iter([10.0, 10.5, 12.0])
    now = SimpleNamespace(monotonic=lambda: next(clock), time=time.time)
    monkeypatch.setattr(prompt_module, "time", now)
    answer = prompt_module.Answer("r", MODEL, [])
    assert answer.tokens_per_s is None
    for ids in ([1, 2], [3], [4, 5, 6]):
        answer.add([TextDelta(token_ids=ids)])
    assert answer.tokens_per_s == 2.0


async def test_a_whole_answers_rate_is_counted_and_no_broken_one(parts):
    for script, more in ((says("a", "b"), 1), (ends(CODE.UNAVAILABLE, "a", "b"), 0)):
        front = Front()

        async def slowly(opened: Opened, script: Any = script, front: Front = front) -> None:
            opened.say(TextDelta(text="x", token_ids=[9]))
            await until(lambda: front.texts == {0: "x"})
            script(opened)

        telling: list[asyncio.Task[None]] = []
        parts.tokenizers.script = lambda opened, to=telling, tell=slowly: to.append(
            asyncio.create_task(tell(opened))
        )
        before = samples(metrics.rate.labels(MODEL))["count"]
        with suppress(PenstockError):
            await served(parts, front)
        await asyncio.gather(*telling)
        assert samples(metrics.rate.labels(MODEL))["count"] == before + more


async def test_the_gap_between_arrivals_is_shared_by_their_tokens(parts, monkeypatch):
    clock = iter([10.0, 16.0, 17.0])
    now = SimpleNamespace(monotonic=lambda: next(clock), time=time.time)
    monkeypatch.setattr(prompt_module, "time", now)
    front = Front()

    async def one_by_one(opened: Opened) -> None:
        opened.say(TextDelta(text="a", token_ids=[1, 2]))
        await until(lambda: front.texts == {0: "a"})
        opened.say(TextDelta(text="b", token_ids=[3, 4, 5]))
        await until(lambda: front.texts == {0: "ab"})
        opened.say(TextDelta(finish=FINISH_STOP))
        opened.finish()

    telling: list[asyncio.Task[None]] = []
    parts.tokenizers.script = lambda opened: telling.append(asyncio.create_task(one_by_one(opened)))
    gaps = metrics.itl.labels(MODEL)
    summed, count = gaps.sum, sum(gaps.of_buckets)
    await served(parts, front)
    await telling[0]
    assert gaps.sum - summed == pytest.approx(2.0)
    assert sum(gaps.of_buckets) - count == 1


async def test_prompts_and_answers_are_kept_only_where_that_is_switched_on(parts):
    for shown in (False, True):
        parts.settings.log_prompts = shown
        told = await served(parts, Front(*several(2)))
        (span,) = [s for s in told["spans"] if s["name"] == "generate"]
        expected = {"prompt": "0\n1", "answer": "Hello world\nHello world"} if shown else {}
        assert span["attributes"] == expected
