"""Stored chats by OpenAI's own client: listed, told again, described, deleted."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from protos.tokenizer_pb2 import PromptRequest
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import unavailable
from services.common.link import LinkCall
from services.gateway.intake import Place
from services.gateway.runs.lasting.store import RunStore
from tests.support.gateway_rig import MODEL, Rig, finish, gateway_rig, plan, send

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(redis_server: EmbeddedRedis) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_server.url, f"test-{uuid.uuid4().hex[:8]}") as rig:
        rig.tokenizer.script = _echo
        yield rig


async def _echo(call: LinkCall, request: PromptRequest) -> None:
    last = "".join(part.text for part in request.chat.messages[-1].content)
    if last == "fail":
        raise unavailable("no worker", stage="router", reason="router_unavailable")
    for choice in range(max(1, request.choices)):
        send(call, f"{choice}: ", choice=choice, plan=plan(request))
        send(call, last, choice=choice)
        finish(call, 3, choice=choice)


@pytest_asyncio.fixture(loop_scope="module")
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with await _client(rig) as client:
        yield client


async def _client(
    rig: Rig, tenant: str = "", models: list[str] | None = None
) -> openai.AsyncOpenAI:
    key, _ = await rig.keys.create(tenant or f"tenant-{uuid.uuid4().hex[:8]}", models=models)
    return openai.AsyncOpenAI(
        base_url=f"{rig.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    )


async def ask(client: openai.AsyncOpenAI, text: str = "Hello", **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    more = {"store": True, "messages": messages, **more}
    return await client.chat.completions.create(model=MODEL, **more)


async def listed(client: openai.AsyncOpenAI, **query: Any) -> list[str]:
    return [one.id async for one in client.chat.completions.list(**query)]


async def refusal(call: Any) -> tuple[int, str | None, str | None]:
    with pytest.raises(openai.APIStatusError) as refused:
        await call
    return refused.value.status_code, refused.value.param, refused.value.code


async def test_one_is_told_again_as_it_was(client: openai.AsyncOpenAI) -> None:
    told = await ask(client, n=2, metadata={"topic": "water"})
    again = await client.chat.completions.retrieve(told.id)
    assert again.metadata == {"topic": "water"}
    assert again.model_dump() == {**told.model_dump(), "metadata": {"topic": "water"}}
    (of_list,) = (await client.chat.completions.list()).data
    assert of_list.model_dump() == again.model_dump()
    assert [choice.message.content for choice in of_list.choices] == ["0: Hello", "1: Hello"]


async def test_only_what_asked_for_it_is_listed(rig: Rig, client: openai.AsyncOpenAI) -> None:
    first = await ask(client)
    idle = await ask(client, store=False)
    keyed = await ask(client, store=None, extra_headers={"Idempotency-Key": "a"})
    both = await ask(client, extra_headers={"Idempotency-Key": "b"})
    await client.responses.create(model=MODEL, input="Hello")
    with pytest.raises(openai.APIStatusError):
        await ask(client, "fail", extra_headers={"Idempotency-Key": "c"})
    assert await listed(client) == [first.id, both.id]
    assert (await refusal(client.chat.completions.retrieve(idle.id)))[0] == 404
    own = client.chat.completions
    assert (await own.retrieve(keyed.id)).choices[0].message.content == "0: Hello"
    assert (await refusal(own.update(keyed.id, metadata={})))[0] == 404
    assert (await refusal(own.messages.list(keyed.id)))[0] == 404


async def test_a_stream_is_stored_before_its_end_is_told(client: openai.AsyncOpenAI) -> None:
    ended = False
    async for chunk in await ask(client, stream=True):
        if chunk.choices[0].finish_reason and not ended:
            ended = True
            again = await client.chat.completions.retrieve(chunk.id)
            assert again.choices[0].message.content == "0: Hello"
    assert ended


async def test_lists_come_in_pages_and_are_filtered(client: openai.AsyncOpenAI) -> None:
    ids = []
    for n in range(5):
        ids.append((await ask(client, metadata={"n": str(n), "odd": str(n % 2)})).id)
    assert await listed(client, limit=2) == ids
    assert await listed(client, limit=2, order="desc") == ids[::-1]
    assert await listed(client, after=ids[2]) == ids[3:]
    assert await listed(client, limit=1, metadata={"odd": "1"}) == ids[1::2]
    assert await listed(client, metadata={"odd": "1", "n": "3"}) == [ids[3]]
    assert await listed(client, metadata={"odd": "1", "n": "2"}) == []
    assert await listed(client, model=MODEL) == ids
    assert await listed(client, model="another") == []
    page = await client.chat.completions.list(limit=4, metadata={"odd": "0"})
    assert not page.has_more
    assert await refusal(client.chat.completions.list(after="chatcmpl-0")) == (
        400,
        "after",
        "invalid_argument",
    )
    assert (await refusal(client.chat.completions.list(extra_query={"metadata": "x"})))[1] == (
        "metadata"
    )


async def test_of_a_list_no_more_is_read_than_is_told(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(6):
        await ask(client, metadata={"odd": str(n > 0)})
    read: list[str] = []
    written = RunStore.written

    def counted(store: RunStore, place: Any) -> Any:
        read.append(place[1])
        return written(store, place)

    monkeypatch.setattr(RunStore, "written", counted)
    page = await client.chat.completions.list(limit=1, metadata={"odd": "True"})
    assert page.has_more
    assert len(read) == 2  # one more says that there is one


async def test_a_list_counts_what_it_reads_and_no_prompts(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else few chats with long ones would be too many to list at once."""
    long = {"role": "system", "content": "x" * 100_000}
    for text in ("Hello", "y" * 10_000):
        await ask(client, messages=[long, {"role": "user", "content": text}])
    held: list[int] = []
    hold = Place.hold

    def noted(place: Place, size: int) -> None:
        held.append(size)
        hold(place, size)

    monkeypatch.setattr(Place, "hold", noted)
    assert len(await listed(client)) == 2
    answers = sorted(size for size in held if size)
    assert len(answers) == 2
    assert answers[0] < 5000
    assert 10_000 < answers[1] < 20_000


