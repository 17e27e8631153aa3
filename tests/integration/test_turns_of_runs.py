"""Turns of conversations that runs add: in the background, under keys, once whatever is lost."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from protos.common_pb2 import FINISH_TOOL_CALLS
from protos.tokenizer_pb2 import PromptRequest, ToolCallDelta
from services.common.config import RunsSettings
from services.common.embedded_redis import EmbeddedRedis
from services.common.link import LinkCall
from services.gateway.ids import REQUEST
from services.gateway.runs.lasting.own import OwnRuns
from services.gateway.runs.lasting.store import Hold
from tests.support.gateway_rig import MODEL, Rig, finish, gateway_rig, plan, send
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(redis_server: EmbeddedRedis) -> AsyncIterator[Rig]:
    runs = RunsSettings(lease_s=1.0)
    async with gateway_rig(redis_server.url, f"test-{uuid.uuid4().hex[:8]}", runs=runs) as rig:
        yield rig


class Talk:
    """A new tenant's conversation."""

    def __init__(self, rig: Rig, tenant: str, client: openai.AsyncOpenAI, id: str) -> None:
        self.rig = rig
        self.tenant = tenant
        self.client = client
        self.id = id

    async def ask(self, input: Any, **more: Any) -> Any:
        return await self.client.responses.create(
            model=MODEL, input=input, conversation=self.id, **more
        )

    async def under_key(self, input: Any, **more: Any) -> Any:
        return await self.ask(input, extra_headers={"Idempotency-Key": "k"}, **more)

    async def ended(self, id: str) -> Any:
        told: Any = None

        async def over() -> bool:
            nonlocal told
            told = await self.client.responses.retrieve(id)
            return told.status not in ("queued", "in_progress")

        await until(over, 20, "it ends")
        return told

    async def texts(self) -> list[str]:
        items = self.client.conversations.items.list(self.id, order="asc")
        return [item.content[0].text async for item in items]  # type: ignore[union-attr]


