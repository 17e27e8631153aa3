"""Tools that a chat offers, calls of them, and their results."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from protos.common_pb2 import Tool as OfferedTool
from protos.common_pb2 import ToolCall, ToolChoice
from services.gateway.api.resources.attributes import Filters
from services.gateway.api.resources.ranking import RankingOptions
from services.gateway.api.schema import INVALID, MAX_DEPTH, Body, missing, refuse, too_deep
from services.gateway.faults import spelt

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_STORES = 10
MAX_PARAMETERS = 64 * 1024  # characters of a function's schema

FunctionName = Annotated[
    str,
    spelt(r"^[a-zA-Z0-9_-]{1,64}$", "1 to 64 letters of ASCII, digits, underscores and hyphens"),
]
CallId = Annotated[str, spelt(r"^[!-~]{1,128}$", "1 to 128 visible characters of ASCII")]
StoreId = Annotated[str, Field(min_length=1, max_length=256)]


def _texts(value: Any) -> Any:
    if all(isinstance(one, str | None) for one in (value if isinstance(value, list) else [value])):
        return value
    raise PydanticCustomError(INVALID, "must be a text or a list of texts")


def _of_an_object(value: Any) -> Any:
    """A boolean is a schema, too, and in older drafts a list in `items`."""
    return None if isinstance(value, bool | list) else value


_Within = Annotated["_Schema | None", BeforeValidator(_of_an_object)]


class _Schema(BaseModel):
    """What chat templates read of a JSON schema, and would stumble over. `jsonschema` looks at all
    of it, in seconds for what a body may hold."""

    model_config = ConfigDict(strict=True)

    type: Annotated[Any, AfterValidator(_texts)] = None
    enum: list[Any] | None = None
    required: list[str] | None = None
    properties: dict[str, _Within] | None = None
    items: _Within = None
    anyOf: list[_Within] | None = None
    oneOf: list[_Within] | None = None
    allOf: list[_Within] | None = None


def _sound(schema: dict[str, Any]) -> dict[str, Any]:
    _Schema.model_validate(schema)
    return schema


class Function(Body):
    name: FunctionName
    description: Annotated[str, Field(max_length=16_384)] | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_sound)] | None = None
    strict: bool | None = Field(None, description="its arguments match the schema")

    @model_validator(mode="after")
    def _parameters_of_an_object(self) -> "Function":
        if self.parameters and self.parameters.get("type", "object") != "object":
            raise refuse("parameters", "must be a JSON schema of an object")
        if too_deep(self.parameters):
            raise refuse("parameters", f"may be nested at most {MAX_DEPTH} deep")
        if self.parameters and len(json.dumps(self.parameters)) > MAX_PARAMETERS:
            raise refuse("parameters", f"may have at most {MAX_PARAMETERS} characters")
        return self


class Tool(Body):
    """A function that the client runs, or a search that Penstock does."""

    type: Literal["file_search", "function"]
    function: Function | None = None
    vector_store_ids: (
        Annotated[list[StoreId], Field(min_length=1, max_length=MAX_STORES)] | None
    ) = None
    max_num_results: Annotated[int, Field(ge=1, le=50)] | None = None
    filters: Filters | None = None
    ranking_options: RankingOptions | None = None

    @model_validator(mode="after")
    def _of_its_type(self) -> "Tool":
        search = self.type == "file_search"
        needed, other = (
            ("vector_store_ids", "function") if search else ("function", "vector_store_ids")
        )
        if getattr(self, needed) is None:
            raise missing(needed)
        if getattr(self, other) is not None:
            raise refuse(other, f"a tool of type {self.type!r} has none")
        for field in ("max_num_results", "filters", "ranking_options"):
            if getattr(self, field) is not None and not search:
                raise refuse(field, f"a tool of type {self.type!r} has none")
        return self


class NamedFunction(Body):
    name: FunctionName


def _as_choice(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


class AllowedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class Choice(Body):
    type: Literal["auto", "none", "required", "function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _of_its_type(self) -> "Choice":
        for field in ("function", "allowed_tools"):
            if (self.type == field) != (getattr(self, field) is not None):
                raise refuse(field, f"goes with the type {field!r}, and only with it")
        return self

    @property
    def names(self) -> list[str]:
        """The functions that it names."""
        if self.allowed_tools is not None:
            return [tool.function.name for tool in self.allowed_tools.tools]
        return [self.function.name] if self.function is not None else []


ToolsField = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ChoiceField = Annotated[
    Choice,
    BeforeValidator(
        _as_choice, json_schema_input_type=Literal["auto", "none", "required"] | Choice
    ),
]


class CalledFunction(Body):
    name: FunctionName
    arguments: str
    parsed_arguments: Any = Field(None, description="of OpenAI's client; no effect")


class Call(Body):
    """Of an earlier answer."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="of a streamed one; no effect")

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> "Call":
        """Chat templates write them out; a model's own may have been cut off."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise refuse("function.arguments", "must be a JSON object")
        if too_deep(arguments):
            raise refuse("function.arguments", f"may be nested at most {MAX_DEPTH} deep")
        return self

    def told(self) -> ToolCall:
        return ToolCall(id=self.id, name=self.function.name, arguments=self.function.arguments)


def functions(tools: Sequence[Tool]) -> list[OfferedTool]:
    return [
        OfferedTool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=json.dumps(tool.function.parameters) if tool.function.parameters else "",
            strict=bool(tool.function.strict),
        )
        for tool in tools
        if tool.function is not None
    ]


def check_tools(tools: Sequence[Tool], choice: Choice | None) -> None:
    """Raises what a validator of the whole request may raise."""
    names = [tool.function.name for tool in tools if tool.function is not None]
    if len(tools) - len(names) > 1:
        raise refuse("tools", "there may be at most one file_search")
    for name in names:
        if names.count(name) > 1:
            raise refuse("tools", f"the function {name!r} is there twice")
    if choice is None:
        return
    if not tools:
        raise refuse("tool_choice", "only allowed when 'tools' is given")
    if choice.type == "required" and not names:
        raise refuse("tool_choice", "needs a function among 'tools'")
    for name in choice.names:
        if name not in names:
            raise refuse("tool_choice", f"'tools' has no function {name!r}")


def chosen(choice: Choice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if choice.function is not None:
        return ToolChoice(mode=ToolChoice.NAMED, name=choice.function.name)
    if choice.allowed_tools is not None:
        return ToolChoice(mode=choice.allowed_tools.mode.upper(), allowed=choice.names)
    return ToolChoice(mode=choice.type.upper())
