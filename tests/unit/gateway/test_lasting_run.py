"""A run's own end, against what its last write is told."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from protos.runs_pb2 import StoredCaller, StoredRun
from protos.tokenizer_pb2 import TextDelta
from services.common.config import RunsSettings
from services.common.redis import Redis
from services.gateway.runs.lasting.failures import too_large
from services.gateway.runs.lasting.run import Run
from services.gateway.runs.lasting.store import RunStore
from services.gateway.runs.lasting.stored import text_of
from services.gateway.runs.prompt import Answer

STORED = StoredRun(request_id="req_1", caller=StoredCaller(tenant="acme"))
PLACE = ("acme", "req_1")
BODY = text_of(STORED)


@pytest.fixture
def store(redis: Redis, namespace: str) -> Callable[..., RunStore]:
    def made(**settings: Any) -> RunStore:
        return RunStore(redis, namespace, "one", RunsSettings(lease_s=60, **settings))

    return made


@pytest.mark.parametrize("why", ["full", "cancelled"])
async def test_an_answer_whose_last_words_were_not_taken_is_not_told_as_whole(
    store: Callable[..., RunStore], why: str
) -> None:
    one = store(max_bytes_per_tenant=len(BODY) + (100 if why == "full" else 10_000))
    await one.begin(PLACE, BODY, "name", "d")
    if why == "cancelled":
        await one.cancel(PLACE)
    run = Run(one, STORED, [], keeps_ids=False)

    async def answers() -> None:
        answer = Answer("req_1", "m", [])
        await run.write(answer, [TextDelta(text="a" * 200)])
        await run.finish([answer], None)

    run.task = asyncio.create_task(answers())
    with pytest.raises(asyncio.CancelledError):
        await run.task
    assert run.over == why
    assert await one.renew(PLACE) in ("ok", "cancelled"), "it has not ended"
    await run.fail(too_large())
    *_, last = (await one.read(PLACE)).events
    assert last.HasField("failed")
    run.close()
