"""Runs at bad moments: replies that are lost, gateways that freeze, requests that kill; and who may
follow them, by real gateways and a scripted tokenizer."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from openai import AsyncOpenAI

from protos.runs_pb2 import RunEvent, RunEvents
from services.common.config import RunsSettings
from services.gateway.metering.refusals import LimitError
from services.gateway.runs.lasting import own
from services.gateway.runs.lasting import run as lasting_run
from services.gateway.runs.lasting.store import Hold, RunStore
from services.gateway.runs.lasting.stored import text_of
from services.gateway.server import GatewayService
from tests.support.another_gateway import gateways
from tests.support.gateway_rig import MODEL, Rig, gateway_rig
from tests.support.stories import TEXT, Story
from tests.support.waiting import until

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Well?"}]}
BACKGROUND: dict[str, Any] = {"model": MODEL, "input": "Well?", "background": True}
KEY = {"Idempotency-Key": "k"}


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    runs = RunsSettings(lease_s=1.0, max_followers=12)
    async with gateway_rig(redis_url, namespace, runs=runs) as rig:
        yield rig


@pytest.fixture
def story(rig: Rig) -> Story:
    return Story(rig)


async def kept(rig: Rig) -> list[str]:
    pattern = f"{rig.settings.namespace}:{{runs}}:run:*"
    return [key async for key in rig.redis.scan_iter(pattern)]


async def test_what_its_gateway_did_not_hear_of_is_not_run(
    rig: Rig, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis took it; the reply was lost. A retry that waits for it begins it anew."""
    store, there = rig.gateway.runs.store, rig.gateway.runs.store.begin

    async def unheard(*asked: Any, **named: Any) -> Any:
        await there(*asked, **named)
        raise ConnectionError("lost")

    http = await rig.http()
    monkeypatch.setattr(store, "begin", unheard)
    for path, body, headers in ((RESPONSES, BACKGROUND, {}), (CHAT, ASK, KEY)):
        answer = await http.post(path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "runs_unavailable")
    assert len(await kept(rig)) == 2
    monkeypatch.setattr(store, "begin", there)
    story.go()
    answer = await http.post(CHAT, json=ASK, headers=KEY)
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert len(await kept(rig)) == 1, "what nobody was told of has not run"
    assert story.resumed == [0]


