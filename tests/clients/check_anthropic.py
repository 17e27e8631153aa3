"""Anthropic's client: texts, streams, tools and their results, tokens counted."""

from typing import Any

import anthropic

ASKED: list[Any] = [{"role": "user", "content": "What is the pressure of the water?"}]
TOOL: Any = {
    "name": "pressure",
    "description": "The pressure of a pipe.",
    "input_schema": {
        "type": "object",
        "properties": {"pipe": {"enum": ["main", "side"]}},
        "required": ["pipe"],
        "additionalProperties": False,
    },
}


def main(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="demo", messages=ASKED, system="Be brief.")
    told = client.messages.create(model="demo", messages=ASKED, system="Be brief.", max_tokens=40)
    used = told.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)
    with client.messages.stream(model="demo", messages=ASKED, max_tokens=40) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content if block.type == "text")
    assert final.stop_reason in ("end_turn", "max_tokens")

    any_tool: Any = {"type": "any"}
    called = client.messages.create(
        model="demo", messages=ASKED, max_tokens=400, tools=[TOOL], tool_choice=any_tool
    )
    assert called.stop_reason == "tool_use"
    use = next(block for block in called.content if block.type == "tool_use")
    assert use.input["pipe"] in ("main", "side")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "3 bar"}
    rest = [*ASKED, {"role": "assistant", "content": called.content}]
    rest.append({"role": "user", "content": [result]})
    assert client.messages.create(model="demo", messages=rest, max_tokens=40, tools=[TOOL]).content
    assert client.beta.messages.create(model="demo", messages=ASKED, max_tokens=5).content

    try:
        client.messages.create(model="none", messages=ASKED, max_tokens=5)
    except anthropic.NotFoundError:
        pass
    else:
        raise AssertionError("a model that is not there")
    try:
        client.messages.batches.list()
    except anthropic.NotFoundError as error:
        told = error.message
    else:
        raise AssertionError("they are not offered")
    assert "Anthropic's message batches" in told


if __name__ == "__main__":
    main(anthropic.Anthropic())