@pytest_asyncio.fixture(loop_scope="module")
async def talk(rig: Rig) -> AsyncIterator[Talk]:
    tenant = f"tenant-{uuid.uuid4().hex[:8]}"
    key, _ = await rig.keys.create(tenant)
    rig.tokenizer.script = _echo
    async with openai.AsyncOpenAI(
        base_url=f"{rig.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    ) as client:
        yield Talk(rig, tenant, client, (await client.conversations.create()).id)


async def _echo(call: LinkCall, request: PromptRequest) -> None:
    """Tells how many messages it has read, and the last one."""
    messages = request.chat.messages
    last = "".join(part.text for part in messages[-1].content)
    send(call, f"{len(messages)}: ", plan=plan(request))
    send(call, last)
    finish(call, 3)


async def test_in_the_background(talk: Talk) -> None:
    begun = await talk.ask("Hello", background=True)
    told = await talk.ended(begun.id)
    assert (told.output_text, told.conversation.id) == ("1: Hello", talk.id)
    assert await talk.texts() == ["Hello", "1: Hello"], "before its end was told"
    assert (await talk.ask("And?")).output_text == "3: And?"
    (sent,) = (await talk.client.responses.input_items.list(begun.id)).data
    items = (await talk.client.conversations.items.list(talk.id, order="asc")).data
    assert [item.id for item in items][:2] == [sent.id, told.output[0].id]


async def test_a_retry_adds_no_second_turn(talk: Talk) -> None:
    first = await talk.under_key("Hello")
    assert await talk.texts() == ["Hello", "1: Hello"]
    again = await talk.under_key("Hello")
    assert (again.id, again.output_text) == (first.id, "1: Hello")
    assert await talk.texts() == ["Hello", "1: Hello"]
    async for event in await talk.ask("On", stream=True, extra_headers={"Idempotency-Key": "l"}):
        if event.type == "response.completed":
            assert await talk.texts() == ["Hello", "1: Hello", "On", "3: On"]


async def test_a_retry_of_a_turn_that_calls_is_answered(talk: Talk) -> None:
    """Though nothing new goes on from there before the call's output is there."""

    async def calls(call: LinkCall, request: PromptRequest) -> None:
        called = ToolCallDelta(index=0, name="f", arguments="{}")
        send(call, tool_calls=[called], plan=plan(request))
        finish(call, 3, finish=FINISH_TOOL_CALLS)

    talk.rig.tokenizer.script = calls
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    first = await talk.under_key("Call it", tools=[tool])
    again = await talk.under_key("Call it", tools=[tool])
    assert again.id == first.id
    assert again.output[0].type == "function_call"
    with pytest.raises(openai.BadRequestError):
        await talk.ask("Well?")


@pytest.mark.parametrize("keeps_ids", [True, False], ids=["", "a policy looks at answers"])
async def test_its_gateway_is_lost_between_turn_and_end(
    talk: Talk, keeps_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, here the same, ends it again; the answer is whole and is not made again."""
    made = 0

    async def counted(call: LinkCall, request: PromptRequest) -> None:
        nonlocal made
        made += 1
        await _echo(call, request)

    talk.rig.tokenizer.script = counted
    monkeypatch.setattr(OwnRuns, "keeps_ids", keeps_ids)
    store = talk.rig.gateway.runs.store
    finish, lost = store.finish, list[Hold]()

    async def once(hold: Hold, *rest: Any) -> Any:
        if lost:
            return await finish(hold, *rest)
        lost.append(hold)
        assert await talk.texts() == ["Hello", "1: Hello"]
        behind: Any = [{"role": "user", "content": "Behind"}]
        await talk.client.conversations.items.create(talk.id, items=behind)
        await store.release(hold)
        return "lost"

    monkeypatch.setattr(store, "finish", once)
    begun = await talk.ask("Hello", background=True)
    told = await talk.ended(begun.id)
    assert (told.output_text, told.usage and told.usage.output_tokens) == ("1: Hello", 3)
    assert lost
    assert made == 1
    assert await talk.texts() == ["Hello", "1: Hello", "Behind"]


@pytest.mark.parametrize("what", ["cancel", "delete"])
async def test_a_whole_answer_is_cancelled_no_more(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Who asks for that, or deletes it, hears of it when it has ended."""
    own = talk.rig.gateway
    add, cancel = own.conversations.add, own.runs.store.cancel
    go_on, verdicts = asyncio.Event(), list[str]()

    async def noted(*told: Any) -> Any:
        verdicts.append(await cancel(*told))
        go_on.set()
        return verdicts[-1]

    async def waits(*told: Any, turn: str, **more: Any) -> None:
        assert REQUEST.fits(turn)
        begun.set_result(turn)
        await go_on.wait()
        await add(*told, turn=turn, **more)

    begun = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(own.runs.store, "cancel", noted)
    monkeypatch.setattr(own.conversations, "add", waits)
    response = await talk.ask("Hello", background=True)
    turn = await begun
    told = await getattr(talk.client.responses, what)(response.id)
    assert verdicts == ["sealed"]
    assert await talk.texts() == ["Hello", "1: Hello"]
    if what == "cancel":
        assert told.status == "completed"
    await until(lambda: own.records.find(turn, talk.tenant) is not None)
    record = own.records.find(turn, talk.tenant)
    assert record is not None
    assert record.error is None


async def test_what_was_cancelled_is_no_part_of_it(talk: Talk) -> None:
    go_on = asyncio.Event()

    async def waits(call: LinkCall, request: PromptRequest) -> None:
        send(call, "Wait", plan=plan(request))
        await go_on.wait()
        finish(call, 3)

    talk.rig.tokenizer.script = waits
    begun = await talk.ask("Hello", background=True)
    assert (await talk.client.responses.cancel(begun.id)).status == "cancelled"
    go_on.set()
    talk.rig.tokenizer.script = _echo
    assert (await talk.ask("And?")).output_text == "1: And?"
    assert await talk.texts() == ["And?", "1: And?"]


async def test_one_that_is_gone_when_its_answer_ends_is_told(talk: Talk) -> None:
    async def delete(call: LinkCall, request: PromptRequest) -> None:
        await talk.client.conversations.delete(talk.id)
        await _echo(call, request)

    talk.rig.tokenizer.script = delete
    first = await talk.under_key("Hello")
    assert first.status == "completed"
    assert "could not be added to the conversation" in str(first.model_extra)
    again = await talk.client.responses.retrieve(first.id)
    assert again.model_extra == first.model_extra
