"""OpenAI's client: parse() with pydantic, tools, streams, logprobs, sync and async; responses,
stored chats, conversations, uploads, files, vector stores, moderations, batches; what is not
offered."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

ASKED = [{"role": "user", "content": "What is the pressure of the water?"}]


class Part(BaseModel):
    name: Literal["pump", "valve"]
    turns: int = Field(ge=0, le=9)


class Plan(BaseModel):
    parts: list[Part] = Field(min_length=1, max_length=2)
    urgent: bool


class GetPressure(BaseModel):
    """The pressure of a pipe."""

    pipe: Literal["main", "side"]


def main(client: openai.OpenAI) -> None:
    told = client.chat.completions.parse(
        model="demo", messages=ASKED, response_format=Plan, max_tokens=500
    )
    assert isinstance(told.choices[0].message.parsed, Plan)
    again = [*ASKED, told.choices[0].message, {"role": "user", "content": "Again."}]
    assert (
        client.chat.completions.parse(
            model="demo", messages=again, response_format=Plan, max_tokens=500
        )
        .choices[0]
        .message.parsed
    )

    with client.chat.completions.stream(
        model="demo", messages=ASKED, response_format=Plan, max_tokens=500
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert isinstance(final.parsed, Plan)
    assert {"chunk", "content.delta", "content.done"} <= kinds

    tool = openai.pydantic_function_tool(GetPressure)
    called = client.chat.completions.parse(
        model="demo", messages=ASKED, tools=[tool], tool_choice="required", max_tokens=500
    ).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetPressure)
    result = {"role": "tool", "tool_call_id": call.id, "content": "3 bar"}
    answered = client.chat.completions.create(
        model="demo", messages=[*ASKED, called.message, result], tools=[tool], max_tokens=30
    )
    assert answered.choices[0].message.content or answered.choices[0].message.tool_calls

    with client.chat.completions.stream(
        model="demo", messages=ASKED, tools=[tool], tool_choice="required", max_tokens=500
    ) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
    assert [type(event.parsed_arguments) for event in done] == [GetPressure]

    several = client.chat.completions.create(
        model="demo", messages=ASKED, n=3, logprobs=True, top_logprobs=2, max_tokens=5, seed=1
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert all(len(c.logprobs.content) for c in several.choices)  # type: ignore[union-attr,arg-type]
    last = list(
        client.chat.completions.create(
            model="demo", messages=ASKED, stream=True, stream_options={"include_usage": True},
            max_tokens=5,
        )
    )[-1]  # fmt: skip
    assert last.usage is not None
    assert last.usage.completion_tokens <= 5


def responses(client: openai.OpenAI) -> None:
    told = client.responses.parse(model="demo", input="And the oil?", text_format=Plan)
    assert isinstance(told.output_parsed, Plan)
    stored = client.responses.retrieve(told.id)
    assert stored.output_text == told.output_text
    with client.responses.stream(
        model="demo", input="Why?", previous_response_id=told.id, max_output_tokens=20
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    behind = client.responses.create(
        model="demo", input="Go on.", background=True, max_output_tokens=2000
    )
    assert client.responses.cancel(behind.id).status in ("cancelled", "completed")
    client.responses.delete(told.id)


def stored_chats(client: openai.OpenAI) -> None:
    own = client.chat.completions
    told = [
        own.create(
            model="demo", messages=ASKED, max_tokens=5, store=True, metadata={"n": str(n)}
        ).id
        for n in range(3)
    ]
    assert [one.id for one in own.list(limit=2)] == told
    assert [one.id for one in own.list(metadata={"n": "1"}, model="demo")] == told[1:2]
    assert own.retrieve(told[0]).choices[0].message.content is not None
    changed = own.update(told[0], metadata={"topic": "water"})
    assert changed.to_dict()["metadata"] == {"topic": "water"}
    (sent,) = own.messages.list(told[0])
    assert sent.content == ASKED[0]["content"]
    for id in told:
        assert own.delete(id).deleted
    assert list(own.list()) == []


def conversations(client: openai.OpenAI) -> None:
    own = client.conversations
    made = own.create(items=[{"role": "user", "content": "Hello"}], metadata={"topic": "water"})
    (item,) = own.items.list(made.id)
    assert own.items.retrieve(item.id or "", conversation_id=made.id).type == "message"
    asked: Any = {"model": "demo", "conversation": made.id, "max_output_tokens": 5}
    client.responses.create(input="Why?", **asked)
    behind = client.responses.create(input="And then?", background=True, **asked)
    until = time.monotonic() + 60
    while behind.status in ("queued", "in_progress") and time.monotonic() < until:
        time.sleep(0.1)
        behind = client.responses.retrieve(behind.id)
    under_key = {"Idempotency-Key": made.id}
    *_, last = client.responses.create(input="Well?", stream=True, extra_headers=under_key, **asked)
    assert last.type in ("response.completed", "response.incomplete")
    said = [one for one in own.items.list(made.id, order="asc", limit=2) if one.type == "message"]
    assert [one.role for one in said] == ["user", *["user", "assistant"] * 3]
    assert own.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert own.items.delete(item.id or "", conversation_id=made.id).id == made.id
    counted = client.responses.input_tokens.count(model="demo", conversation=made.id, input="Why?")
    assert counted.input_tokens > 0
    assert own.delete(made.id).deleted


def uploads(client: openai.OpenAI) -> None:
    text = b"The water of the main pipe has a pressure of three bar. " * 40
    done = client.uploads.upload_file_chunked(
        file=text,
        filename="water.txt",
        bytes=len(text),
        mime_type="text/plain",
        purpose="assistants",
        part_size=500,
    )
    assert done.file is not None
    assert client.files.content(done.file.id).read() == text
    begun = client.uploads.create(
        filename="a.txt", bytes=5, mime_type="text/plain", purpose="assistants"
    )
    client.uploads.parts.create(begun.id, data=b"Hello")
    assert client.uploads.cancel(begun.id).status == "cancelled"
    client.files.delete(done.file.id)


def not_offered(client: openai.OpenAI) -> None:
    """Each is named, at once: none is tried again."""
    calls: list[Callable[[], object]] = [
        lambda: client.images.generate(prompt="a kettle"),
        lambda: client.fine_tuning.jobs.list(),
        lambda: client.containers.list(),
        lambda: client.responses.compact(model="demo", input="Hello"),
    ]
    for call in calls:
        error = _error_of(call)
        assert (error.status_code, error.code) == (404, "not_offered"), error
        assert "Not offered here: " in error.message


def _error_of(call: Callable[[], object]) -> openai.APIStatusError:
    try:
        call()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("it is not offered")


def stores(client: openai.OpenAI) -> None:
    text = b"The water of the main pipe has a pressure of three bar."
    file = client.files.create(file=("water.txt", text), purpose="assistants")
    assert client.files.content(file.id).read() == text
    store = client.vector_stores.create(name="manuals")
    done = client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id)
    assert done.status == "completed", done.last_error
    (found,) = client.vector_stores.search(store.id, query="water pressure").data
    assert found.file_id == file.id
    assert client.vector_stores.files.content(file.id, vector_store_id=store.id).data[0].text
    with_attributes(client, store.id, file.id)
    client.vector_stores.delete(store.id)
    client.files.delete(file.id)
    assert file.id not in [one.id for one in client.files.list()]


def with_attributes(client: openai.OpenAI, store: str, file: str) -> None:
    """In a store of one file."""
    stores = client.vector_stores
    text = b"The water of the second pipe has a pressure of nine bar."
    other = client.files.create(file=("second.txt", text), purpose="assistants").id
    batch = stores.file_batches.create_and_poll(
        store, files=[{"file_id": other, "attributes": {"pipe": 2, "dry.season": False}}]
    )
    assert (batch.status, batch.file_counts.completed) == ("completed", 1)
    changed = stores.files.update(file, vector_store_id=store, attributes={"pipe": 1})
    assert changed.attributes == {"pipe": 1}

    def found(*comparisons: tuple[str, str, Any], together: Any = "and") -> set[str]:
        filters: Any = {
            "type": together,
            "filters": [{"type": t, "key": k, "value": v} for t, k, v in comparisons],
        }
        page = stores.search(store, query=["water", "pressure"], filters=filters)
        return {one.file_id for one in page.data}

    assert found(("eq", "pipe", 1)) == {file}
    assert found(("gt", "pipe", 1)) == found(("eq", "dry.season", False)) == {other}
    assert found(("ne", "pipe", 1)) == found(("nin", "pipe", [1, 3])) == {other}
    assert found(("lt", "pipe", 2), ("eq", "dry.season", False), together="or") == {file, other}
    assert found(("lt", "pipe", 2), ("eq", "dry.season", False)) == set()
    assert stores.update(store, name="pipes").name == "pipes"
    answer = client.responses.create(
        model="demo",
        input="What is the pressure of the second pipe?",
        tools=[
            {
                "type": "file_search",
                "vector_store_ids": [store],
                "filters": {"type": "eq", "key": "pipe", "value": 2},
            }
        ],
        include=["file_search_call.results"],
        max_output_tokens=16,
    )
    call = answer.output[0]
    assert call.type == "file_search_call"
    assert [one.file_id for one in call.results or ()] == [other]
    client.files.delete(other)


def moderations(client: openai.OpenAI) -> None:
    fine, rude = client.moderations.create(input=["a kettle", "you blockhead"]).results
    assert not fine.flagged
    assert rude.flagged
    assert rude.categories.hate
    assert not rude.categories.violence


def batches(client: openai.OpenAI) -> None:
    body = {"model": "demo", "messages": ASKED, "max_tokens": 5}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name in ("a", "b")
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    until = time.monotonic() + 120
    while batch.status not in ("completed", "failed", "expired") and time.monotonic() < until:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.output_file_id is not None
    told = client.files.content(batch.output_file_id).text.splitlines()
    assert {json.loads(line)["custom_id"] for line in told} == {"a", "b"}


async def concurrently(client: openai.AsyncOpenAI) -> None:
    async def one() -> str:
        told = await client.chat.completions.create(
            model="demo", messages=ASKED, response_format={"type": "json_object"}, max_tokens=400,
            tools=None,
        )  # fmt: skip
        return told.choices[0].message.content or ""

    for text in await asyncio.gather(*(one() for _ in range(4))):
        assert text.lstrip().startswith("{")
        if text.rstrip().endswith("}"):
            json.loads(text, strict=False)


if __name__ == "__main__":
    main(openai.OpenAI())
    for part in (
        responses,
        stored_chats,
        conversations,
        uploads,
        stores,
        moderations,
        batches,
        not_offered,
    ):
        part(openai.OpenAI())
    asyncio.run(concurrently(openai.AsyncOpenAI()))