async def test_what_is_said_of_one_is_changed_and_it_is_deleted(client: openai.AsyncOpenAI) -> None:
    own = client.chat.completions
    told, other = await ask(client, metadata={"a": "b"}), await ask(client)
    changed = await own.update(told.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"}
    assert changed.choices[0].message.content == "0: Hello"
    assert (await own.retrieve(told.id)).metadata == {"c": "d"}
    assert await listed(client, metadata={"c": "d"}) == [told.id]
    assert (await own.update(told.id, metadata=None)).metadata == {}
    deleted = await own.delete(told.id)
    assert (deleted.id, deleted.deleted) == (told.id, True)
    for call in (
        own.retrieve(told.id),
        own.delete(told.id),
        own.update(told.id, metadata={}),
        own.messages.list(told.id),
    ):
        assert (await refusal(call))[0] == 404
    assert await listed(client) == [other.id]


async def test_what_was_sent_is_told(rig: Rig, client: openai.AsyncOpenAI) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "user", "name": "ann", "content": parts},
    ]
    told = await ask(client, messages=messages)
    lenient = openai.AsyncOpenAI(
        base_url=client.base_url, api_key=client.api_key, max_retries=0
    )  # it knows one role alone
    own = lenient.chat.completions.messages
    sent = [one async for one in own.list(told.id, limit=2)]
    assert [one.id for one in sent] == [f"{told.id}-{n}" for n in range(4)]
    assert [one.role for one in sent] == ["system", "assistant", "tool", "user"]
    assert [one.content for one in sent] == ["Be brief.", None, "7", None]
    assert [part.text for part in sent[3].content_parts or ()] == ["Hel", "lo"]  # type: ignore[union-attr]
    assert (sent[1].tool_calls or ())[0].id == "c1"
    assert (sent[2].tool_call_id, sent[3].name) == ("c1", "ann")  # type: ignore[attr-defined]
    (last,) = (await own.list(told.id, after=sent[2].id)).data
    assert last.id == sent[3].id
    (last,) = (await own.list(told.id, order="desc", limit=1)).data
    assert last.id == sent[3].id


async def test_who_may_not_use_its_model_hears_nothing_of_it(rig: Rig) -> None:
    tenant = f"tenant-{uuid.uuid4().hex[:8]}"
    told = await ask(await _client(rig, tenant))
    another = await _client(rig, tenant, models=["another"])
    assert await listed(another) == []
    own = another.chat.completions
    for call in (own.retrieve(told.id), own.delete(told.id), own.update(told.id, metadata={})):
        assert (await refusal(call))[::2] == (403, "model_not_allowed")
    stranger = await _client(rig)
    assert await listed(stranger) == []
    assert (await refusal(stranger.chat.completions.retrieve(told.id)))[0] == 404


async def test_what_cannot_be_stored_says_so(
    rig: Rig, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(rig.gateway.runs.store, "_call", away)
    told = await ask(client)
    assert "could not be stored" in told.penstock["warning"]
    chunks = [chunk async for chunk in await ask(client, stream=True)]
    assert "could not be stored" in chunks[-1].penstock["warning"]
    monkeypatch.undo()
    assert await listed(client) == []


async def test_what_is_said_of_it_counts(rig: Rig, client: openai.AsyncOpenAI) -> None:
    """In the bytes that a tenant's runs may have; deleted, nothing is left of them."""
    tenant = f"tenant-{uuid.uuid4().hex[:8]}"
    async with await _client(rig, tenant) as own:
        told = await ask(own)
        store = RunStore(rig.redis, rig.settings.namespace, "x", rig.settings.runs)

        async def size() -> int:
            return int(await rig.redis.get(f"{store.root}:bytes:{tenant}") or 0)

        before = await size()
        await own.chat.completions.update(told.id, metadata={"a": "b" * 500})
        assert await size() == before + len('"a":""') + 500
        await own.chat.completions.delete(told.id)
        assert await size() == 0
