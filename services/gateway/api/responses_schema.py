"""Bodies of POST /v1/responses: their items as messages of a chat, whose rules are theirs."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, model_validator

from services.common.config import GatewaySettings
from services.gateway.api.as_chat import Chat
from services.gateway.api.generation_schema import (
    MAX_TOP_LOGPROBS,
    Name,
    Tag,
    TemplateOptions,
)
from services.gateway.api.resources.attributes import Filters
from services.gateway.api.resources.ranking import RankingOptions
from services.gateway.api.responses_chat import NAMES, messages_of
from services.gateway.api.responses_items import Item
from services.gateway.api.schema import Body, Metadata, at_most, bad_value, missing, refuse
from services.gateway.api.tools_schema import MAX_STORES, MAX_TOOLS, FunctionName


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = Field(
        None, description="not shown to the model; taken, as clients send it"
    )
    definition: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="answers match the schema in any case")

    @model_validator(mode="after")
    def _of_its_type(self) -> "TextFormat":
        if self.type == "json_schema":
            for field, value in (("name", self.name), ("schema", self.definition)):
                if value is None:
                    raise missing(field)
        return self

    def as_chats(self) -> dict[str, Any]:
        told: dict[str, Any] = {"type": self.type}
        if self.type == "json_schema":
            told["json_schema"] = {"name": self.name, "schema": self.definition}
        return told


class TextConfig(Body):
    NEUTRAL: ClassVar = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ResponseTool(Body):
    NEUTRAL: ClassVar = {"defer_loading": (False,)}

    type: Literal["function", "file_search"]
    name: FunctionName | None = None
    description: Annotated[str, Field(max_length=16_384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="its arguments match the schema")
    vector_store_ids: Annotated[list[str], Field(max_length=MAX_STORES)] | None = None
    max_num_results: int | None = None
    filters: Filters | None = None
    ranking_options: RankingOptions | None = None

    @model_validator(mode="after")
    def _named(self) -> "ResponseTool":
        if self.type == "function" and self.name is None:
            raise missing("name")
        return self

    def as_chats(self) -> dict[str, Any]:
        told = self.model_dump(exclude_none=True)
        if self.type == "function":
            del told["type"]
            return {"type": "function", "function": told}
        return told


class NamedTool(Body):
    type: Literal["function"]
    name: FunctionName


class ToolChoice(Body):
    type: Literal["auto", "none", "required", "function", "allowed_tools"]
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _of_its_type(self) -> "ToolChoice":
        fields = {"function": ("name",), "allowed_tools": ("mode", "tools")}
        for kind, needed in fields.items():
            for field in needed:
                if (self.type == kind) != (getattr(self, field) is not None):
                    raise refuse(field, f"goes with the type {kind!r}, and only with it")
        return self

    def as_chats(self) -> dict[str, Any] | str:
        if self.type == "function":
            return {"type": "function", "function": {"name": self.name}}
        if self.type == "allowed_tools":
            named = [{"type": "function", "function": {"name": t.name}} for t in self.tools or ()]
            allowed = {"mode": self.mode, "tools": named}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        return self.type


def _as_choice(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


ChoiceField = Annotated[
    ToolChoice,
    BeforeValidator(
        _as_choice, json_schema_input_type=Literal["auto", "none", "required"] | ToolChoice
    ),
]


class Reasoning(Body):
    NEUTRAL: ClassVar = {"effort": (), "summary": (), "generate_summary": (), "context": ()}


class EventOptions(Body):
    NEUTRAL: ClassVar = {"include_obfuscation": (False,)}


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


RESULTS = "file_search_call.results"
_LOGPROBS = "message.output_text.logprobs"
Include = list[Literal["message.output_text.logprobs", "file_search_call.results"]]


class InConversation(Body):
    """Which one it goes on with; its answer is a part of it then."""

    id: Annotated[str, Field(max_length=128)]


def _by_id(value: Any) -> Any:
    return {"id": value} if isinstance(value, str) else value


class ResponseInput(Body):
    """What a response is made from."""

    model: Name
    input: Annotated[
        list[Item],
        FailFast(),
        at_most("max_messages"),
        BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    ]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    conversation: Annotated[
        InConversation | None,
        BeforeValidator(_by_id, json_schema_input_type=str | InConversation | None),
    ] = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateOptions | None = Field(None, description="extension, as vLLM's")

    @model_validator(mode="after")
    def _says_something(self) -> "ResponseInput":
        goes_on = self.previous_response_id is not None or self.conversation is not None
        if not self.input and not goes_on and not self.instructions:
            raise refuse("input", "must not be empty")
        if self.conversation is not None and self.previous_response_id is not None:
            raise refuse("conversation", "goes with no 'previous_response_id'")
        return self

    def chat(self, before: Sequence[Item], limits: GatewaySettings) -> Chat:
        """`before`: the conversation that this goes on with. Raises INVALID_ARGUMENT in this
        request's own terms."""
        answered = {item.call_id for item in (*before, *self.input) if item.output is not None}
        for item in before:
            if item.type == "function_call" and item.call_id not in answered:
                why = f"has no output of the function call {item.call_id!r}, which waits for one"
                raise bad_value("input", why)
        whose = "conversation" if self.conversation is not None else "previous_response_id"
        told = Chat(messages_of(self.instructions, before, self.input, whose), NAMES)
        told.understand(self._fields(told.messages), limits)
        return told

    def _fields(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        fields["chat_template_kwargs"] = self.chat_template_kwargs
        if self.tools:
            fields["tools"] = [tool.as_chats() for tool in self.tools]
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        idle = self.tool_choice is not None and self.tool_choice.type in ("auto", "none")
        if self.tool_choice is not None and (self.tools or not idle):
            fields["tool_choice"] = self.tool_choice.as_chats()
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.as_chats()
        return {name: value for name, value in fields.items() if value is not None}


class InputTokensRequest(ResponseInput):
    NEUTRAL: ClassVar = {"truncation": ("disabled",)}


class ResponsesRequest(ResponseInput):
    NEUTRAL: ClassVar = {
        "service_tier": ("auto", "default"),
        "prompt": (),
        "max_tool_calls": (),
        "context_management": (),
        "moderation": (),
    }

    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Include | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: Tag | None = Field(None, description="shown in the request's record")
    safety_identifier: Tag | None = Field(None, description="shown in the request's record")
    prompt_cache_key: Tag | None = Field(
        None, description="shown in the request's record; prompts are cached without"
    )
    metadata: Metadata | None = None
    seed: int | None = Field(None, description="extension")
    top_k: int | None = Field(None, description="extension; 0: off")
    stop: list[str] | str | None = Field(None, description="extension")
    delivery: Literal["stream", "hybrid", "hold"] | None = Field(
        None, description="extension: of a stream"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "ResponsesRequest":
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "only allowed when 'stream' is true")
        if self.background and self.store is False:
            raise refuse("background", "what runs in the background is stored")
        return self

    @property
    def stores(self) -> bool:
        return self.store is not False

    def _fields(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        same = ("temperature", "top_p", "seed", "top_k", "stop", "stream", "delivery", "user")
        fields = {name: getattr(self, name) for name in same}
        fields["max_completion_tokens"] = self.max_output_tokens
        if _LOGPROBS in (self.include or ()) or self.top_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        tags = ("safety_identifier", "prompt_cache_key")
        shown = {name: value for name in tags if (value := getattr(self, name)) is not None}
        fields["metadata"] = self.metadata if not shown else {**shown, **(self.metadata or {})}
        given = {name: value for name, value in fields.items() if value is not None}
        return {**super()._fields(messages), **given}
