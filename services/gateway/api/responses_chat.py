"""The Responses API's items as messages of a chat, and what the chat's fields are called there."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from services.common.errors import PenstockError
from services.gateway.api.generation_schema import ChatCompletionRequest
from services.gateway.api.responses_items import Item, text_of


class Said(NamedTuple):
    message: dict[str, Any]
    whose: str  # the request's field that it is from
    calls: list[str]  # the same of each of its calls


_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?")
_OF_ITEMS = {".tool_call_id": ".call_id", ".id": ".call_id", ".reasoning_content": ".content"}
_FUNCTION = re.compile(r"(tools\[\d+\])\.function")
_RENAMED = (
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("tool_choice.function", "tool_choice"),
    ("tool_choice.allowed_tools", "tool_choice"),
)


class Chat:
    """The chat that a request is, and what its fields are called there."""

    request: ChatCompletionRequest

    def __init__(self, said: Sequence[Said]) -> None:
        self.messages = [one.message for one in said]
        self._said = said

    def rename(self, error: PenstockError) -> None:
        """What is at fault, as it is called in the request."""
        theirs, ours = error.param, error.param
        if (found := _MESSAGE.match(theirs)) and int(found[1]) < len(self._said):
            said = self._said[int(found[1])]
            ours = said.whose if found[2] is None else said.calls[int(found[2])]
            if ours.startswith("input["):
                field = theirs[found.end() :]
                ours += _OF_ITEMS.get(field, field)
        else:
            ours = rename(theirs)
        if theirs and ours != theirs:
            error.message = error.message.replace(f"'{theirs}'", f"'{ours}'")
            error.param = ours


def rename(param: str) -> str:
    param = _FUNCTION.sub(r"\1", param)
    for theirs, ours in _RENAMED:
        if param == theirs or param.startswith((theirs + ".", theirs + "[")):
            return ours + param.removeprefix(theirs)
    return param


def messages_of(
    instructions: str | None, before: Sequence[Item], items: Sequence[Item]
) -> list[Said]:
    """An assistant's reasoning, text and calls that follow each other are one message."""
    said: list[Said] = []
    if instructions:
        said.append(Said({"role": "system", "content": instructions}, "instructions", []))
    told = [(item, "previous_response_id") for item in before]
    told += [(item, f"input[{index}]") for index, item in enumerate(items)]
    own: dict[str, Any] | None = None  # the assistant's message that may go on
    for item, whose in told:
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
