"""Parts of a running system are killed in the middle of streams."""

import asyncio
import re
import signal
from contextlib import suppress
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio

from services.common.redis import RedisAway
from tests.chaos.conftest import LASTS_S, WINDOW
from tests.support.cluster import Cluster, Process
from tests.support.streams import Stream, complete, lasting
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = {
    "model": "tiny",
    "prompt": "the water at the end of the penstock " * 8,
    "ignore_eos": True,
}


FEW = 5
"""Chunks: a gateway that gets little of the machine joins many tokens to one."""


class Undisturbed(NamedTuple):
    """What is answered where nothing is lost, by one worker alone."""

    asked: list[dict[str, Any]]
    """Greedily, and drawn by a seed."""
    texts: list[str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(cluster: Cluster) -> Undisturbed:
    await cluster.start(workers=["both"])
    async with cluster.api() as api:
        tokens = await lasting(api, LONG | {"temperature": 0}, LASTS_S, 3000, WINDOW - 500)
        ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 11}]
        asked = [LONG | way | {"max_tokens": tokens} for way in ways]
        return Undisturbed(asked, await asyncio.gather(*(complete(api, body) for body in asked)))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_a_lost_decode_worker_is_a_pause_and_nothing_else(
    cluster: Cluster, undisturbed: Undisturbed, how: signal.Signals
) -> None:
    await cluster.start(workers=["prefill", "decode", "decode"])
    async with cluster.api() as api:
        streams = [Stream(api, body) for body in undisturbed.asked]
        await asyncio.gather(*(stream.reached(FEW) for stream in streams))
        victim = await cluster.busy_worker("decode")
        victim.signal(how)
        assert [await stream.finished() for stream in streams] == undisturbed.texts
        records = [await stream.record() for stream in streams]
        moved = [d for r in records for d in r["decisions"] if d["subject"] == "failover"]
        assert moved, "the why-record tells of it"


async def test_a_lost_prefill_worker_is_replaced_by_the_decode_worker(
    cluster: Cluster, undisturbed: Undisturbed
) -> None:
    await cluster.start(workers=["prefill", "decode"])
    async with cluster.api() as api:
        victim = cluster.worker("prefill")
        victim.signal(signal.SIGSTOP)  # takes requests, computes nothing
        streams = [Stream(api, body) for body in undisturbed.asked]
        await busy_or_waiting(cluster)
        victim.kill()
        assert [await stream.finished() for stream in streams] == undisturbed.texts


async def busy_or_waiting(cluster: Cluster) -> None:
    async def admitted() -> bool:
        return (await cluster.router_status()).admitted >= 1

    await until(admitted, what="a request was sent to workers")


async def test_without_redis_streams_finish_and_new_requests_are_served(
    cluster: Cluster, undisturbed: Undisturbed
) -> None:
    await cluster.start(workers=["prefill", "decode"])
    async with cluster.api() as api:
        streams = [Stream(api, body) for body in undisturbed.asked]
        await asyncio.gather(*(stream.reached(FEW) for stream in streams))
        cluster.redis.stop()
        assert [await stream.finished() for stream in streams] == undisturbed.texts
        assert await complete(api, undisturbed.asked[0]) == undisturbed.texts[0], (
            "known key, last view, local admission"
        )
        unknown = await api.post(
            "/v1/completions",
            json=undisturbed.asked[0],
            headers={"Authorization": "Bearer psk-" + "x" * 43},
        )
        assert unknown.status_code == 503
        cluster.redis.start()

        async def registered_again() -> bool:
            with suppress(*RedisAway):
                key = f"{cluster.namespace}:{{registry:worker}}"
                return await cluster.client.hlen(key) == 2
            return False

        await until(registered_again, 15)
        assert await complete(api, undisturbed.asked[0]) == undisturbed.texts[0]


RUNNING = {
    "router": "penstock_router_admitted_requests",
    "tokenizer": "penstock_tokenizer_running_requests",
}


async def usage_of(api: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await api.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return tokens(answer.json()["usage"])


def tokens(usage: dict[str, Any] | None) -> dict[str, Any]:
    """What is paid for. How many were guessed ahead depends on what seemed to pay at the time."""
    assert usage is not None
    return {name: value for name, value in usage.items() if name != "speculation"}


def grown(usage: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What so many tokens cost in place of one."""
    assert usage["completion_tokens"] == 1
    total = usage["prompt_tokens"] + tokens
    return usage | {"completion_tokens": tokens, "total_tokens": total}


async def busy(cluster: Cluster, service: str) -> Process:
    """A process of the service that carries some of the streams now."""
    for process in cluster.of(service):
        assert process.replica is not None
        async with httpx.AsyncClient() as http:
            told = (await http.get(process.replica.metrics_url)).text
        found = re.search(rf"^{RUNNING[service]} (\S+)$", told, re.MULTILINE)
        if found and float(found[1]):
            return process
    raise AssertionError(f"no {service} is busy")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
@pytest.mark.parametrize("service", ["router", "tokenizer"])
async def test_one_of_two_routers_or_tokenizers_lost_is_a_pause_and_nothing_else(
    cluster: Cluster, undisturbed: Undisturbed, service: str, how: signal.Signals
) -> None:
    await cluster.start(workers=["both"], routers=2, tokenizers=2)
    async with cluster.api() as api:
        usages = []
        for body in undisturbed.asked:
            one = body | {"max_tokens": 1}
            await usage_of(api, one)
            usages.append(grown(await usage_of(api, one), body["max_tokens"]))
        streams = [Stream(api, body) for body in undisturbed.asked * 2]
        await asyncio.gather(*(stream.reached(FEW) for stream in streams))
        (await busy(cluster, service)).signal(how)
        assert [await stream.finished() for stream in streams] == undisturbed.texts * 2
        assert [tokens(stream.usage) for stream in streams] == usages * 2
        records = [await stream.record() for stream in streams]
        went_on = [d for r in records for d in r["decisions"] if d["subject"] == service]
        assert went_on, "the why-record tells of it"


@pytest.mark.parametrize("service", ["router", "tokenizer"])
async def test_the_only_router_or_tokenizer_lost_is_a_pause_until_it_is_back(
    cluster: Cluster, undisturbed: Undisturbed, service: str
) -> None:
    await cluster.start(workers=["both"])
    async with cluster.api() as api:
        streams = [Stream(api, body) for body in undisturbed.asked]
        for _ in range(2):  # the restarted one too
            await asyncio.gather(*(stream.reached(stream.chunks + FEW) for stream in streams))
            cluster.of(service)[-1].kill()
            await cluster.up(cluster.spawn(service))
        assert [await stream.finished() for stream in streams] == undisturbed.texts

        async def all_is_free() -> bool:  # a dead router's slots too
            status = await cluster.router_status_of(cluster.of("router")[-1])
            return status.admitted == sum(w.running for w in status.workers) == 0

        await until(all_is_free, 30)
