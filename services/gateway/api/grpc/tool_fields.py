"""Tools, calls and forms of a gRPC request in REST's shape, to be validated by REST's rules."""

from collections.abc import Iterable
from typing import Any

from protos.common_pb2 import Constraint, Message, Tool, ToolChoice
from protos.gateway_pb2 import ChatRequest, PublicTokenizeRequest
from services.common.errors import invalid
from services.gateway.api.schema import read_json
from services.gateway.api.tools_schema import MAX_CALLS, MAX_TOOLS


def tool_fields(request: ChatRequest) -> dict[str, Any]:
    """Those that are set."""
    fields = template_fields(request)
    if request.HasField("tool_choice"):
        fields["tool_choice"] = _choice(request.tool_choice)
    if request.HasField("parallel_tool_calls"):
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    return fields


def template_fields(request: ChatRequest | PublicTokenizeRequest) -> dict[str, Any]:
    """Those that are set, of what a prompt's template takes beside messages."""
    fields: dict[str, Any] = {}
    if request.tools:
        offered = request.tools[: MAX_TOOLS + 1]
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(offered)]
    if request.chat_template_kwargs:
        fields["chat_template_kwargs"] = _options(request.chat_template_kwargs)
    return fields


def _options(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        raise invalid("It is no JSON.", "chat_template_kwargs") from None


def call_fields(message: Message) -> dict[str, Any]:
    """Of an assistant's message, or of a tool's."""
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls[: MAX_CALLS + 1]
    ]
    return {
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id or None,
        "reasoning_content": message.reasoning or None,
    }


def form_fields(constraint: Constraint) -> dict[str, Any]:
    match constraint.WhichOneof("kind"):
        case "json_object" if constraint.json_object:
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            return {"guided_json": constraint.json_schema}
        case "regex":
            return {"guided_regex": constraint.regex}
        case "choice":
            return {"guided_choice": list(constraint.choice.texts)}
        case "grammar":
            return {"guided_grammar": constraint.grammar}
    raise invalid("A constraint of a kind that is not known here.", "constraint")


FORMS: Iterable[tuple[str, str]] = (
    ("guided_json", "constraint.json_schema"),
    ("guided_regex", "constraint.regex"),
    ("guided_choice", "constraint.choice"),
    ("guided_grammar", "constraint.grammar"),
    ("response_format", "constraint"),
)
"""What REST calls them, and what they are called here."""


def _tool(tool: Tool, at: str) -> dict[str, Any]:
    try:
        parameters = read_json(tool.parameters) if tool.parameters else None
    except ValueError:
        raise invalid("The parameters are no JSON.", f"{at}.parameters") from None
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _choice(choice: ToolChoice) -> Any:
    if choice.mode == ToolChoice.NAMED:
        return {"type": "function", "function": {"name": choice.name}}
    if choice.mode not in ToolChoice.Mode.values():
        raise invalid("A mode that is not known here.", "tool_choice.mode")
    if choice.allowed:
        tools = [{"type": "function", "function": {"name": name}} for name in choice.allowed]
        mode = ToolChoice.Mode.Name(choice.mode).lower()
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return ToolChoice.Mode.Name(choice.mode).lower()
