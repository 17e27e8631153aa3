"""Conversations by OpenAI's own client, whose answers are held to its types; and what responses
make of them."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from protos.common_pb2 import FINISH_LENGTH, FINISH_STOP
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import unavailable
from services.common.link import LinkCall
from tests.support.gateway_rig import MODEL, Rig, finish, gateway_rig, plan, send

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(redis_server: EmbeddedRedis) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_server.url, f"test-{uuid.uuid4().hex[:8]}") as rig:
        rig.tokenizer.script = _echo
        yield rig


async def _echo(call: LinkCall, request: PromptRequest) -> None:
    """Tells how many messages it has read, and the last one."""
    messages = request.chat.messages
    last = "".join(part.text for part in messages[-1].content)
    if last == "fail":
        raise unavailable("no worker", stage="router", reason="router_unavailable")
    send(call, f"{len(messages)}: {last}", plan=plan(request))
    finish(call, 3, finish=FINISH_LENGTH if last == "at length" else FINISH_STOP)


class Talk:
    """A new tenant's conversation."""

    def __init__(self, client: openai.AsyncOpenAI, id: str) -> None:
        self.client = client
        self.id = id

    async def ask(self, input: Any, **more: Any) -> Any:
        return await self.client.responses.create(
            model=MODEL, input=input, conversation=self.id, **more
        )

    async def texts(self) -> list[str]:
        items = [
            item
            async for item in self.client.conversations.items.list(self.id, order="asc", limit=3)
        ]
        return [item.content[0].text for item in items]  # type: ignore[union-attr]


@pytest_asyncio.fixture(loop_scope="module")
async def talk(rig: Rig) -> AsyncIterator[Talk]:
    async with await _client(rig) as client:
        yield Talk(client, (await client.conversations.create()).id)


