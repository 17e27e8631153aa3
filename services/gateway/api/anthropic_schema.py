"""Bodies of POST /v1/messages, Anthropic's: as a chat, whose rules are theirs."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, model_validator

from services.common.config import GatewaySettings
from services.gateway.api.as_chat import Chat, Names, Said
from services.gateway.api.generation_schema import Name, Tag
from services.gateway.api.messages_schema import MAX_PARTS
from services.gateway.api.schema import Body, at_most, missing, refuse
from services.gateway.api.tools_schema import MAX_TOOLS, CallId, FunctionName

_CACHED = "prompts are cached without"


class Block(Body):
    """Of a message or a tool's result."""

    NEUTRAL: ClassVar = {"citations": (), "caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = Field(None, description="of an earlier answer; no effect")
    id: CallId | None = None
    name: FunctionName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: "Blocks | None" = None
    is_error: bool | None = None
    cache_control: Any = Field(None, description=_CACHED)

    @model_validator(mode="after")
    def _of_its_type(self) -> "Block":
        needs: dict[str, tuple[str, ...]] = {
            "text": ("text",),
            "tool_use": ("id", "name", "input"),
            "tool_result": ("tool_use_id",),
            "thinking": ("thinking",),
        }
        may: dict[str, set[str]] = {
            "tool_result": {"content", "is_error"},
            "thinking": {"signature"},
        }
        for field in needs[self.type]:
            if getattr(self, field) is None:
                raise missing(field)
        own = {"type", "cache_control", *needs[self.type], *may.get(self.type, ())}
        for field in type(self).model_fields:
            if field not in own and getattr(self, field) is not None:
                raise refuse(field, f"a block of type {self.type!r} has none")
        return self


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_Blocks = Annotated[list[Block], Field(max_length=MAX_PARTS)]
Blocks = Annotated[_Blocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _Blocks)]


class Turn(Body):
    role: Literal["user", "assistant"]
    content: Blocks


class SystemText(Body):
    NEUTRAL: ClassVar = {"citations": ()}

    type: Literal["text"]
    text: str
    cache_control: Any = Field(None, description=_CACHED)


_System = Annotated[list[SystemText], Field(max_length=MAX_PARTS)]
System = Annotated[_System, BeforeValidator(_as_blocks, json_schema_input_type=str | _System)]


class MessagesTool(Body):
    NEUTRAL: ClassVar = {
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "eager_input_streaming": (False,),
        "input_examples": ([],),
    }

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Annotated[str, Field(max_length=16_384)] | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="its arguments match the schema")
    cache_control: Any = Field(None, description=_CACHED)


class MessagesChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "MessagesChoice":
        if (self.type == "tool") != (self.name is not None):
            raise refuse("name", "goes with the type 'tool', and only with it")
        return self


class About(Body):
    user_id: Tag | None = Field(None, description="shown in the request's record")


class OutputFormat(Body):
    type: Literal["json_schema"]
    definition: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    NEUTRAL: ClassVar = {"effort": (), "task_budget": ()}

    format: OutputFormat | None = None


class Conversation(Body):
    """What a message answers."""

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1), FailFast(), at_most("max_messages")]
    system: System | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = Field(None, description=_CACHED)

    @model_validator(mode="after")
    def _answered(self) -> "Conversation":
        for index, message in enumerate(self.messages):
            for block in message.content:
                uses = block.type in ("tool_use", "thinking")
                if uses != (message.role == "assistant") and block.type != "text":
                    at = f"messages[{index}].content"
                    raise refuse(at, f"no {block.type} in a message of role {message.role!r}")
        if self.messages[-1].role == "assistant":
            at = f"messages[{len(self.messages) - 1}].role"
            raise refuse(at, "the last message is the user's: an answer's beginning is not taken")
        return self

    def chat(self, limits: GatewaySettings) -> Chat:
        """Raises INVALID_ARGUMENT in this request's own terms."""
        told = Chat(_messages(self), _NAMES)
        told.understand(self._fields(told.messages), limits)
        return told

    def _fields(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.tools:
            fields["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.input_schema,
                        "strict": tool.strict,
                    },
                }
                for tool in self.tools
            ]
        if (choice := self.tool_choice) is not None:
            if choice.type == "tool":
                fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
            else:
                fields["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
            if choice.disable_parallel_tool_use is not None:
                fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.output_config is not None and self.output_config.format is not None:
            wanted = {"name": "answer", "schema": self.output_config.format.definition}
            fields["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return {name: value for name, value in fields.items() if value is not None}


_NEUTRAL = {"thinking": (), "mcp_servers": ([],), "context_management": (), "speed": ("standard",)}


class CountTokensRequest(Conversation):
    NEUTRAL: ClassVar = _NEUTRAL


class MessagesRequest(Conversation):
    NEUTRAL: ClassVar = {
        **_NEUTRAL,
        "service_tier": ("auto", "standard_only"),
        "container": (),
        "inference_geo": (),
    }

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: About | None = None

    def _fields(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        fields = {
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "user": self.metadata.user_id if self.metadata is not None else None,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return {**super()._fields(messages), **given}


_NAMES = Names(
    fields=(
        ("max_completion_tokens", "max_tokens"),
        ("stop", "stop_sequences"),
        ("response_format.json_schema", "output_config.format"),
        ("response_format", "output_config.format"),
        ("tool_choice.function", "tool_choice"),
        ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
        ("user", "metadata.user_id"),
    ),
    within=(
        (".tool_call_id", ".tool_use_id"),
        (".arguments", ".input"),
        (".parameters", ".input_schema"),
    ),
    lone=frozenset({"system"}),
)


def _messages(asked: Conversation) -> list[Said]:
    found: list[Said] = []
    if asked.system:
        text = "".join(part.text for part in asked.system)
        found.append(Said({"role": "system", "content": text}, "system", []))
    for index, turn in enumerate(asked.messages):
        of_role = _user if turn.role == "user" else _assistant
        found += of_role(turn, f"messages[{index}]")
    return found


def _user(turn: Turn, whose: str) -> Iterator[Said]:
    """Results of tools are messages of their own, before what the user says to them."""
    texts: list[str] = []
    for number, block in enumerate(turn.content):
        if block.type == "tool_result":
            text = "".join(part.text or "" for part in block.content or ())
            if block.is_error:
                text = f"Error: {text}"
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
            yield Said(result, f"{whose}.content[{number}]", [])
        else:
            texts.append(block.text or "")
    if texts or not turn.content:
        yield Said({"role": "user", "content": "".join(texts)}, whose, [])


def _assistant(turn: Turn, whose: str) -> Iterator[Said]:
    text = "".join(block.text or "" for block in turn.content)
    thought = "".join(block.thinking or "" for block in turn.content)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    calls: list[str] = []
    for number, block in enumerate(turn.content):
        if block.type == "tool_use":
            calls.append(f"{whose}.content[{number}]")
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            call = {"id": block.id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    if calls and not text:
        message["content"] = None
    yield Said(message, whose, calls)