@pytest.mark.parametrize("taken", [False, True])
async def test_what_could_not_be_written_is_not_told(
    rig: Rig, story: Story, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """Redis is away for long just then, or its replies are."""
    store, there = rig.gateway.runs.store, rig.gateway.runs.store.add

    async def away(*asked: Any) -> Any:
        if taken:
            await there(*asked)
        raise ConnectionError("away")

    monkeypatch.setattr(lasting_run, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(store, "add", away)
    answer = await (await rig.http()).post(RESPONSES, json=BACKGROUND)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "runs_unavailable")

    async def gone() -> bool:
        return not await kept(rig) and not rig.gateway.runs._own

    await until(gone)


async def test_a_retry_of_what_is_refused_hears_the_same(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may = 0, asyncio.Event()

    async def refuses(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        await may.wait()
        error = LimitError(grpc.StatusCode.RESOURCE_EXHAUSTED, "no", reason="rate_limit_exceeded")
        error.headers, error.retry_after_s = {"x-ratelimit-limit-requests": "3"}, 7.0
        raise error

    monkeypatch.setattr(rig.gateway.meter, "admit", refuses)
    http = await rig.http()
    tries = [asyncio.create_task(http.post(CHAT, json=ASK, headers=KEY)) for _ in range(3)]
    await until(lambda: asked == 1 and rig.gateway.runs._followers.taken == 3)
    may.set()
    answers = await asyncio.gather(*tries)
    assert [answer.status_code for answer in answers] == [429] * 3
    assert asked == 1
    assert len({answer.text for answer in answers}) == 1
    for name in ("x-ratelimit-limit-requests", "retry-after"):
        assert len({answer.headers[name] for answer in answers}) == 1
    again = await http.post(CHAT, json=ASK, headers=KEY)
    assert (again.status_code, asked) == (429, 2), "a refusal is no answer"


@pytest.mark.parametrize(("killed", "code"), [(3, "gateways_lost"), (0, "internal")])
async def test_a_request_that_nobody_can_go_on_with_ends(
    rig: Rig, story: Story, monkeypatch: pytest.MonkeyPatch, killed: int, code: str
) -> None:
    """It kills whoever looks at it, or is no request."""
    looked = 0

    async def poison(*_: Any, **__: Any) -> Any:
        nonlocal looked
        looked += 1
        raise ValueError("this is the end of me")

    monkeypatch.setattr(own, "taken_over", poison)
    lost = RunStore(rig.redis, rig.settings.namespace, "lost", rig.settings.runs)
    hold = Hold("acme", "req_" + "0" * 30)
    body = "" if killed else "AAAA"
    admitted = RunEvents(events=[RunEvent(admitted=RunEvent.Admitted())])
    await lost.begin(hold.place, body, "", "")
    await lost.add(hold, 1, text_of(admitted), {})
    root = f"{rig.settings.namespace}:{{runs}}"
    await rig.redis.hset(f"{root}:run:acme:{hold.id}", "taken", str(killed))
    await rig.redis.zadd(f"{root}:due", {f"acme:{hold.id}": 0})

    async def failed() -> str:
        *_, last = (await lost.read(hold.place)).events
        return last.failed.status.reason

    await until(lambda: _is(failed, code), 10)
    assert looked == 0
    assert await lost.claim() is None
    assert not rig.gateway.runs._own


async def _is(told: Any, wanted: str) -> bool:
    return bool(await told() == wanted)


async def test_gateways_that_freeze(rig: Rig, story: Story) -> None:
    """One run is cancelled meanwhile, and another taken over: when its gateway wakes nothing of
    what it has gets in."""
    headers = {"Authorization": f"Bearer {rig.key}"}
    async with gateways(rig, 1) as ((frozen,), (url,)), httpx.AsyncClient(timeout=30) as http:
        http.headers.update(headers)
        story.go(2)
        first = (await http.post(url + RESPONSES, json=BACKGROUND)).json()["id"]
        await until(lambda: _said(http, rig.url, first, TEXT[:9]))
        second = (await http.post(url + RESPONSES, json=BACKGROUND)).json()["id"]
        story.go(1)  # whichever of the two says it
        await until(lambda: len(story.resumed) == 2)
        frozen.send_signal(signal.SIGSTOP)
        try:
            cancelled = await http.post(f"{rig.url}{RESPONSES}/{first}/cancel")
            assert cancelled.json()["status"] == "cancelled", "whoever runs it"
            await until(lambda: len(story.resumed) == 3, 10, "the other is taken over")
        finally:
            frozen.send_signal(signal.SIGCONT)
        await until(lambda: rig.tokenizer.cancelled == 2, 20, "both are given up where they were")
        story.go(20)
        await until(lambda: _said(http, rig.url, second, TEXT))
        for id, status in ((first, "cancelled"), (second, "completed")):
            told = (await http.get(f"{rig.url}{RESPONSES}/{id}")).json()
            assert told["status"] == status
            assert TEXT.startswith(_text(told))


def _text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def _said(http: httpx.AsyncClient, url: str, id: str, text: str) -> bool:
    return _text((await http.get(f"{url}{RESPONSES}/{id}")).json()) == text


async def test_keys_of_a_tenant_may_read_what_their_models_answered(rig: Rig, story: Story) -> None:
    story.go(18)
    key, _ = await rig.keys.create("acme", "other", models=["another"])
    http, other = await rig.http(), await rig.http(key)
    done = (await http.post(CHAT, json=ASK, headers=KEY)).json()["id"]
    kept = (await http.post(RESPONSES, json={"model": MODEL, "input": "a"})).json()["id"]
    for method, path in (
        ("GET", f"{CHAT}/{done}"),
        ("GET", f"{RESPONSES}/{kept}"),
        ("GET", f"{RESPONSES}/{kept}/input_items"),
        ("POST", f"{RESPONSES}/{kept}/cancel"),
        ("DELETE", f"{RESPONSES}/{kept}"),
    ):
        refused = await other.request(method, path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    body = {"model": "another", "input": "a", "previous_response_id": kept}
    assert (await other.post(RESPONSES, json=body)).status_code == 403
    colleague, _ = await rig.keys.create("acme", "colleague")
    third = await rig.http(colleague)
    assert (await third.get(f"{CHAT}/{done}")).is_success
    retried = await third.post(CHAT, json=ASK, headers=KEY)
    assert retried.json()["id"] != done, "an idempotency key is its caller's"


async def test_what_is_refused_has_a_record(rig: Rig) -> None:
    http = await rig.http()
    bad = {"model": MODEL, "input": "a", "temperature": 9}
    for path, body, headers in (
        (RESPONSES, bad, {}),
        (RESPONSES, bad | {"background": True}, {}),
        (CHAT, ASK | {"temperature": 9}, KEY),
    ):
        answer = await http.post(path, json=body, headers=headers)
        assert answer.status_code == 400
        record = await rig.record(answer.headers["x-request-id"])
        assert (record["status"], record["route"]) == ("invalid_argument", path)


async def test_a_background_stream_opens_at_once(rig: Rig, story: Story) -> None:
    """Before anything is said: its client has the id to come back with."""
    rig.gateway.settings.gateway.sse_keep_alive_s = 600.0  # that opens it as well
    client: AsyncOpenAI = await rig.openai()
    stream = await client.responses.create(**BACKGROUND, stream=True)
    kinds = [(await anext(stream)).type for _ in range(3)]
    assert [kind.removeprefix("response.") for kind in kinds] == [
        "created", "queued", "in_progress",
    ]  # fmt: skip
    await stream.close()


# ---- followers ----------------------------------------------------------------------------------


async def test_a_run_is_read_once_however_many_follow_it(
    rig: Rig, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over a lost connection; and a tenant has a bound."""
    other = await rig.start(GatewayService)
    assert other.replica is not None
    runs, reads = other.service.gateway.runs, 0  # type: ignore[attr-defined]
    there = runs.store.read

    async def read(*asked: Any) -> Any:
        nonlocal reads
        reads += 1
        return await there(*asked)

    http = await rig.http()
    begun = await http.post(RESPONSES, json=BACKGROUND)
    path, query = f"{RESPONSES}/{begun.json()['id']}", {"stream": "true"}
    url = other.replica.facts["url"]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=http.headers, timeout=20, limits=limits
    ) as new:
        monkeypatch.setattr(runs.store, "read", read)
        followers = [asyncio.create_task(new.get(path, params=query)) for _ in range(6)]
        await until(lambda: runs._followers.taken == 6)
        refused = await new.get(path, params=query)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_followers")
        await until(lambda: reads >= 2, 5, "what came before they listened is looked for")
        story.go(2)
        await until(lambda: _said(new, url, begun.json()["id"], TEXT[:9]))
        before = reads
        await rig.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        story.go()
        answers = await asyncio.gather(*followers)
    assert len({answer.text for answer in answers}) == 1
    events = [line[6:] for line in answers[0].text.splitlines() if line.startswith("data: ")]
    assert _text(json.loads(events[-1])["response"]) == TEXT
    assert before + reads < 12, "not for each follower, nor for each write"
    assert runs._followers.taken == 0
    await until(lambda: not runs._feeds._feeds)
    channels = await rig.redis.pubsub_channels(f"{rig.settings.namespace}:{{runs}}:told:*")
    assert not channels, "nobody listens to what nobody follows"


async def test_a_follower_hears_that_a_run_is_gone(rig: Rig, story: Story) -> None:
    http = await rig.http()
    begun = (await http.post(RESPONSES, json=BACKGROUND)).json()["id"]
    path = f"{RESPONSES}/{begun}"
    follower = asyncio.create_task(http.get(path, params={"stream": "true"}))
    await until(lambda: rig.gateway.runs._followers.taken == 1)
    assert (await http.delete(path)).is_success
    answer = await asyncio.wait_for(follower, 5)
    assert "cancelled" in answer.text or answer.status_code == 404
    assert (await http.get(path)).status_code == 404
