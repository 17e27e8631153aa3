"""Runs that outlive their connections: resumed, retried, taken over from a gateway that was killed,
by real gateways and a scripted tokenizer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from protos import gateway_pb2, gateway_pb2_grpc
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.config import MeteringSettings, PolicySettings, RunsSettings
from services.common.link import LinkCall
from services.gateway.identity.limits import Limit
from services.gateway.server import GatewayService
from tests.support.another_gateway import another_gateway
from tests.support.gateway_rig import MODEL, Rig, finish, gateway_rig, plan, send
from tests.support.stories import TEXT, WORDS, Story, ledger
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Well?"}],
    "seed": 5,
}
STREAM = {**ASK, "stream": True}
PRICES = {MODEL: {"prompt": 2, "output": 10}}


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    metering = MeteringSettings(prices=PRICES)  # type: ignore[arg-type]
    runs = RunsSettings(lease_s=1.0, kept=4)
    async with gateway_rig(redis_url, namespace, metering=metering, runs=runs) as rig:
        yield rig


@asynccontextmanager
async def watched(redis_url: str, namespace: str, folder: Path) -> AsyncIterator[Rig]:
    """Under a policy on answers."""
    rules = folder / "policy.yaml"
    rules.write_text("rules:\n  - {name: r, pattern: night, where: [output], action: redact}\n")
    runs = RunsSettings(lease_s=1.0)
    policy = PolicySettings(file=rules)
    async with gateway_rig(redis_url, namespace, runs=runs, policy=policy) as rig:
        yield rig


@pytest.fixture
def story(rig: Rig) -> Story:
    return Story(rig)


class Events:
    """A stream's events, with their ids, as far as a test reads on."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()
        self.ids: list[int] = []
        self.told: list[str] = []

    async def text(self, words: int = 0) -> str:
        """Reads on until so many of the story's words are there, or to the end; all the text."""
        wanted = "".join(WORDS[:words])
        async for line in self._lines:
            if line.startswith("id: "):
                self.ids.append(int(line[4:]))
            elif line.startswith("data: "):
                self.told.append(line[6:])
                if wanted and "".join(map(_text, self.told)) == wanted:
                    break
        return "".join(map(_text, self.told))


def _text(data: str) -> str:
    if data == "[DONE]":
        return ""
    told = json.loads(data)
    assert "error" not in told, told
    return "".join(choice["delta"].get("content") or "" for choice in told["choices"])


async def test_a_stream_goes_on_where_its_connection_was_lost(rig: Rig, story: Story) -> None:
    http = await rig.http()
    key = {"Idempotency-Key": "one"}
    story.go(2)
    async with http.stream("POST", CHAT, json=STREAM, headers=key) as response:
        events = Events(response)
        assert await events.text(2) == TEXT[:9]
        run = response.headers["x-request-id"]
    await until(lambda: rig.gateway.intake.running == 1)
    again = {**key, "Last-Event-ID": str(events.ids[-1])}
    story.go()
    async with http.stream("POST", CHAT, json=STREAM, headers=again) as response:
        rest = Events(response)
        assert await rest.text() == TEXT[9:]
        assert rest.told[-1] == "[DONE]"
        assert response.headers["x-request-id"] == run
    assert rest.ids == list(range(events.ids[-1] + 1, rest.ids[-1] + 1))
    assert story.resumed == [0], "one generation"
    (entry,) = await ledger(rig, 1)
    assert (entry.id, entry.prompt, entry.output) == (run, 8, 6)

    answer = await http.get(f"{CHAT}/chatcmpl-{run[4:]}")
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    query = {"stream": "true", "starting_after": events.ids[-1]}
    async with http.stream("GET", f"{CHAT}/chatcmpl-{run[4:]}", params=query) as response:
        told = Events(response)
        assert await told.text() == TEXT[9:]
    assert (told.told, told.ids) == (rest.told, rest.ids)
    end = rest.ids[-1]
    for known, answered in ((end, 200), (end + 1, 400)):
        headers = {**key, "Last-Event-ID": f"{known}"}
        query["starting_after"] = known
        for told_again, field in (
            (await http.post(CHAT, json=STREAM, headers=headers), "Last-Event-ID"),
            (await http.get(f"{CHAT}/chatcmpl-{run[4:]}", params=query), "starting_after"),
        ):
            assert told_again.status_code == answered
            if answered == 200:
                assert told_again.text == f"id: {end}\ndata: [DONE]\n\n"
            else:
                assert told_again.json()["error"]["param"] == field
    assert (await rig.record(run))["status"] == "ok"


