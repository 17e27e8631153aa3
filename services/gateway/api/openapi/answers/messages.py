"""Answers in Anthropic's shapes."""

from typing import Any, Literal

from typing_extensions import TypedDict

from services.gateway.api.openapi.answers.common import Failure, Penstock


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any


class MessageUsage(TypedDict):
    """What the cache had is not in `input_tokens`."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
    stop_sequence: str | None
    usage: MessageUsage
    penstock: Penstock


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: Failure
