"""Answers of chats and completions."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from services.gateway.api.openapi.answers.common import (
    Citation,
    Citations,
    Logprob,
    Penstock,
    Plan,
    Priced,
)

Finish = Literal["stop", "length", "tool_calls", "content_filter"]


class CachedTokens(TypedDict):
    cached_tokens: int


class Speculation(TypedDict):
    draft_tokens: int
    accepted_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    speculation: NotRequired[Speculation]


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatLogprobs(TypedDict):
    content: list[Logprob]
    refusal: None


class ChatAnswer(TypedDict):
    """`content` is null of one that only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Citation]
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[str]


class ChoiceExtension(TypedDict):
    citations: Citations


class ChatChoice(TypedDict):
    """`penstock`: of further choices to a prompt with passages."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    penstock: NotRequired[ChoiceExtension]


class ChatCompletion(TypedDict):
    """`metadata`: of a stored one that is told again."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    penstock: Penstock
    metadata: NotRequired[dict[str, str]]


class DeletedChat(TypedDict):
    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]


class SentMessage(TypedDict):
    """Of a stored chat: `content_parts` where it came in parts."""

    id: str
    role: str
    content: str | None
    content_parts: list[dict[str, Any]] | None
    refusal: None
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]
    annotations: NotRequired[list[Citation]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(TypedDict):
    """`penstock`: in each choice's last one. `usage`: if `include_usage` asks for it, null but in
    the last, or with `continuous_usage_stats` of the choice so far."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    penstock: NotRequired[Penstock | Priced]


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish


class SeveralPrompts(Priced):
    request_id: str
    plans: list[Plan]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    penstock: Penstock | SeveralPrompts


class TextChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class CompletionChunk(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: NotRequired[Usage | None]
    penstock: NotRequired[Penstock | Priced]
