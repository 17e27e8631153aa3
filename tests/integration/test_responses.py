"""/v1/responses with OpenAI's own client, by real gateways and a scripted tokenizer."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response
from pydantic import BaseModel

from protos.common_pb2 import FINISH_LENGTH
from protos.tokenizer_pb2 import PromptRequest, TextLogprob
from services.common.config import MeteringSettings, RunsSettings
from services.common.errors import invalid
from services.common.link import LinkCall
from services.common.text.content import text_of
from tests.support.another_gateway import another_gateway
from tests.support.gateway_rig import MODEL, Rig, finish, gateway_rig, plan, say, send
from tests.support.stories import TEXT, Story, calls_a_tool, ledger
from tests.support.waiting import until

LOGPROBS: Any = ["message.output_text.logprobs"]
TOOL: Any = {
    "type": "function",
    "name": "pressure",
    "parameters": {"type": "object", "properties": {"pipe": {"type": "string"}}},
    "strict": True,
}


class Weather(BaseModel):
    sky: str
    degrees: int


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    metering = MeteringSettings(prices={MODEL: {"prompt": 2, "output": 10}})  # type: ignore[dict-item]
    runs = RunsSettings(lease_s=1.0)
    async with gateway_rig(redis_url, namespace, metering=metering, runs=runs) as rig:
        yield rig


@pytest.fixture
async def client(rig: Rig) -> AsyncOpenAI:
    return await rig.openai()


def asked(rig: Rig, number: int = -1) -> list[tuple[str, str]]:
    """The messages of a request, as the tokenizer had them."""
    return [(m.role, text_of(m)) for m in rig.tokenizer.requests[number].chat.messages]


# ---- one answer ---------------------------------------------------------------------------------


async def test_a_text(rig: Rig, client: AsyncOpenAI) -> None:
    told = await client.responses.create(
        model=MODEL,
        input="Is it so?",
        instructions="Be brief.",
        max_output_tokens=50,
        temperature=0.5,
        metadata={"a": "b"},
        user="u",
    )
    assert told.output_text == "Hello world"
    assert asked(rig) == [("system", "Be brief."), ("user", "Is it so?")]
    sent = rig.tokenizer.requests[0]
    assert (sent.sampling.max_tokens, sent.sampling.temperature) == (50, 0.5)
    assert sent.chat.whole, "what does not fit is refused, unless truncation is auto"
    (message,) = told.output
    assert (message.type, message.status, told.status) == ("message", "completed", "completed")
    assert told.usage is not None
    assert told.usage.input_tokens_details.cached_tokens == 4
    assert (told.usage.input_tokens, told.usage.output_tokens, told.usage.total_tokens) == (
        8,
        3,
        11,
    )
    assert told.instructions == "Be brief."
    assert (told.max_output_tokens, told.temperature, told.metadata) == (50, 0.5, {"a": "b"})
    assert told.text is not None
    assert told.text.format is not None
    assert (told.store, told.truncation, told.text.format.type) == (True, "disabled", "text")
    extension: Any = told.model_extra
    record = await rig.record(extension["penstock"]["request_id"])
    assert record["metadata"] == {"a": "b", "user": "u"}
    assert record["route"] == "/v1/responses"
    again = await client.responses.retrieve(told.id)
    assert again.to_dict() == told.to_dict()


@pytest.mark.parametrize(("model", "temperature"), [(MODEL, 1.0), ("other", 0.25)])
async def test_it_tells_what_the_model_does_where_nothing_is_asked(
    client: AsyncOpenAI, model: str, temperature: float
) -> None:
    told = await client.responses.create(model=model, input="Is it so?")
    assert (told.temperature, told.top_p) == (temperature, 1.0)
    told = await client.responses.create(model=model, input="Is it so?", temperature=0)
    assert told.temperature == 0


async def test_a_stream_and_its_events(rig: Rig, client: AsyncOpenAI) -> None:
    rig.tokenizer.script = calls_a_tool
    async with client.responses.stream(model=MODEL, input="Pressure?", tools=[TOOL]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ] or _joined(events)  # fmt: skip
    thought, said, called = final.output
    assert thought.type == "reasoning"
    assert [part.text for part in thought.content or ()] == ["Let me see."]
    assert said.type == "message"
    assert called.type == "function_call"
    assert (called.name, called.arguments) == ("pressure", '{"pipe": "main"}')
    assert final.output_text == "I ask."
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens == 2
    tool = rig.tokenizer.requests[0].chat.tools[0]
    assert (tool.name, tool.strict) == ("pressure", True)
    stored = await client.responses.retrieve(final.id)
    assert stored.usage == final.usage
    streamed = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in stored.output] == [item.to_dict() for item in streamed]


def _joined(events: list[Any]) -> bool:
    """Deltas that wait for the client leave as one: each kind is there, in order."""
    kinds = [event.type for event in events]
    return kinds.count("response.output_item.done") == 3 and kinds[-1] == "response.completed"


async def test_a_conversation_goes_on(rig: Rig, client: AsyncOpenAI) -> None:
    """By its id, or with its items sent back as they came."""
    rig.tokenizer.script = calls_a_tool
    first = await client.responses.create(
        model=MODEL, input="Pressure?", instructions="Old.", tools=[TOOL]
    )
    call = first.output[2]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3 bar"}
    rig.tokenizer.script = say("3 bar", ".")
    second = await client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[result],
        tools=[TOOL],
        instructions="New.",
    )
    assert second.previous_response_id == first.id
    by_id = rig.tokenizer.requests[-1].chat.messages
    assert [m.role for m in by_id] == ["system", "user", "assistant", "tool"]
    assert (text_of(by_id[0]), text_of(by_id[2])) == ("New.", "I ask.")
    assert by_id[2].reasoning == "Let me see."
    assert (by_id[2].tool_calls[0].id, by_id[3].tool_call_id) == (call.call_id, call.call_id)

    items: Any = [{"role": "user", "content": "Pressure?"}, *first.output, result]
    await client.responses.create(
        model=MODEL, input=items, tools=[TOOL], instructions="New.", store=False
    )
    assert rig.tokenizer.requests[-1].chat.messages == by_id

    await client.responses.create(model=MODEL, previous_response_id=second.id, input="Thanks.")
    assert asked(rig)[-2:] == [("assistant", "3 bar."), ("user", "Thanks.")]
    assert len(asked(rig)) == 5

    listed = await client.responses.input_items.list(second.id, order="asc", include=LOGPROBS)
    assert [item.type for item in listed.data] == ["function_call_output"]
    assert await client.responses.retrieve(second.id, include=LOGPROBS) == second
    http = await rig.http()
    for path in (f"/v1/responses/{second.id}", f"/v1/responses/{second.id}/input_items"):
        assert (await http.get(f"{path}?include={LOGPROBS[0]}&include={LOGPROBS[0]}")).is_success
        odd = await http.get(f"{path}?include[]={LOGPROBS[0]}&include[]=reasoning")
        assert (odd.status_code, odd.json()["error"]["param"]) == (400, "include[1]")


async def test_a_call_without_its_output_is_not_gone_on_from(rig: Rig, client: AsyncOpenAI) -> None:
    rig.tokenizer.script = calls_a_tool
    first = await client.responses.create(model=MODEL, input="Pressure?", tools=[TOOL])
    with pytest.raises(BadRequestError) as refused:
        await client.responses.create(model=MODEL, previous_response_id=first.id, input="Well?")
    assert refused.value.param == "input"
    call = first.output[2]
    assert call.type == "function_call"
    assert call.call_id in refused.value.message


async def test_a_conversation_has_the_bounds_of_a_body(rig: Rig, client: AsyncOpenAI) -> None:
    """However small the request is that goes on with it: else many such would fill the memory."""
    own = rig.gateway.settings.gateway
    said = "a" * 6000
    first = await client.responses.create(model=MODEL, input=said)
    most = 0

    async def look(call: LinkCall, request: PromptRequest) -> None:
        nonlocal most
        most = rig.gateway.intake.bytes_held
        send(call, "b", plan=plan(request))
        finish(call, 1)

    rig.tokenizer.script = look
    second = await client.responses.create(model=MODEL, input="a", previous_response_id=first.id)
    assert most > len(said), "what is read for a request is counted as its own"
    own.body_limit_bytes = 10_000
    await client.responses.create(model=MODEL, input="a", previous_response_id=second.id)
    third = await client.responses.create(model=MODEL, input=said, previous_response_id=second.id)
    with pytest.raises(openai.APIStatusError) as refused:
        await client.responses.create(model=MODEL, input="a", previous_response_id=third.id)
    assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")
    assert refused.value.param == "previous_response_id"


async def test_structured_output(rig: Rig, client: AsyncOpenAI) -> None:
    rig.tokenizer.script = say('{"sky": "blue", ', '"degrees": 20}')
    told = await client.responses.parse(model=MODEL, input="Sky?", text_format=Weather)
    assert told.output_parsed == Weather(sky="blue", degrees=20)
    schema = json.loads(rig.tokenizer.requests[0].sampling.constraint.json_schema)
    assert set(schema["properties"]) == {"sky", "degrees"}
    async with client.responses.stream(model=MODEL, input="Sky?", text_format=Weather) as stream:
        parsed = (await stream.get_final_response()).output_parsed
    assert parsed == Weather(sky="blue", degrees=20)
    back: Any = [{"role": "user", "content": "Sky?"}, *told.output]
    assert (await client.responses.create(model=MODEL, input=back)).status == "completed"


async def test_an_answer_that_is_cut_is_incomplete(rig: Rig, client: AsyncOpenAI) -> None:
    async def cut(call: LinkCall, request: PromptRequest) -> None:
        token = TextLogprob.Candidate(text="The", bytes=b"The", logprob=-0.5)
        told = [TextLogprob(token=token, top=[token])]
        send(call, "The", plan=plan(request), logprobs=told)
        finish(call, 1, finish=FINISH_LENGTH)

    rig.tokenizer.script = cut
    told = await client.responses.create(
        model=MODEL,
        input="So?",
        max_output_tokens=1,
        include=["message.output_text.logprobs"],
        top_logprobs=1,
    )
    assert told.status == "incomplete"
    assert told.incomplete_details is not None
    assert told.incomplete_details.reason == "max_output_tokens"
    (message,) = told.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert [one.token for one in part.logprobs or ()] == ["The"]
    assert rig.tokenizer.requests[0].sampling.logprobs == 1


# ---- what is refused ----------------------------------------------------------------------------


_IMAGE = [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]
_UNASKED = [
    {"role": "user", "content": "a"},
    {"type": "function_call_output", "call_id": "x", "output": ""},
]
_NO_JSON = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]
_OF_A_LIST = {"type": "function", "name": "f", "parameters": {"type": "array"}}
_REQUIRES_5 = {"type": "function", "name": "f", "parameters": {"required": 5}}
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("nonsense", {"nonsense": 1}),
    ("input[0].content[0].type", {"input": _IMAGE}),
    ("input[1].call_id", {"input": _UNASKED}),
    ("input[0].role", {"input": [{"content": "a"}]}),
    ("input[0].arguments", {"input": _NO_JSON}),
    ("reasoning.effort", {"reasoning": {"effort": "low"}}),
    ("temperature", {"temperature": 3}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].parameters", {"tools": [_OF_A_LIST]}),
    ("tools[0].parameters.required", {"tools": [_REQUIRES_5]}),
    ("tool_choice", {"tool_choice": {"type": "function", "name": "f"}}),
    ("previous_response_id", {"previous_response_id": "resp_0"}),
    ("background", {"background": True, "store": False}),
    ("include[0]", {"include": ["web_search_call.results"]}),
    ("delivery", {"delivery": "hold"}),
]


async def test_what_is_wrong_is_named(rig: Rig) -> None:
    http = await rig.http()
    for param, fields in WRONG:
        answer = await http.post("/v1/responses", json={"model": MODEL, "input": "a", **fields})
        assert answer.status_code == 400, (fields, answer.text)
        assert answer.json()["error"]["param"] == param, answer.text
    assert not rig.tokenizer.requests


async def test_a_policys_refusal_is_of_the_input(rig: Rig, client: AsyncOpenAI) -> None:
    async def refuse(call: LinkCall, request: PromptRequest) -> None:
        raise invalid("no", "messages[1].content", reason="content_policy", stage="tokenizer")

    rig.tokenizer.script = refuse
    with pytest.raises(BadRequestError) as told:
        await client.responses.create(model=MODEL, instructions="I", input="a", stream=True)
    assert told.value.param == "input[0].content"


# ---- in the background --------------------------------------------------------------------------


async def polled(client: AsyncOpenAI, id: str, *status: str) -> Response:
    found: list[Response] = []

    async def there() -> bool:
        found[:] = [await client.responses.retrieve(id)]
        return found[0].status in status

    await until(there, 20, f"it is {status}")
    return found[0]


async def test_in_the_background(rig: Rig, client: AsyncOpenAI) -> None:
    story = Story(rig)
    begun = await client.responses.create(model=MODEL, input="Well?", background=True)
    assert begun.status in ("queued", "in_progress")
    assert begun.background
    with pytest.raises(BadRequestError):
        await client.responses.create(model=MODEL, input="a", previous_response_id=begun.id)
    story.go()
    done = await polled(client, begun.id, "completed")
    assert done.output_text == TEXT
    await client.responses.delete(begun.id)
    with pytest.raises(NotFoundError):
        await client.responses.retrieve(begun.id)


async def test_cancelled(rig: Rig, client: AsyncOpenAI) -> None:
    story = Story(rig)
    begun = await client.responses.create(model=MODEL, input="Well?", background=True)
    story.go(2)

    async def told() -> bool:
        return (await client.responses.retrieve(begun.id)).output_text == TEXT[:9]

    await until(told)
    ended = await client.responses.cancel(begun.id)
    assert ended.status == "cancelled"
    await until(lambda: rig.tokenizer.cancelled == 1)
    assert (await client.responses.cancel(begun.id)).status == "cancelled"
    (entry,) = await ledger(rig, 1)
    assert ended.usage is not None
    assert (ended.usage.input_tokens, ended.usage.output_tokens) == (entry.prompt, entry.output)
    assert entry.output == 2
    events = [event async for event in await client.responses.retrieve(begun.id, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-2].type == "response.output_item.done"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response == ended


async def test_only_the_tenants_own(rig: Rig, client: AsyncOpenAI) -> None:
    told = await client.responses.create(model=MODEL, input="a")
    key, _ = await rig.keys.create("other", "test")
    other = await rig.openai(key)
    for ask in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
        with pytest.raises(NotFoundError):
            await ask(told.id)
    with pytest.raises(BadRequestError) as refused:
        await other.responses.create(model=MODEL, input="a", previous_response_id=told.id)
    assert refused.value.code == "previous_response_not_found"
    unkept = await client.responses.create(model=MODEL, input="a", store=False)
    with pytest.raises(NotFoundError):
        await client.responses.retrieve(unkept.id)
    key = {"Idempotency-Key": "k"}
    lasts = await client.responses.create(model=MODEL, input="a", store=False, extra_headers=key)
    again = await client.responses.create(model=MODEL, input="a", store=False, extra_headers=key)
    assert again.id == lasts.id
    with pytest.raises(NotFoundError):
        await client.responses.retrieve(lasts.id)
    with pytest.raises(BadRequestError):
        await client.responses.cancel(told.id)


async def test_a_stream_is_resumed_after_its_connection_and_its_gateway_were_lost(
    rig: Rig, client: AsyncOpenAI
) -> None:
    story = Story(rig)
    async with another_gateway(rig) as lost:
        first = openai.AsyncOpenAI(base_url=f"{lost.url}/v1", api_key=rig.key, max_retries=0)
        story.go(3)
        stream = await first.responses.create(
            model=MODEL, input="Well?", background=True, stream=True
        )
        text, last, id = "", -1, ""
        async for event in stream:
            last = event.sequence_number
            if event.type == "response.created":
                id = event.response.id
            if event.type == "response.output_text.delta":
                text += event.delta
            if text == TEXT[:15]:
                break
        await stream.close()
        await first.close()
        await lost.kill()
    rest = await client.responses.retrieve(id, stream=True, starting_after=last)
    story.go()
    async for event in rest:
        last += 1
        assert event.sequence_number == last
        if event.type == "response.output_text.delta":
            text += event.delta
    assert (event.type, text) == ("response.completed", TEXT)
    assert story.resumed == [0, 3]
    assert event.response.output_text == TEXT
    charged = await ledger(rig, 1)
    assert sum(entry.output for entry in charged) == 6
    async with client.responses.stream(response_id=id, starting_after=3) as again:
        assert (await again.get_final_response()).output_text == TEXT


async def test_a_retry_goes_on_behind_what_its_client_has(rig: Rig, client: AsyncOpenAI) -> None:
    http, ask = await rig.http(), {"model": MODEL, "input": "a", "stream": True}
    key = {"Idempotency-Key": "k"}
    first = await http.post("/v1/responses", json=ask, headers=key)
    again = await http.post("/v1/responses", json=ask, headers={**key, "Last-Event-ID": "2"})
    numbers = [
        [json.loads(line[6:])["sequence_number"] for line in lines if line.startswith("data: ")]
        for lines in (first.text.splitlines(), again.text.splitlines())
    ]
    assert numbers == [list(range(len(numbers[0]))), list(range(3, len(numbers[0])))]
    id, end = json.loads(first.text.splitlines()[1][6:])["response"]["id"], numbers[0][-1]
    for known, answered in ((end, 200), (end + 1, 400)):
        told = {**key, "Last-Event-ID": f"{known}"}
        query = {"stream": "true", "starting_after": known}
        for again, field in (
            (await http.post("/v1/responses", json=ask, headers=told), "Last-Event-ID"),
            (await http.get(f"/v1/responses/{id}", params=query), "starting_after"),
        ):
            assert again.status_code == answered
            if answered == 200:
                assert not again.text, "there is nothing left to tell"
            else:
                assert again.json()["error"]["param"] == field
    for fields, headers in ((ask, {}), ({**ask, "stream": False}, key)):
        told = {**headers, "Last-Event-ID": "2"}
        refused = await http.post("/v1/responses", json=fields, headers=told)
        assert refused.json()["error"]["param"] == "Last-Event-ID", "no header is ignored"
    await client.responses.delete(id)
    told = {**key, "Last-Event-ID": "0"}
    gone = await http.post("/v1/responses", json=ask, headers=told)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "run_not_found")


async def test_a_stream_that_fails_says_so(rig: Rig, client: AsyncOpenAI) -> None:
    async def breaks(call: LinkCall, request: PromptRequest) -> None:
        send(call, "T", plan=plan(request))
        await asyncio.sleep(0)
        raise ValueError("a bug")

    rig.tokenizer.script = breaks
    stream = await client.responses.create(model=MODEL, input="a", stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    begun = await client.responses.create(model=MODEL, input="a", background=True)
    failed = await polled(client, begun.id, "failed")
    assert failed.error is not None
    assert failed.error.code == "internal"


async def test_what_cannot_be_stored_is_told(
    rig: Rig, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(rig.gateway.runs.store, "_call", away)
    told = await client.responses.create(model=MODEL, input="a")
    assert (told.output_text, told.store) == ("Hello world", False)
    extension: Any = told.model_extra
    assert extension["penstock"]["warning"]
