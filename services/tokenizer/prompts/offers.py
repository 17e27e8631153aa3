"""Which tools a chat offers its model."""

from collections.abc import Sequence

from protos.common_pb2 import Tool, ToolChoice
from protos.tokenizer_pb2 import Chat


def offered(chat: Chat) -> Sequence[Tool]:
    """None where none may be called: the model does not hear of them then."""
    return () if chat.tool_choice.mode == ToolChoice.NONE else chat.tools


def callable_tools(chat: Chat) -> Sequence[Tool]:
    """Those that the model may call; it hears of the others, too."""
    tools, choice = offered(chat), chat.tool_choice
    if choice.mode == ToolChoice.NAMED:
        return [tool for tool in tools if tool.name == choice.name]
    if choice.allowed:
        return [tool for tool in tools if tool.name in choice.allowed]
    return tools