async def test_what_is_not_there_is_not_gone_on_with(rig: Rig, story: Story) -> None:
    """Another run says something else: joined to what the client has it would be nonsense."""
    http, key = await rig.http(), {"Idempotency-Key": "k"}
    story.go()
    refused = await http.post(CHAT, json=STREAM, headers={**key, "Last-Event-ID": "2"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "run_not_found")
    assert refused.json()["error"]["param"] == "Last-Event-ID"
    assert not rig.tokenizer.requests, "nothing began"
    anew = await http.post(CHAT, json=STREAM, headers={**key, "Last-Event-ID": "0"})
    assert anew.status_code == 200, "who has nothing is told all"


async def test_a_retry_is_answered_by_the_same_run(rig: Rig, story: Story) -> None:
    story.go()
    http, key = await rig.http(), {"Idempotency-Key": "k"}
    first, retry = await asyncio.gather(
        http.post(CHAT, json=ASK, headers=key), http.post(CHAT, json=ASK, headers=key)
    )
    late = await http.post(CHAT, json=ASK, headers=key)
    assert first.json() == retry.json() == late.json()
    assert first.json()["choices"][0]["message"]["content"] == TEXT
    assert len(rig.tokenizer.requests) == 1

    other = await http.post(CHAT, json={**ASK, "seed": 6}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
    assert other.json()["error"]["param"] == "Idempotency-Key"
    wrong = await http.post(CHAT, json=ASK, headers={"Idempotency-Key": "a b"})
    assert wrong.json()["error"]["param"] == "Idempotency-Key"
    embed = await http.post("/v1/embeddings", json={"model": MODEL, "input": "a"}, headers=key)
    assert embed.json()["error"]["param"] == "Idempotency-Key", "no header is ignored"
    lone = await http.post(CHAT, json=STREAM, headers={"Last-Event-ID": "3"})
    assert lone.json()["error"]["param"] == "Last-Event-ID"
    whole = await http.post(CHAT, json=ASK, headers={**key, "Last-Event-ID": "3"})
    assert whole.json()["error"]["param"] == "Last-Event-ID"


async def test_a_retry_of_what_failed_is_a_new_run(rig: Rig, story: Story) -> None:
    async def breaks(call: LinkCall, request: PromptRequest) -> None:
        call.send(TextDelta(text="T", token_ids=[1], plan=plan(request)).SerializeToString())
        raise ValueError("a bug")

    rig.tokenizer.script = breaks
    http, key = await rig.http(), {"Idempotency-Key": "k"}
    failed = await http.post(CHAT, json=ASK, headers=key)
    assert failed.status_code == 500
    rig.tokenizer.script = story
    story.go()
    assert (await http.post(CHAT, json=ASK, headers=key)).is_success


async def test_tenants_are_apart(rig: Rig, story: Story) -> None:
    story.go()
    story.go()
    http, key = await rig.http(), {"Idempotency-Key": "k"}
    first = await http.post(CHAT, json=ASK, headers=key)
    other_key, _ = await rig.keys.create("other", "test")
    other = await rig.http(other_key)
    own = await other.post(CHAT, json=ASK, headers=key)
    assert own.json()["id"] != first.json()["id"], "a name is its tenant's"
    path = f"{CHAT}/{first.json()['id']}"
    assert (await http.get(path)).is_success
    assert (await other.get(path)).status_code == 404


async def test_whoever_goes_away_unasked_cancels(rig: Rig, story: Story) -> None:
    """And costs Redis nothing: no run is there."""
    http = await rig.http()
    story.go(1)
    async with http.stream("POST", CHAT, json=STREAM) as response:
        events = Events(response)
        assert await events.text(1) == "The"
        assert not events.ids
    await until(lambda: rig.tokenizer.cancelled == 1)
    assert not await runs_in(rig)


async def runs_in(rig: Rig) -> list[str]:
    pattern = f"{rig.settings.namespace}:{{runs}}:*"
    return [key async for key in rig.redis.scan_iter(pattern)]


async def test_a_killed_gateways_run_goes_on_at_another(rig: Rig, story: Story) -> None:
    key = {"Idempotency-Key": "k"}
    headers = {"Authorization": f"Bearer {rig.key}", **key}
    async with another_gateway(rig) as lost, httpx.AsyncClient(timeout=30) as http:
        story.go(3)
        async with http.stream("POST", lost.url + CHAT, json=STREAM, headers=headers) as response:
            events = Events(response)
            assert await events.text(3) == TEXT[:15]
            run = response.headers["x-request-id"]
            await lost.kill()
        again = {**headers, "Last-Event-ID": str(events.ids[-1])}
        await until(lambda: len(story.resumed) == 2, 20, "it is taken over")
        assert story.resumed == [0, 3], "behind what was told"
        story.go()
        async with http.stream("POST", rig.url + CHAT, json=STREAM, headers=again) as response:
            rest = Events(response)
            assert await rest.text() == TEXT[15:]
    assert rest.ids[0] == events.ids[-1] + 1
    charged = await ledger(rig, 1)
    assert {entry.id for entry in charged} == {run}
    assert sum(entry.prompt for entry in charged) == 8
    assert sum(entry.output for entry in charged) == len(WORDS)
    assert (await rig.record(run))["status"] == "ok"


async def test_a_gateway_that_leaves_hands_its_runs_over(rig: Rig, story: Story) -> None:
    other = await rig.start(GatewayService)
    assert other.replica is not None
    http, key = await rig.http(), {"Idempotency-Key": "k"}
    story.go(1)
    async with http.stream("POST", CHAT, json=STREAM, headers=key) as response:
        assert await Events(response).text(1) == "The"
        await rig.host.stop(0)
    await until(lambda: story.resumed == [0, 1], 20, "it is taken over")
    (run,) = [name for name in await runs_in(rig) if ":run:" in name]
    assert await rig.redis.hget(run, "taken") == "0", "it was given, not found"
    story.go()
    async with httpx.AsyncClient(base_url=other.replica.facts["url"], headers=http.headers) as new:
        answer = await new.post(CHAT, json=ASK, headers=key)
        assert answer.status_code == 400, "another body"
        async with new.stream("POST", CHAT, json=STREAM, headers=key) as response:
            assert await Events(response).text() == TEXT


@pytest.mark.parametrize(
    "limits",
    [
        (Limit(name="few", of="concurrent", most=1),),
        (Limit(name="tph", of="tokens", most=400, per="hour"),),
        (),
    ],
    ids=["place", "tokens", "none"],
)
async def test_limits_hold_over_a_rolling_restart(
    rig: Rig, story: Story, limits: tuple[Limit, ...]
) -> None:
    """One gateway after the other: its run has its place and its reservation all the time, and is
    one entry. Of who has no limits as well."""
    key, _ = await rig.keys.create("acme", limits=limits)
    ask = {**STREAM, "max_tokens": 300}
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "k"}
    meter = f"{rig.settings.namespace}:{{meter}}"
    hosts = [rig.host]

    async def told() -> list[str]:
        """The meter's word on another request, by whichever gateway serves."""
        url = hosts[-1].replica.facts["url"]  # type: ignore[union-attr]
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            plain = {**ask, "stream": False}
            answer = await http.post(CHAT, json=plain, headers={"Authorization": f"Bearer {key}"})
            return [answer.json().get("error", {}).get("code"), answer.text]

    async with httpx.AsyncClient(timeout=20) as http:
        story.go(1)
        async with http.stream("POST", rig.url + CHAT, json=ask, headers=headers) as response:
            assert await Events(response).text(1) == "The"
            run = response.headers["x-request-id"]
        for _ in range(2):
            hosts.append(await rig.start(GatewayService))
            leaving = asyncio.create_task(hosts[-2].stop(0))
            while limits and (not leaving.done() or len(story.resumed) < len(hosts)):
                code, why = await told()
                assert code == "rate_limit_exceeded", why
            await leaving
            await until(lambda: len(story.resumed) == len(hosts), 20, "it is taken over")
            assert await rig.redis.hkeys(f"{meter}:open") == [run]
            story.go(1)
        story.go()
        (entry,) = await ledger(rig, 1)
        assert (entry.id, entry.status) == (run, "ok")
        assert (entry.prompt, entry.output) == (8, len(WORDS))
        assert entry.nanos == 1000 * (2 * 8 + 10 * len(WORDS))
        assert await rig.redis.hlen(f"{meter}:open") == 0
        if limits:
            story.go()
            assert (await told())[0] is None


async def test_what_of_a_run_was_whole_is_not_made_again(rig: Rig) -> None:
    begun: list[list[tuple[int, bool]]] = []

    async def script(call: LinkCall, request: PromptRequest) -> None:
        known = [(one.choice, one.finished) for one in request.resume.choices]
        begun.append(known)
        for choice in (0, 1) if not known else ():
            first = {"plan": plan(request), "prompt_digest": b"d", "checkpoint": "c"}
            send(call, f"{choice}", choice=choice, **first)
        if not known:
            finish(call, 1, choice=0)
            await asyncio.Event().wait()
        send(call, "!", choice=1)
        finish(call, 2, choice=1)

    rig.tokenizer.script = script
    other = await rig.start(GatewayService)
    assert other.replica is not None
    http, key = await rig.http(), {"Idempotency-Key": "k"}
    body = {**STREAM, "n": 2}
    async with http.stream("POST", CHAT, json=body, headers=key) as response:
        lines = response.aiter_lines()
        seen = ""
        while '"1"' not in seen:
            seen += await anext(lines)
        await until(lambda: _is_written(rig))
        await rig.host.stop(0)
    await until(lambda: len(begun) == 2, 20, "it is taken over")
    assert begun == [[], [(0, True), (1, False)]]
    url = other.replica.facts["url"]
    async with httpx.AsyncClient(base_url=url, headers=http.headers, timeout=20) as new:
        answer = await new.get(f"{CHAT}/chatcmpl-{response.headers['x-request-id'][4:]}")
    told = answer.json()
    assert [one["message"]["content"] for one in told["choices"]] == ["0", "1!"]
    assert told["usage"]["completion_tokens"] == 3
    assert [one["finish_reason"] for one in told["choices"]] == ["stop", "stop"]

    async def charged() -> bool:
        entries = await ledger(rig, 1)
        return (sum(e.prompt for e in entries), sum(e.output for e in entries)) == (8, 3)

    await until(charged, 10, "all of it is charged, once")


async def _is_written(rig: Rig) -> bool:
    """The first choice's end."""
    (run,) = [name for name in await runs_in(rig) if ":run:" in name]
    tenant, id = run.split(":")[-2:]
    page = await rig.gateway.runs.store.read((tenant, id))
    return any(event.delta.delta.finish for event in page.events)


async def test_over_grpc_too(rig: Rig, story: Story) -> None:
    stub = gateway_pb2_grpc.InferenceStub(await rig.channel())
    request = gateway_pb2.CompleteRequest(model=MODEL, text="Well?")
    own = [("authorization", f"Bearer {rig.key}"), ("idempotency-key", "k")]
    story.go(2)
    call, text, last = stub.Complete(request, metadata=own), "", 0
    async for event in call:
        text, last = text + event.text, event.number
        if text == TEXT[:9]:
            break
    call.cancel()
    story.go()
    rest = stub.Complete(request, metadata=[*own, ("last-event-id", f"{last}")])
    events = [event async for event in rest]
    assert text + "".join(event.text for event in events) == TEXT
    assert [event.number for event in events] == list(range(last + 1, last + 1 + len(events)))
    assert (events[-1].usage.completion_tokens, story.resumed) == (len(WORDS), [0])
    number = events[-1].number
    all_known = stub.Complete(request, metadata=[*own, ("last-event-id", f"{number}")])
    assert await all_known.read() is grpc.aio.EOF
    for metadata, code in (
        ([own[0], ("last-event-id", "1")], grpc.StatusCode.INVALID_ARGUMENT),
        ([*own, ("last-event-id", f"{number + 1}")], grpc.StatusCode.INVALID_ARGUMENT),
        (
            [own[0], ("idempotency-key", "other"), ("last-event-id", "1")],
            grpc.StatusCode.NOT_FOUND,
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request, metadata=metadata).read()
        assert refused.value.code() is code
        assert ("x-param", "Last-Event-ID") in tuple(refused.value.trailing_metadata())


async def test_a_tenants_oldest_make_room(rig: Rig, story: Story) -> None:
    http, ids = await rig.http(), []
    for number in range(6):
        story.go()
        answer = await http.post(CHAT, json=ASK, headers={"Idempotency-Key": f"{number}"})
        ids.append(answer.json()["id"])
    found = [(await http.get(f"{CHAT}/{id}")).status_code for id in ids]
    assert found == [404, 404, 200, 200, 200, 200]
    sizes = await rig.redis.hvals(f"{rig.settings.namespace}:{{runs}}:sizes:acme")
    total = await rig.redis.get(f"{rig.settings.namespace}:{{runs}}:bytes:acme")
    assert sum(map(int, sizes)) == int(total)


async def test_without_redis_nothing_lasting_begins(
    rig: Rig, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(rig.gateway.runs.store, "_call", away)
    http = await rig.http()
    answer = await http.post(CHAT, json=ASK, headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "runs_unavailable")
    story.go()
    assert (await http.post(CHAT, json=ASK)).is_success


async def test_while_redis_is_away_a_run_waits_for_it(
    rig: Rig, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = rig.gateway.runs.store
    there, tried = store.add, 0

    async def away(*_: Any) -> None:
        nonlocal tried
        tried += 1
        raise ConnectionError("away")

    http = await rig.http()
    story.go(1)
    async with http.stream("POST", CHAT, json=STREAM, headers={"Idempotency-Key": "k"}) as response:
        events = Events(response)
        assert await events.text(1) == "The"
        monkeypatch.setattr(store, "add", away)
        story.go(2)
        await until(lambda: tried > 1)
        monkeypatch.setattr(store, "add", there)
        story.go()
        assert await events.text() == TEXT


@pytest.mark.parametrize("same", [True, False])
async def test_under_a_policy_on_answers_no_token_is_stored(
    redis_url: str, namespace: str, tmp_path: Path, same: bool
) -> None:
    """They would tell what it redacts. The answer is made again, and held to what was told."""
    async with watched(redis_url, namespace, tmp_path) as rig:
        story, http, key = Story(rig), await rig.http(), {"Idempotency-Key": "k"}
        other = await rig.start(GatewayService)
        assert other.replica is not None
        story.go(2)
        async with http.stream("POST", CHAT, json=STREAM, headers=key) as response:
            events = Events(response)
            await events.text(2)
            assert not [name for name in await runs_in(rig) if ":ids:" in name]
            if not same:
                story.words = ("A", *WORDS[1:])
            await rig.host.stop(0)
        await until(lambda: story.resumed == [0, 0], 20, "it is made again")
        story.go()
        path = f"{CHAT}/chatcmpl-{response.headers['x-request-id'][4:]}"
        query = {"stream": "true", "starting_after": events.ids[-1]}
        url = other.replica.facts["url"]
        async with (
            httpx.AsyncClient(base_url=url, headers=http.headers, timeout=20) as new,
            new.stream("GET", path, params=query) as answer,
        ):
            if same:
                assert await Events(answer).text() == TEXT[9:]
            else:
                assert "cannot_resume" in (await answer.aread()).decode()
