"""litellm without its proxy: completion, streams, tools, forms, embeddings' errors as its own."""

import asyncio
import json
import os
from typing import Any, Literal

import litellm
import openai
from pydantic import BaseModel

ASKED = [{"role": "user", "content": "What is the pressure of the water?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "pressure",
        "description": "The pressure of a pipe.",
        "parameters": {
            "type": "object",
            "properties": {"pipe": {"enum": ["main", "side"]}},
            "required": ["pipe"],
            "additionalProperties": False,
        },
    },
}


class Answer(BaseModel):
    topic: Literal["water", "oil"]
    sure: bool


COMMON: dict[str, Any] = {
    "model": "openai/demo",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "messages": ASKED,
    "max_tokens": 400,
    "temperature": 0,
}
HOSTED = COMMON | {"model": "hosted_vllm/demo"}


def main(common: dict[str, Any]) -> None:
    told = litellm.completion(**common)
    assert told.choices[0].message.content
    assert told.usage.completion_tokens
    chunks = list(litellm.completion(**common, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = litellm.stream_chunk_builder(chunks, messages=ASKED)
    assert whole.choices[0].message.content == told.choices[0].message.content

    called = litellm.completion(**common, tools=[TOOL], tool_choice="required").choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert json.loads(call.function.arguments)["pipe"] in ("main", "side")
    result = {"role": "tool", "tool_call_id": call.id, "content": "3 bar"}
    rest = common | {"messages": [*ASKED, called.message, result]}
    assert litellm.completion(**rest, tools=[TOOL]).choices
    streamed = litellm.stream_chunk_builder(
        list(litellm.completion(**common, tools=[TOOL], tool_choice="required", stream=True))
    )
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments

    formed = litellm.completion(**common, response_format=Answer)
    Answer.model_validate_json(formed.choices[0].message.content)
    for wrong, kind in (
        ({"model": common["model"].replace("demo", "none")}, litellm.NotFoundError),
        ({"api_key": "psk-nobody"}, litellm.AuthenticationError),
        ({"max_tokens": -1}, litellm.BadRequestError),
    ):
        try:
            litellm.completion(**(common | wrong))
        except kind:
            pass
        else:
            raise AssertionError(wrong)


async def later() -> None:
    told = await litellm.acompletion(**COMMON)
    assert told.choices[0].message.content
    stream = await litellm.acompletion(**COMMON, stream=True)
    assert [chunk async for chunk in stream]
    kept = await litellm.acompletion(**COMMON, store=True)
    stored = openai.OpenAI().chat.completions.retrieve(kept.id)
    assert stored.choices[0].message.content == kept.choices[0].message.content
    text = await litellm.atext_completion(**{k: v for k, v in COMMON.items() if k != "messages"},
                                          prompt="The water")  # fmt: skip
    assert text.choices[0].text


if __name__ == "__main__":
    main(COMMON)
    main(HOSTED)
    asyncio.run(later())
