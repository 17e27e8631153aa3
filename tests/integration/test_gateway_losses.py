"""The gateway while clients go away, time runs out, it drains, or what it needs is gone."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import unavailable
from services.common.link import LinkCall
from tests.support.gateway_rig import (
    EMBEDDING_MODEL,
    Rig,
    ScriptedTokenizer,
    SmallRetrieval,
    finish,
    gateway_rig,
    plan,
    say,
    send,
)
from tests.support.http_chats import CHAT, ask, events, silent, store_of
from tests.support.inside import check
from tests.support.waiting import until


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace, max_requests=6) as rig:
        yield rig


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_cancels_the_work(rig, stream):
    async def one_word_and_silence(call: LinkCall, request: Any) -> None:
        send(call, "word", plan=plan(request))
        await asyncio.Event().wait()

    rig.tokenizer.script = one_word_and_silence
    http = await rig.http()
    request = asyncio.create_task(http.post(CHAT, json=ask(stream=stream)))
    await until(lambda: rig.tokenizer.requests, 5)
    request.cancel()
    await until(lambda: rig.tokenizer.cancelled == 1, 5)
    await until(lambda: rig.gateway.intake.running == 0, 5)


async def test_beyond_the_limit_of_requests_429(rig):
    rig.tokenizer.script = silent
    http = await rig.http()
    running = [asyncio.create_task(http.post(CHAT, json=ask())) for _ in range(3)]
    await until(lambda: len(rig.tokenizer.requests) == 3, 5)
    answer = await http.post(CHAT, json=ask())
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "too_many_requests"
    for request in running:
        request.cancel()
    await until(lambda: rig.gateway.intake.running == 0, 5)
    rig.tokenizer.script = say("ok")
    assert (await http.post(CHAT, json=ask())).status_code == 200


async def test_nothing_outlasts_the_request_timeout(redis_url, namespace):
    async with gateway_rig(redis_url, namespace, request_timeout_s=1.0) as rig:
        rig.tokenizer.script = silent
        http = await rig.http()
        answer = await http.post(CHAT, json=ask())
        assert answer.status_code == 504
        assert answer.json()["error"]["stage"] == "tokenizer"
        await until(lambda: rig.tokenizer.cancelled == 1, 5)


async def test_a_tokenizer_lost_before_the_first_word_is_replaced(rig):
    other = await rig.start(ScriptedTokenizer)
    await until(lambda: len(rig.gateway.tokenizers.ready()) == 2, 10)
    rig.tokenizer.script = silent
    other.service.script = silent
    http = await rig.http()
    request = asyncio.create_task(http.post(CHAT, json=ask()))
    await until(lambda: rig.tokenizer.requests or other.service.requests, 5)
    asked, spare = (
        (rig.tokenizer_host, other)
        if rig.tokenizer.requests
        else (
            other,
            rig.tokenizer_host,
        )
    )
    spare.service.script = say("still here")
    await asked.stop(0)
    answer = await request
    assert answer.json()["choices"][0]["message"]["content"] == "still here"
    record = await rig.record(answer.headers["x-request-id"])
    (moved,) = [d for d in record["decisions"] if d["subject"] == "tokenizer"]
    assert moved["choice"].startswith("tokenizer ")
    assert moved["choice"] != moved["reasons"]["lost"]
    check(json.dumps(record), spare.replica, asked.replica)


async def test_an_answer_does_not_wait_for_a_record_that_does_not_come(rig):
    async def never_ends(call: LinkCall, request: Any) -> None:
        await say("so", " it", " is")(call, request)
        await asyncio.Event().wait()

    rig.tokenizer.script = never_ends
    http = await rig.http()
    async with asyncio.timeout(20):
        answer = await http.post(CHAT, json=ask())
    assert answer.json()["choices"][0]["message"]["content"] == "so it is"
    assert (await rig.record(answer.headers["x-request-id"]))["status"] == "ok"


async def test_drain_lets_streams_finish_and_refuses_new_ones(rig):
    go_on = asyncio.Event()

    async def waits(call: LinkCall, request: Any) -> None:
        send(call, "first", plan=plan(request))
        await go_on.wait()
        send(call, " last")
        finish(call)

    rig.tokenizer.script = waits
    http = await rig.http()
    running = asyncio.create_task(http.post(CHAT, json=ask(stream=True)))
    await until(lambda: rig.tokenizer.requests, 5)
    stopping = asyncio.create_task(rig.host.stop(10))
    await until(lambda: rig.gateway.intake.draining, 5)
    refused = await http.post(CHAT, json=ask())
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert (await http.get("/readyz")).status_code == 503
    assert (await http.get("/healthz")).status_code == 200
    go_on.set()
    assert events((await running).text)[-1] == "[DONE]"
    async with asyncio.timeout(10):
        await stopping
    with pytest.raises(httpx.ConnectError):
        await http.get("/healthz")


async def test_what_outlasts_a_drains_grace_is_told_so(rig):
    async def never_ends(call: LinkCall, request: Any) -> None:
        send(call, "first", plan=plan(request))
        await asyncio.Event().wait()

    rig.tokenizer.script = never_ends
    http = await rig.http()
    streamed = asyncio.create_task(http.post(CHAT, json=ask(stream=True)))
    whole = asyncio.create_task(http.post(CHAT, json=ask()))
    await until(lambda: len(rig.tokenizer.requests) == 2, 5)
    await rig.host.stop(0.2)
    last = json.loads(events((await streamed).text)[-1])
    assert (last["error"]["code"], last["error"]["stage"]) == ("draining", "gateway")
    answer = await whole
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    await until(lambda: rig.tokenizer.cancelled == 2, 5)


async def test_without_retrieval_the_answer_says_so(redis_url, namespace):
    async with gateway_rig(redis_url, namespace, retrieval_timeout_s=0.3) as rig:
        http = await rig.http()
        tools = [{"type": "file_search", "vector_store_ids": [await store_of(rig, http)]}]

        async def asked() -> dict[str, Any]:
            answer = await http.post(CHAT, json=ask(tools=tools))
            assert answer.status_code == 200
            assert answer.json()["penstock"]["passages"] == []
            assert "answered without the vector stores" in answer.json()["penstock"]["warning"]
            record = await rig.record(answer.headers["x-request-id"])
            (made,) = [d for d in record["decisions"] if d["subject"] == "retrieval"]
            assert made["choice"] == "skipped"
            return dict(made["reasons"])

        rig.retrieval.hold.clear()
        assert (await asked())["cause"] == "timeout"
        rig.retrieval.hold.set()
        rig.retrieval.failure = unavailable("the store is away", stage="retrieval", reason="store")
        assert (await asked())["cause"] == "store"
        await rig.retrieval_host.stop(0)
        assert (await asked())["cause"] in ("unreachable", "no_replica", "timeout")


@pytest.mark.parametrize("how", ["killed", "draining"])
async def test_a_lost_retrieval_is_passed_over_while_it_is_still_registered(rig, how):
    spare = await rig.start(SmallRetrieval)
    await until(lambda: len(rig.gateway.retrieval._channels) == 2, 5)
    if how == "killed":
        await rig.retrieval_host._server.stop(None)
    else:
        rig.retrieval.failure = unavailable("stopping", stage="retrieval", reason="draining")
    http = await rig.http()
    body = {"model": EMBEDDING_MODEL, "input": "x"}
    for _ in range(8):  # in random order: each of them tries the lost one first with 1/2
        assert (await http.post("/v1/embeddings", json=body)).status_code == 200
    assert len(rig.gateway.retrieval._channels) == 2
    await spare.stop(0)
    refused = await http.post("/v1/embeddings", json=body)
    assert refused.status_code == 503


async def test_redis_killed_while_streaming(namespace):
    with EmbeddedRedis() as redis:
        async with gateway_rig(redis.url, namespace, key_cache_s=0.0) as rig:
            go_on = asyncio.Event()

            async def waits(call: LinkCall, request: Any) -> None:
                send(call, "first", plan=plan(request))
                await go_on.wait()
                finish(call)

            rig.tokenizer.script = waits
            http = await rig.http()
            other_key, _ = await rig.keys.create("acme")
            running = asyncio.create_task(http.post(CHAT, json=ask(stream=True)))
            await until(lambda: rig.tokenizer.requests, 5)
            os.kill(redis.pid, signal.SIGKILL)
            go_on.set()
            assert events((await running).text)[-1] == "[DONE]"

            # A key known before holds; an unknown one cannot be checked.
            assert (await http.post(CHAT, json=ask())).status_code == 200
            stranger = await rig.http(other_key)
            refused = await stranger.post(CHAT, json=ask())
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "keys_unavailable"
            away = await http.get("/v1/files")
            assert away.status_code == 503
            assert away.json()["error"]["code"] == "storage_unavailable"

            async def degraded() -> bool:
                told = await http.get("/readyz")
                assert told.status_code == 200, "known keys are served"
                return told.json()["status"] == "degraded" and "Redis" in told.json()["missing"][0]

            await until(degraded, 5, "readiness says what is away")
