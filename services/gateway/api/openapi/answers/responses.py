"""Answers of OpenAI's Responses API."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from services.gateway.api.openapi.answers.common import Citation, Logprob, Penstock

Progress = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Citation]
    logprobs: list[Logprob]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    id: str
    status: Progress
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(TypedDict):
    id: str
    status: Progress
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputReasoning(TypedDict):
    id: str
    status: Progress
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]


class FileSearchResult(TypedDict):
    file_id: str
    filename: str
    score: float
    text: str
    attributes: dict[str, bool | float | str]


class OutputSearch(TypedDict):
    id: str
    type: Literal["file_search_call"]
    status: Progress
    queries: list[str]
    results: list[FileSearchResult] | None


class ResponseError(TypedDict):
    code: str
    message: str


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens", "content_filter"]


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ReasoningSettings(TypedDict):
    effort: None
    summary: None


class TextSettings(TypedDict):
    format: dict[str, Any]


class InConversation(TypedDict):
    id: str


class Response(TypedDict):
    """With what its request said."""

    id: str
    object: Literal["response"]
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    created_at: int
    background: bool
    conversation: InConversation | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    reasoning: ReasoningSettings
    service_tier: Literal["default"]
    text: TextSettings
    output: list[OutputMessage | OutputCall | OutputReasoning | OutputSearch]
    usage: ResponseUsage | None
    penstock: Penstock


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItem(TypedDict):
    """As it was sent."""

    id: str
    type: Literal[
        "message", "function_call", "function_call_output", "reasoning", "file_search_call"
    ]
    status: NotRequired[Progress]
    role: NotRequired[str]
    content: NotRequired[list[dict[str, Any]]]
    phase: NotRequired[str]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    parsed_arguments: NotRequired[Any]
    output: NotRequired[list[dict[str, Any]]]
    summary: NotRequired[list[dict[str, Any]]]
    queries: NotRequired[list[str]]
    results: NotRequired[list[Any] | None]


class StoredConversation(TypedDict):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(TypedDict):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]
