"""Metering as a client sees it: limits, costs and the ledger, by REST and gRPC."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import openai
import pytest

from protos.gateway_pb2 import ChatRequest, GenerateEvent, PublicEmbedReply, PublicEmbedRequest
from protos.tokenizer_pb2 import PromptRequest
from services.common.config import MeteringSettings
from services.common.errors import PenstockError
from services.common.link import LinkCall
from services.gateway.identity.limits import Limit
from services.gateway.metering.ledger import Entry, Ledger
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig, gateway_rig, plan, say, send
from tests.support.waiting import until

QUESTION = [{"role": "user", "content": "When does the harbour open?"}]
ASK = {"model": MODEL, "messages": QUESTION, "max_tokens": 4}
# 8 prompt tokens, 4 of them cached, and 3 of the answer: 4 × 2 + 4 × 0.5 + 3 × 10, in millionths
PRICES = {
    MODEL: {"prompt": 2, "cached": 0.5, "output": 10, "tiers": {"high": {"output": 100}}},
    EMBEDDING_MODEL: {"prompt": 3},
}
COST = 40e-6


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    metering = MeteringSettings(prices=PRICES)  # type: ignore[arg-type]
    async with gateway_rig(redis_url, namespace, metering=metering) as rig:
        yield rig


def limit(name: str, of: str, most: float, per: str | None = None, **more: Any) -> Limit:
    return Limit(name=name, of=of, most=most, per=per, **more)  # type: ignore[arg-type]


async def key_with(rig: Rig, *limits: Limit, **more: Any) -> str:
    key, _ = await rig.keys.create("acme", limits=limits, **more)
    return key


async def entries(rig: Rig, count: int) -> list[Entry]:
    """The ledger, once it has so many."""
    ledger = Ledger(rig.redis, rig.settings.namespace)
    found: list[Entry] = []

    async def there() -> bool:
        found[:] = [entry async for entry in ledger.entries()]
        return len(found) >= count

    await until(there, 10, f"{count} entries are in the ledger")
    assert len(found) == count
    return found


async def test_a_key_of_three_a_minute_hears_when_to_come_back(rig):
    client = await rig.openai(await key_with(rig, limit("rpm", "requests", 3, "minute")))
    for left in (2, 1, 0):
        raw = await client.chat.completions.with_raw_response.create(**ASK)
        assert raw.headers["x-ratelimit-limit-requests"] == "3"
        assert raw.headers["x-ratelimit-remaining-requests"] == str(left)
        assert raw.headers["x-ratelimit-reset-requests"].endswith("s")
    with pytest.raises(openai.RateLimitError) as refused:
        await client.chat.completions.create(**ASK)
    assert refused.value.code == "rate_limit_exceeded"
    assert "3 requests per minute" in refused.value.message
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 20
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(rig.tokenizer.requests) == 3  # what is refused reaches nobody
    assert [entry.status for entry in await entries(rig, 3)] == ["ok"] * 3


async def test_the_ledgers_sum_is_what_answers_said(rig):
    """Whole and streamed, with usage or without, several choices, embeddings, both protocols."""
    client = await rig.openai()
    told: list[float] = []
    whole = await client.chat.completions.create(**ASK)
    assert whole.penstock["currency"] == "USD"
    told.append(whole.penstock["cost"])
    for options in ({}, {"stream_options": {"include_usage": True}}):
        stream = await client.chat.completions.create(**ASK, stream=True, **options)
        chunks = [chunk async for chunk in stream]
        costs = [c.penstock["cost"] for c in chunks if "cost" in (getattr(c, "penstock", 0) or {})]
        assert len(set(costs)) == 1
        assert chunks[-1].penstock["cost"] == costs[0]
        told.append(costs[0])
    text = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2)
    told.append(text.penstock["cost"])
    embedded = await client.embeddings.create(model=EMBEDDING_MODEL, input=["a", "b"])
    told.append(embedded.penstock["cost"])
    channel = await rig.channel()
    metadata = (("authorization", f"Bearer {rig.key}"),)
    chat = channel.unary_stream(
        "/penstock.v1.Inference/Chat",
        request_serializer=ChatRequest.SerializeToString,
        response_deserializer=GenerateEvent.FromString,
    )
    request = ChatRequest(model=MODEL)
    request.messages.add(role="user").content.add(text="Q")
    *_, last = [event async for event in chat(request, metadata=metadata)]
    told.append(last.cost.amount)
    embed = channel.unary_unary(
        "/penstock.v1.Inference/Embed",
        request_serializer=PublicEmbedRequest.SerializeToString,
        response_deserializer=PublicEmbedReply.FromString,
    )
    asked = PublicEmbedRequest(model=EMBEDDING_MODEL, texts=["a"])
    told.append((await embed(asked, metadata=metadata)).cost.amount)

    assert told == pytest.approx([COST, COST, COST, 2 * COST, 6e-6, COST, 3e-6])
    found = await entries(rig, len(told))
    assert sum(entry.nanos for entry in found) == sum(round(cost * 1e9) for cost in told)
    assert {(e.tenant, e.tier, e.status) for e in found} == {("acme", "normal", "ok")}
    assert {e.user for e in found} == {(await rig.keys.list())[0].id}
    record = await rig.record(whole.penstock["request_id"])
    assert (record["cost"], record["currency"]) == (pytest.approx(COST), "USD")
    assert whole.penstock["request_id"] in {e.id for e in found}


async def test_a_priority_has_its_price(rig):
    client = await rig.openai(await key_with(rig, priority="high"))
    answer = await client.chat.completions.create(**ASK)
    assert answer.penstock["cost"] == pytest.approx(300e-6)


async def test_a_budget_is_never_overspent_and_says_when_it_is_new(rig):
    """Side by side; each holds what it may cost at most until it has ended."""
    most = 4 * 110e-6  # each may cost 2 × 27 prompt tokens and 4 × 10: never all of them
    client = await rig.openai(await key_with(rig, limit("day", "cost", most, "day")))
    ended = await asyncio.gather(
        *(client.chat.completions.create(**ASK) for _ in range(12)), return_exceptions=True
    )
    answered = [one.penstock["cost"] for one in ended if not isinstance(one, BaseException)]
    refused = [one for one in ended if isinstance(one, openai.RateLimitError)]
    assert len(answered) + len(refused) == 12
    assert answered
    while True:
        try:
            answered.append((await client.chat.completions.create(**ASK)).penstock["cost"])
        except openai.RateLimitError as error:
            refused.append(error)
            if error.response.headers.get("x-should-retry"):
                break
    assert sum(answered) <= most
    assert refused[-1].code == "insufficient_quota"
    assert 1 <= int(refused[-1].response.headers["retry-after"]) <= 86_400
    found = await entries(rig, len(answered))
    assert sum(entry.nanos for entry in found) == round(sum(answered) * 1e9)


async def test_who_leaves_early_pays_for_what_came_and_no_more(rig):
    limits = (limit("tpm", "tokens", 1000, "minute"), limit("few", "concurrent", 1))
    client = await rig.openai(await key_with(rig, *limits))
    gone = asyncio.Event()

    async def script(call: LinkCall, request: PromptRequest) -> None:
        call.on_cancel(gone.set)
        usage = {"prompt_tokens": 8, "cached_tokens": 4}
        send(call, "Hello", plan=plan(request), usage=usage)
        send(call, " world")
        await gone.wait()

    rig.tokenizer.script = script
    stream = await client.chat.completions.create(**{**ASK, "max_tokens": 400}, stream=True)
    said = ""
    async for chunk in stream:
        said += chunk.choices[0].delta.content or ""
        if said == "Hello world":
            break
    with pytest.raises(openai.RateLimitError, match="1 requests at once"):
        await client.chat.completions.create(**ASK)
    await stream.close()
    (entry,) = await entries(rig, 1)
    assert (entry.status, entry.prompt, entry.cached, entry.output) == ("cancelled", 8, 4, 2)
    assert entry.nanos == 30_000
    rig.tokenizer.script = say("ok")
    raw = await client.chat.completions.with_raw_response.create(**ASK)
    assert 960 < int(raw.headers["x-ratelimit-remaining-tokens"]) < 990  # 400 were held


async def _read(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await client.chat.completions.create(**ASK, stream=stream)
    async for _ in answer:
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_platform_breaks_off_costs_what_was_shown(rig, stream):
    client = await rig.openai()

    async def script(call: LinkCall, request: PromptRequest) -> None:
        send(call, "Hello", plan=plan(request), usage={"prompt_tokens": 8})
        await asyncio.sleep(0)
        raise PenstockError(grpc.StatusCode.INTERNAL, "broken", stage="worker")

    rig.tokenizer.script = script
    with pytest.raises(openai.APIError):
        await _read(client, stream)
    (entry,) = await entries(rig, 1)
    assert (entry.status, entry.output) == ("failed", int(stream))
    assert entry.nanos == (26_000 if stream else 0)


async def test_what_no_limit_can_ever_hold_is_refused_by_name(rig):
    """No 429: clients would try again."""
    client = await rig.openai(
        await key_with(rig, limit("tpm", "tokens", 100, "minute"), limit("one", "cost", 1, "day"))
    )
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**{**ASK, "max_tokens": 101})
    assert (refused.value.param, refused.value.code) == ("max_tokens", "request_too_large")
    none = await rig.openai(await key_with(rig, limit("no", "requests", 0, "day", model=MODEL)))
    with pytest.raises(openai.PermissionDeniedError, match="your limit 'no'"):
        await none.chat.completions.create(**ASK)
    await none.embeddings.create(model=EMBEDDING_MODEL, input="a")  # another model's rule


async def test_grpc_hears_the_same(rig):
    key = await key_with(rig, limit("rpm", "requests", 1, "minute"))
    metadata = (("authorization", f"Bearer {key}"),)
    channel = await rig.channel()
    embed = channel.unary_unary(
        "/penstock.v1.Inference/Embed",
        request_serializer=PublicEmbedRequest.SerializeToString,
        response_deserializer=PublicEmbedReply.FromString,
    )
    call = embed(PublicEmbedRequest(model=EMBEDDING_MODEL, texts=["a"]), metadata=metadata)
    assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "0"
    await call
    chat = channel.unary_stream(
        "/penstock.v1.Inference/Chat",
        request_serializer=ChatRequest.SerializeToString,
        response_deserializer=GenerateEvent.FromString,
    )
    request = ChatRequest(model=MODEL)
    request.messages.add(role="user").content.add(text="Q")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [event async for event in chat(request, metadata=metadata)]
    trailers = dict(refused.value.trailing_metadata())
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 1 <= int(trailers["retry-after"]) <= 60
    assert trailers["x-ratelimit-limit-requests"] == "1"


async def test_a_search_is_metered_as_what_it_embeds(rig):
    rpm = limit("rpm", "requests", 1, "minute", model=EMBEDDING_MODEL)
    http = await rig.http(await key_with(rig, rpm))
    store = (await http.post("/v1/vector_stores", json={})).json()["id"]
    found = await http.post(f"/v1/vector_stores/{store}/search", json={"query": "harbour hours"})
    assert found.json()["penstock"] == {"cost": 6e-6, "currency": "USD"}
    assert found.headers["x-ratelimit-remaining-requests"] == "0"
    limited = await http.post(f"/v1/vector_stores/{store}/search", json={"query": "again"})
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    (entry,) = await entries(rig, 1)
    assert (entry.model, entry.prompt, entry.nanos) == (EMBEDDING_MODEL, 2, 6000)


async def test_files_that_are_indexed_are_charged_as_what_they_embed(rig):
    http = await rig.http()
    file = (
        await http.post(
            "/v1/files",
            files={"file": ("a.txt", b"the harbour opens at six")},
            data={"purpose": "assistants"},
        )
    ).json()["id"]
    made = (await http.post("/v1/vector_stores", json={"file_ids": [file]})).json()["id"]
    (entry,) = await entries(rig, 1)
    assert (entry.tenant, entry.model, entry.route) == ("acme", EMBEDDING_MODEL, "index")
    assert (entry.prompt, entry.nanos, entry.status) == (5, 15_000, "ok")
    assert entry.user == (await rig.keys.list())[0].id
    told = (await http.get(f"/v1/vector_stores/{made}/files/{file}")).json()
    assert told["status"] == "completed"
