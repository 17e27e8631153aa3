"""The Responses API's items as messages of a chat, and what the chat's fields are called there."""

from collections.abc import Sequence
from typing import Any

from services.gateway.api.as_chat import Names, Said
from services.gateway.api.responses_items import Item, text_of

NAMES = Names(
    fields=(
        ("messages", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("max_tokens", "max_output_tokens"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
        ("tool_choice.function", "tool_choice"),
        ("tool_choice.allowed_tools", "tool_choice"),
    ),
    within=(
        (".tool_call_id", ".call_id"),
        (".id", ".call_id"),
        (".reasoning_content", ".content"),
    ),
    lone=frozenset({"instructions", "previous_response_id", "conversation"}),
)


def messages_of(
    instructions: str | None, before: Sequence[Item], items: Sequence[Item], goes_on_with: str
) -> list[Said]:
    """`goes_on_with`: the field that names what was said before. An assistant's reasoning, text and
    calls that follow each other are one message."""
    said: list[Said] = []
    if instructions:
        said.append(Said({"role": "system", "content": instructions}, "instructions", []))
    told = [(item, goes_on_with) for item in before]
    told += [(item, f"input[{index}]") for index, item in enumerate(items)]
    own: dict[str, Any] | None = None  # the assistant's message that may go on
    for item, whose in told:
        if item.type == "file_search_call":  # what it found was for the answer of then
            continue
        if item.type == "message" and item.role != "assistant":
            own = None
            content = {"role": item.role, "content": text_of(item.content)}
            said.append(Said(content, whose, []))
            continue
        if item.type == "function_call_output":
            own = None
            result = {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
            said.append(Said(result, whose, []))
            continue
        goes_on = own is not None and (
            item.type == "function_call"
            or (item.type == "message" and not {"tool_calls", "said"} & own.keys())
        )
        if own is None or not goes_on:
            own = {"role": "assistant", "content": ""}
            said.append(Said(own, whose, []))
        if item.type == "message":
            own["content"], own["said"] = text_of(item.content), True
        elif item.type == "reasoning":
            own["reasoning_content"] = text_of(item.content) or text_of(item.summary)
        else:
            function = {"name": item.name, "arguments": item.arguments}
            said[-1].calls.append(whose)
            own.setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": function}
            )
    for one in said:
        one.message.pop("said", None)
        if one.message.get("tool_calls") and not one.message["content"]:
            one.message["content"] = None
    return said
