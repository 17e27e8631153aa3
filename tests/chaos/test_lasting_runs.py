"""What outlives its connection outlives its gateway, its router and its worker, with real ones."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from services.gateway.metering.ledger import Ledger
from tests.chaos.conftest import LASTS_S, WINDOW
from tests.chaos.test_lost_parts import busy
from tests.support.cluster import Cluster
from tests.support.streams import lasting
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": "the water at the end of the penstock " * 8,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 11,
}
RESPONSE: dict[str, Any] = {"model": "tiny", "temperature": 0}
KEY = {"Idempotency-Key": "k"}


class Told:
    """A stream's text, wherever it was read."""

    def __init__(self) -> None:
        self.text = ""
        self.last = -1  # event
        self.end: dict[str, Any] = {}
        self.usage: dict[str, Any] = {}
        self._moved = asyncio.Condition()

    async def take(self, events: AsyncGenerator[tuple[int, dict[str, Any]], None]) -> None:
        async with aclosing(events):
            async for number, event in events:
                assert number > self.last, "no event comes twice"
                self.last = number
                self.usage = event.get("usage") or self.usage
                if event.get("type") == "response.output_text.delta":
                    self.text += event["delta"]
                elif event.get("type", "") in ("response.completed", "response.incomplete"):
                    self.end = event["response"]
                for choice in event.get("choices", []):
                    self.text += choice["text"]
                    self.end = choice if choice["finish_reason"] else self.end
                async with self._moved:
                    self._moved.notify_all()

    async def grows(self, characters: int = 60) -> None:
        wanted = len(self.text) + characters
        async with asyncio.timeout(60), self._moved:
            await self._moved.wait_for(lambda: len(self.text) >= wanted or bool(self.end))
        assert not self.end, "it ended before"


async def events_of(response: httpx.Response) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    assert response.status_code == 200, await response.aread()
    number = -1
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line[6:])
            assert "error" not in event or event["error"] is None, event
            yield event.get("sequence_number", number), event


async def undisturbed(
    api: httpx.AsyncClient, tokens: int
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The completion, a response that is as long as it may be, and what that one was asked."""
    body = {**COMPLETION, "max_tokens": tokens}
    completion = (await api.post("/v1/completions", json=body)).json()
    for number in range(20):
        asked = f"Is it so, {number}?"
        body = {**RESPONSE, "max_output_tokens": tokens, "input": asked}
        told: dict[str, Any] = (await api.post("/v1/responses", json=body)).json()
        if told["status"] == "incomplete":
            return completion, told, asked
    raise AssertionError("each ends by itself")


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def test_a_background_response_and_a_stream_with_a_key_outlive_what_serves_them(
    cluster: Cluster,
) -> None:
    cluster.environment["PENSTOCK_RUNS__LEASE_S"] = "1"
    await cluster.start(workers=["both", "both"], routers=2, gateways=2)
    stream, response = Told(), Told()
    async with cluster.api() as first, cluster.api(1) as second:
        tokens = await lasting(second, COMPLETION, LASTS_S, 2500, WINDOW - 500)
        completion, whole, asked = await undisturbed(second, tokens)
        own = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**COMPLETION, "max_tokens": tokens, **own}
        own = {"input": asked, "background": True, "stream": True}
        background = {**RESPONSE, "max_output_tokens": tokens, **own}
        async with (
            first.stream("POST", "/v1/completions", json=body, headers=KEY) as one,
            first.stream("POST", "/v1/responses", json=background) as other,
        ):
            ids = [one.headers["x-request-id"], other.headers["x-request-id"]]
            reading = [
                asyncio.create_task(told.take(events_of(of)))
                for told, of in ((stream, one), (response, other))
            ]
            await asyncio.gather(stream.grows(), response.grows())
            cluster.of("gateway")[0].kill()
            for end in await asyncio.gather(*reading, return_exceptions=True):
                assert isinstance(end, httpx.TransportError), "the connection is the gateway's"
        again = {**KEY, "Last-Event-ID": str(stream.last)}
        path = f"/v1/responses/resp_{ids[1].removeprefix('req_')}"
        query = {"stream": "true", "starting_after": str(response.last)}
        async with (
            second.stream("POST", "/v1/completions", json=body, headers=again) as one,
            second.stream("GET", path, params=query) as other,
        ):
            reading = [
                asyncio.create_task(told.take(events_of(of)))
                for told, of in ((stream, one), (response, other))
            ]
            await asyncio.gather(stream.grows(), response.grows())
            (await busy(cluster, "router")).kill()
            await asyncio.gather(stream.grows(), response.grows())
            (await cluster.busy_worker("both")).kill()
            await asyncio.wait_for(asyncio.gather(*reading), 90)
    (choice,) = completion["choices"]
    assert stream.text == choice["text"]
    assert stream.usage["completion_tokens"] == tokens
    assert stream.end["finish_reason"] == choice["finish_reason"]
    assert response.text == text_of(response.end) == text_of(whole)
    assert response.end["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == tokens

    await cluster.up(cluster.spawn("gateway"))  # which served nothing of it
    async with cluster.api(2) as third:
        for id in ids:
            assert (await third.get(f"/v1/requests/{id}")).json()["status"] == "ok"
        assert text_of((await third.get(path)).json()) == text_of(whole)
        retried = await third.post("/v1/completions", json=body, headers=KEY)
        assert retried.headers["x-request-id"] == ids[0]
    await until(lambda: charged(cluster, ids, tokens), 20)


async def charged(cluster: Cluster, ids: list[str], tokens: int) -> bool:
    """Each of its tokens, once, by whichever gateway."""
    entries = [entry async for entry in Ledger(cluster.client, cluster.namespace).entries()]
    output = [sum(entry.output for entry in entries if entry.id == id) for id in ids]
    return output == [tokens, tokens]
