"""/v1/messages with Anthropic's own client, by a real gateway and a scripted tokenizer."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from protos.common_pb2 import FINISH_LENGTH
from protos.tokenizer_pb2 import PromptRequest
from services.common.errors import invalid
from services.common.link import LinkCall
from services.common.text.content import text_of
from tests.support.gateway_rig import MODEL, Rig, finish, gateway_rig, plan, send
from tests.support.stories import calls_a_tool

ASK: list[Any] = [{"role": "user", "content": "Pressure?"}]
TOOL: Any = {
    "name": "pressure",
    "description": "Of a pipe.",
    "input_schema": {"type": "object", "properties": {"pipe": {"type": "string"}}},
}


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace) as rig:
        yield rig


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(
        base_url=rig.url, api_key=rig.key, max_retries=0, timeout=20
    ) as client:
        yield client


async def test_a_text(rig: Rig, client: AsyncAnthropic) -> None:
    told = await client.messages.create(
        model=MODEL,
        max_tokens=50,
        system="Be brief.",
        messages=ASK,
        metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_k": 3},  # as older clients send them
    )
    (block,) = told.content
    assert block.type == "text"
    assert (block.text, told.stop_reason) == ("Hello world", "end_turn")
    assert (told.usage.input_tokens, told.usage.cache_read_input_tokens) == (4, 4)
    assert told.usage.output_tokens == 3
    sent = rig.tokenizer.requests[0]
    assert [(m.role, text_of(m)) for m in sent.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Pressure?"),
    ]
    sampling = sent.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (50, 0.5, 3)
    extension: Any = told.model_extra
    record = await rig.record(extension["penstock"]["request_id"])
    assert (record["route"], record["metadata"]) == ("/v1/messages", {"user": "u"})


async def test_a_stream_that_thinks_and_calls_a_tool(rig: Rig, client: AsyncAnthropic) -> None:
    rig.tokenizer.script = calls_a_tool
    asked: Any = {"model": MODEL, "max_tokens": 50, "messages": ASK, "tools": [TOOL]}
    async with client.messages.stream(**asked) as stream:
        texts = [text async for text in stream.text_stream]
        streamed = await stream.get_final_message()
    whole = await client.messages.create(**asked)
    assert "".join(texts) == "I ask."
    told = [
        [block.model_dump(exclude={"id"}, exclude_unset=True) for block in one.content]
        for one in (streamed, whole)
    ]
    assert told[0] == told[1]
    thought, said, called = whole.content
    assert thought.type == "thinking"
    assert said.type == "text"
    assert called.type == "tool_use"
    assert (thought.thinking, said.text) == ("Let me see.", "I ask.")
    assert called.input == {"pipe": "main"}
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == 5

    result: Any = {"type": "tool_result", "tool_use_id": called.id, "content": "3 bar"}
    turn: Any = [{"role": "assistant", "content": whole.content}]
    more: Any = [{"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}]
    await client.messages.create(**{**asked, "messages": [*ASK, *turn, *more]})
    messages = rig.tokenizer.requests[-1].chat.messages
    assert [m.role for m in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1].reasoning == "Let me see."
    assert json.loads(messages[1].tool_calls[0].arguments) == {"pipe": "main"}
    assert messages[2].tool_call_id == messages[1].tool_calls[0].id == called.id
    assert [text_of(m) for m in messages[2:]] == ["3 bar", "And now?"]


async def test_how_an_answer_ends(rig: Rig, client: AsyncAnthropic) -> None:
    async def stopped(call: LinkCall, request: PromptRequest) -> None:
        assert list(request.stop) == ["END", "!"]
        send(call, "So", plan=plan(request))
        finish(call, 2, stop="END")

    async def cut(call: LinkCall, request: PromptRequest) -> None:
        send(call, "So", plan=plan(request))
        finish(call, 2, finish=FINISH_LENGTH)

    rig.tokenizer.script = stopped
    told = await client.messages.create(
        model=MODEL, max_tokens=9, messages=ASK, stop_sequences=["END", "!"]
    )
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "END")
    rig.tokenizer.script = cut
    told = await client.messages.create(model=MODEL, max_tokens=9, messages=ASK)
    assert (told.stop_reason, told.stop_sequence) == ("max_tokens", None)


_IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
_UNASKED = [
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": ""}]},
]
_BEGUN = [*ASK, {"role": "assistant", "content": "So"}]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("nonsense", {"nonsense": 1}),
    ("max_tokens", {"max_tokens": 0}),
    ("temperature", {"temperature": 1.5}),
    ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("messages[0].content[0].type", {"messages": _IMAGE}),
    ("messages[0].content[0].tool_use_id", {"messages": _UNASKED}),
    ("messages[1].role", {"messages": _BEGUN}),
    ("tools[0].input_schema", {"tools": [{**TOOL, "input_schema": {"type": "array"}}]}),
    ("tools[0].input_schema.required", {"tools": [{**TOOL, "input_schema": {"required": 5}}]}),
    ("tool_choice", {"tool_choice": {"type": "tool", "name": "f"}}),
    ("stop_sequences", {"stop_sequences": ["a", "b", "c", "d", "e"]}),
]


async def test_what_is_wrong_is_named(rig: Rig, client: AsyncAnthropic) -> None:
    http = await rig.http()
    for param, fields in WRONG:
        body = {"model": MODEL, "max_tokens": 5, "messages": ASK, **fields}
        answer = await http.post("/v1/messages", json=body)
        assert answer.status_code == 400, (fields, answer.text)
        told = answer.json()
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
        assert told["error"]["param"] == param, answer.text
    assert not rig.tokenizer.requests
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="psk-no").messages.create(
            model=MODEL, max_tokens=5, messages=ASK
        )


async def test_what_fails_is_told_before_and_within_a_stream(
    rig: Rig, client: AsyncAnthropic
) -> None:
    async def refuses(call: LinkCall, request: PromptRequest) -> None:
        raise invalid("no", "messages[1].content", reason="content_policy", stage="tokenizer")

    async def breaks(call: LinkCall, request: PromptRequest) -> None:
        send(call, "So", plan=plan(request))
        raise ValueError("a bug")

    asked: Any = {"model": MODEL, "max_tokens": 5, "system": "S", "messages": ASK, "stream": True}
    rig.tokenizer.script = refuses
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(**asked)
    body: Any = refused.value.body
    assert (body["error"]["param"], body["error"]["code"]) == (
        "messages[0].content",
        "content_policy",
    )
    rig.tokenizer.script = breaks
    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        async for _ in await client.messages.create(**asked):
            pass
