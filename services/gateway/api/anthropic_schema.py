"""Bodies of POST /v1/messages, Anthropic's: as a chat, whose rules are theirs."""

import json
import re
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, FailFast, Field, model_validator

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.gateway.api.generation_schema import ChatCompletionRequest, Name, Tag
from services.gateway.api.messages_schema import MAX_PARTS
from services.gateway.api.schema import Body, at_most, refuse, validated
from services.gateway.api.tools_schema import MAX_TOOLS, CallId, FunctionName, missing

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


class Said(Body):
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


class MessagesRequest(Body):
    NEUTRAL: ClassVar = {
        "service_tier": ("auto", "standard_only"),
        "thinking": (),
        "container": (),
        "inference_geo": (),
        "speed": ("standard",),
        "mcp_servers": ([],),
        "context_management": (),
    }

    model: Name
    max_tokens: int
    messages: Annotated[list[Said], Field(min_length=1), FailFast(), at_most("max_messages")]
    system: System | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: About | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = Field(None, description=_CACHED)

    @model_validator(mode="after")
    def _answered(self) -> "MessagesRequest":
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

    def chat(self, limits: GatewaySettings) -> "Chat":
        """Raises INVALID_ARGUMENT in this request's own terms."""
        told = Chat(self)
        try:
            told.request = validated(ChatCompletionRequest, self._fields(told.messages), limits)
        except PenstockError as error:
            told.rename(error)
            raise
        return told

    def _fields(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "user": self.metadata.user_id if self.metadata is not None else None,
        }
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


class _Origin(NamedTuple):
    """Which of the request's fields a message of the chat is from, and each of its calls."""

    whole: str
    calls: list[str]


_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?")
_FUNCTION = re.compile(r"(tools\[\d+\])\.function")
_RENAMED = (
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("tool_choice.function", "tool_choice"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("user", "metadata.user_id"),
)
_OF_BLOCKS = {".tool_call_id": ".tool_use_id", ".arguments": ".input"}


class Chat:
    """The chat that a request is, and what its fields are called there."""

    request: ChatCompletionRequest

    def __init__(self, asked: MessagesRequest) -> None:
        self.messages: list[dict[str, Any]] = []
        self._origins: list[_Origin] = []
        if asked.system:
            text = "".join(part.text for part in asked.system)
            self._add({"role": "system", "content": text}, "system")
        for index, said in enumerate(asked.messages):
            of_role = self._user if said.role == "user" else self._assistant
            of_role(said, f"messages[{index}]")

    def _add(self, message: dict[str, Any], whose: str) -> _Origin:
        self.messages.append(message)
        self._origins.append(_Origin(whose, []))
        return self._origins[-1]

    def _user(self, said: Said, whose: str) -> None:
        """Results of tools are messages of their own, before what the user says to them."""
        texts: list[str] = []
        for number, block in enumerate(said.content):
            if block.type == "tool_result":
                text = "".join(part.text or "" for part in block.content or ())
                if block.is_error:
                    text = f"Error: {text}"
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
                self._add(result, f"{whose}.content[{number}]")
            else:
                texts.append(block.text or "")
        if texts or not said.content:
            self._add({"role": "user", "content": "".join(texts)}, whose)

    def _assistant(self, said: Said, whose: str) -> None:
        text = "".join(block.text or "" for block in said.content)
        thought = "".join(block.thinking or "" for block in said.content)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        origin = self._add(message, whose)
        if thought:
            message["reasoning_content"] = thought
        for number, block in enumerate(said.content):
            if block.type == "tool_use":
                origin.calls.append(f"{whose}.content[{number}]")
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
        if "tool_calls" in message and not text:
            message["content"] = None

    def rename(self, error: PenstockError) -> None:
        """What is at fault, as it is called in the request."""
        theirs, ours = error.param, _FUNCTION.sub(r"\1", error.param)
        if (found := _MESSAGE.match(theirs)) and int(found[1]) < len(self._origins):
            origin, field = self._origins[int(found[1])], theirs[found.end() :]
            ours = origin.whole if found[2] is None else origin.calls[int(found[2])]
            if ours != "system":
                ours += _OF_BLOCKS.get(field, field)
        ours = ours.replace(".parameters", ".input_schema")
        for name, renamed in _RENAMED:
            if ours == name or ours.startswith((name + ".", name + "[")):
                ours = renamed + ours.removeprefix(name)
                break
        if theirs and ours != theirs:
            error.message = error.message.replace(f"'{theirs}'", f"'{ours}'")
            error.param = ours