async def _client(
    rig: Rig, tenant: str = "", models: list[str] | None = None
) -> openai.AsyncOpenAI:
    key, _ = await rig.keys.create(tenant or f"tenant-{uuid.uuid4().hex[:8]}", models=models)
    return openai.AsyncOpenAI(
        base_url=f"{rig.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    )


async def refusal(call: Any) -> tuple[int, str | None, str | None]:
    with pytest.raises(openai.APIStatusError) as refused:
        await call
    return refused.value.status_code, refused.value.param, refused.value.code


async def test_a_response_goes_on_with_what_was_said_and_is_a_part_of_it(talk: Talk) -> None:
    first = await talk.ask("Hello")
    assert first.output_text == "1: Hello"
    assert first.conversation is not None
    assert first.conversation.id == talk.id
    again = await talk.ask([{"role": "user", "content": "And then?"}], store=False)
    assert again.output_text == "3: And then?"
    assert await talk.texts() == ["Hello", "1: Hello", "And then?", "3: And then?"]
    (sent,) = (await talk.client.responses.input_items.list(first.id)).data
    items = (await talk.client.conversations.items.list(talk.id, order="asc")).data
    assert [item.id for item in items][:2] == [sent.id, first.output[0].id]


async def test_a_stream_is_a_part_of_it_before_its_end_is_told(talk: Talk) -> None:
    async for event in await talk.ask("Hello", stream=True):
        if event.type == "response.completed":
            assert event.response.conversation.id == talk.id
            assert await talk.texts() == ["Hello", "1: Hello"]


async def test_what_failed_is_no_part_of_it(talk: Talk) -> None:
    assert (await refusal(talk.ask("fail")))[0] == 503
    assert await talk.texts() == []


@pytest.mark.parametrize("background", [False, True])
async def test_what_was_stopped_at_its_length_is_a_part_of_it(talk: Talk, background: bool) -> None:
    told = await talk.ask("at length", background=background)
    while told.status in ("queued", "in_progress"):
        told = await talk.client.responses.retrieve(told.id)
    assert told.status == "incomplete"
    assert await talk.texts() == ["at length", "1: at length"]


async def test_turns_at_once_are_each_in_one_piece(talk: Talk) -> None:
    await asyncio.gather(*(talk.ask(f"Question {n}") for n in range(4)))
    said = await talk.texts()
    assert len(said) == 8
    # Who begins after another's end hears what that one said.
    assert [answer.partition(": ")[2] for answer in said[1::2]] == said[::2]


async def test_calls_and_their_outputs_are_kept(talk: Talk) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    items: Any = [{"role": "user", "content": "Call it"}, thought, call]
    added = await talk.client.conversations.items.create(talk.id, items=items)
    assert [item.type for item in added.data] == ["message", "reasoning", "function_call"]
    assert (await refusal(talk.ask("Well?")))[:2] == (400, "input")
    output = {"type": "function_call_output", "call_id": "c1", "output": "7"}
    assert (await talk.ask([output])).output_text == "3: 7"
    kinds = [item.type async for item in talk.client.conversations.items.list(talk.id)]
    told = ["message", "reasoning", "function_call", "function_call_output", "message"]
    assert kinds[::-1] == told


async def test_items_are_told_and_taken_out(talk: Talk) -> None:
    items: Any = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    added = await talk.client.conversations.items.create(talk.id, items=items)
    (_, two, _) = [item.id for item in added.data]
    assert (await talk.client.conversations.items.retrieve(two, conversation_id=talk.id)).id == two
    left = await talk.client.conversations.items.delete(two, conversation_id=talk.id)
    assert left.id == talk.id
    assert await talk.texts() == ["one", "three"]
    again = talk.client.conversations.items.delete(two, conversation_id=talk.id)
    assert (await refusal(again))[0] == 404
    assert (await talk.ask("four")).output_text == "3: four"


async def test_what_is_said_of_one_is_changed_and_it_is_deleted(talk: Talk) -> None:
    own = talk.client.conversations
    made = await own.create(items=[{"role": "user", "content": "Hi"}], metadata={"topic": "water"})
    assert (await own.retrieve(made.id)).metadata == {"topic": "water"}
    assert (await own.update(made.id, metadata={"a": "b"})).metadata == {"a": "b"}
    assert (await own.retrieve(made.id)).created_at == made.created_at
    assert (await own.delete(made.id)).deleted
    for call in (
        own.retrieve(made.id),
        own.delete(made.id),
        own.update(made.id, metadata=None),
        own.items.list(made.id),
        own.items.create(made.id, items=[{"role": "user", "content": "Hi"}]),
    ):
        assert (await refusal(call))[0] == 404
    told = talk.client.responses.create(model=MODEL, input="Hi", conversation=made.id)
    assert (await refusal(told))[:2] == (404, "conversation")


async def test_tokens_of_a_conversation_are_counted(talk: Talk, rig: Rig) -> None:
    seen: list[int] = []

    async def count(call: LinkCall, request: PromptRequest) -> None:
        seen.append(len(request.chat.messages))
        call.send(TextDelta(token_ids=[1, 2], finish=FINISH_STOP).SerializeToString())

    await talk.ask("Hello")
    rig.tokenizer.script, before = count, rig.tokenizer.script
    await talk.client.responses.input_tokens.count(model=MODEL, input="And?", conversation=talk.id)
    rig.tokenizer.script = before
    assert seen == [3]


async def test_one_that_is_gone_when_its_answer_ends_is_told(talk: Talk, rig: Rig) -> None:
    async def delete(call: LinkCall, request: PromptRequest) -> None:
        await talk.client.conversations.delete(talk.id)
        await _echo(call, request)

    rig.tokenizer.script = delete
    told = await talk.ask("Hello")
    rig.tokenizer.script = _echo
    assert told.status == "completed"
    assert "could not be added to the conversation" in str(told.model_extra)


async def test_what_does_not_go_together_is_named(talk: Talk) -> None:
    first = await talk.ask("Hello")
    for more, param in (
        ({"previous_response_id": first.id}, "conversation"),
        ({"extra_body": {"conversation": {"id": talk.id, "odd": 1}}}, "conversation.odd"),
    ):
        assert (await refusal(talk.ask("Hello", **more)))[:2] == (400, param), more
    follows = talk.client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
    assert (await refusal(follows))[:2] == (400, "previous_response_id")
    many: Any = [{"role": "user", "content": "x"}] * 21
    own = talk.client.conversations
    assert (await refusal(own.create(items=many)))[:2] == (400, "items")
    assert (await refusal(own.items.create(talk.id, items=[])))[:2] == (400, "items")
    bad: Any = [{"type": "message", "content": "x"}]
    assert (await refusal(own.items.create(talk.id, items=bad)))[:2] == (400, "items[0].role")


@pytest.mark.parametrize("number", [10**30, -(10**30), float("inf")])
async def test_numbers_that_no_json_has_are_named(talk: Talk, number: float) -> None:
    """Of what a search found earlier, which is kept and told again as it was sent."""
    items: Any = [{"type": "file_search_call", "queries": [], "results": [{"score": number}]}]
    told = json.dumps({"items": items}).replace("Infinity", "1e999").encode()
    for path in (f"/conversations/{talk.id}/items", "/conversations"):
        asked = talk.client.post(path, content=told, cast_to=object)
        assert (await refusal(asked))[:2] == (400, "items[0].results")
    told = json.dumps({"model": MODEL, "input": items}).replace("Infinity", "1e999").encode()
    asked = talk.client.post("/responses", content=told, cast_to=object)
    assert (await refusal(asked))[:2] == (400, "input[0].results")


async def test_who_may_not_use_a_model_does_not_read_what_it_said(rig: Rig) -> None:
    tenant = f"tenant-{uuid.uuid4().hex[:8]}"
    async with await _client(rig, tenant) as client, await _client(rig, tenant, ["odd"]) as other:
        talk = Talk(client, (await client.conversations.create()).id)
        assert (await other.conversations.retrieve(talk.id)).id == talk.id, "no model said anything"
        await talk.ask("Hello")
        (first, _) = (await client.conversations.items.list(talk.id)).data
        own, said = other.conversations, [{"role": "user", "content": "Hi"}]
        for call in (
            own.retrieve(talk.id),
            own.update(talk.id, metadata=None),
            own.delete(talk.id),
            own.items.list(talk.id),
            own.items.create(talk.id, items=said),  # type: ignore[arg-type]
            own.items.retrieve(first.id, conversation_id=talk.id),
            own.items.delete(first.id, conversation_id=talk.id),
            other.responses.create(model="odd", input="Hi", conversation=talk.id),
        ):
            assert (await refusal(call))[::2] == (403, "model_not_allowed")
        assert await talk.texts() == ["Hello", "1: Hello"]


async def test_another_tenants_is_none(talk: Talk, rig: Rig) -> None:
    await talk.ask("Hello")
    async with await _client(rig) as other:
        theirs = Talk(other, talk.id)
        assert (await refusal(theirs.ask("Hello")))[:2] == (404, "conversation")
        assert (await refusal(other.conversations.retrieve(talk.id)))[0] == 404
        assert (await refusal(other.conversations.items.list(talk.id)))[0] == 404
        assert (await refusal(other.conversations.delete(talk.id)))[0] == 404
    assert len(await talk.texts()) == 2
